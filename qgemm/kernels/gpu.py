"""The kernels' functions on a GPU, in Triton; importing this imports Triton. For ``dispatch.py`` alone."""

# ruff: noqa: F401
from qgemm.kernels.gemm.launcher import int_mm, matmul, scaled_mm
from qgemm.kernels.grouped.launcher import grouped_mm
from qgemm.kernels.linear.launcher import quant_linear
from qgemm.kernels.moe.launcher import experts
from qgemm.kernels.quantize.launcher import quantize_rows
