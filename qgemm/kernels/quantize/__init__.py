"""Quantization of rows: ``quantize_rows``."""
