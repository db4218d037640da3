"""Fused parts of models: several quantized layers, and the operations between them, in fewer kernels.

Modules and their names stay: a fused layer is the same module of the model, with another ``forward``.
"""
