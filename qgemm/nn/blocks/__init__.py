"""Fused parts of models: several quantized layers, and what lies between them, as fewer kernels.

Modules and their names stay: a fused layer of a model is the same module, with another ``forward``.
"""
