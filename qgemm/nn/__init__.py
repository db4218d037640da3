"""Quantized modules."""

from qgemm.nn.asymmetric import AsymmetricLinear
from qgemm.nn.attention import QuantMultiheadAttention
from qgemm.nn.experts import QuantExperts
from qgemm.nn.kinds import linear_class
from qgemm.nn.linear import QuantLinear
from qgemm.nn.linear_layer import LinearLayer
from qgemm.nn.outliers import OutlierLinear
from qgemm.nn.packed import PackedLinear
from qgemm.nn.quant_layer import QuantLayer
from qgemm.nn.rotated import RotatedLinear

__all__ = [
    "AsymmetricLinear",
    "LinearLayer",
    "OutlierLinear",
    "PackedLinear",
    "QuantExperts",
    "QuantLayer",
    "QuantLinear",
    "QuantMultiheadAttention",
    "RotatedLinear",
    "linear_class",
]
