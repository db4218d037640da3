"""Quantized modules."""

from qgemm.nn.experts import QuantExperts
from qgemm.nn.linear import QuantLinear
from qgemm.nn.quant_layer import QuantLayer

__all__ = ["QuantExperts", "QuantLayer", "QuantLinear"]
