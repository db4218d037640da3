"""Norms ahead of quantized layers: ``norm_quantize``, ``add_norm_quantize``, ``add_norm``.

Behind residuals: ``post_norm``, ``post_norm_quantize``.
"""
