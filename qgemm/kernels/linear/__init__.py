"""Quantized linear layers: rows quantized and multiplied."""
