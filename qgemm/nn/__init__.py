"""Quantized modules."""

from qgemm.nn.linear import QuantLinear

__all__ = ["QuantLinear"]
