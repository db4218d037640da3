"""Norms ahead of quantized layers: ``norm_quantize``, ``add_norm_quantize``, ``add_norm``."""
