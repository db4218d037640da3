"""Quantized modules."""

from qgemm.nn.asymmetric import AsymmetricLinear
from qgemm.nn.attention import QuantMultiheadAttention
from qgemm.nn.block_scaled import BlockScaledLinear
from qgemm.nn.experts import QuantExperts
from qgemm.nn.int4_int8 import Int4Int8Linear
from qgemm.nn.kinds import linear_class
from qgemm.nn.linear import QuantLinear
from qgemm.nn.linear_layer import LinearLayer
from qgemm.nn.outliers import OutlierLinear
from qgemm.nn.prescaled import PrescaledLinear
from qgemm.nn.quant_layer import QuantLayer
from qgemm.nn.rotated import RotatedLinear
from qgemm.nn.weight_only import WeightOnlyLinear

__all__ = [
    "AsymmetricLinear",
    "BlockScaledLinear",
    "Int4Int8Linear",
    "LinearLayer",
    "OutlierLinear",
    "PrescaledLinear",
    "QuantExperts",
    "QuantLayer",
    "QuantLinear",
    "QuantMultiheadAttention",
    "RotatedLinear",
    "WeightOnlyLinear",
    "linear_class",
]
