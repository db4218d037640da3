"""The kernels' functions on a GPU, in Triton; importing this imports Triton."""

from qgemm.kernels.experts_launch import experts
from qgemm.kernels.gemm import int_mm, matmul, scaled_mm
from qgemm.kernels.grouped import grouped_mm
from qgemm.kernels.linear import plan_quant_linear, quant_linear
from qgemm.kernels.quantize import quantize_rows

__all__ = [
    "experts",
    "grouped_mm",
    "int_mm",
    "matmul",
    "plan_quant_linear",
    "quant_linear",
    "quantize_rows",
    "scaled_mm",
]
