"""Activations ahead of quantized layers: ``activation_quantize``."""
