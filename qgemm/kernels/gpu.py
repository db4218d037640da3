"""The kernels' functions on a GPU, in Triton; importing this imports Triton. For ``dispatch.py`` alone."""

# ruff: noqa: F401
from qgemm.kernels.attention.launcher import decode_attention
from qgemm.kernels.cpu import rotate, rotate_and_store, store_key_value
from qgemm.kernels.gemm.launcher import int_mm, matmul, scaled_mm
from qgemm.kernels.grouped.launcher import grouped_mm
from qgemm.kernels.linear.launcher import quant_linear
from qgemm.kernels.moe.launcher import experts
from qgemm.kernels.quantize.launcher import quantize_rows
from qgemm.kernels.reference import activation_quantize_reference as activation_quantize
from qgemm.kernels.reference import add_norm_quantize_reference as add_norm_quantize
from qgemm.kernels.reference import add_norm_reference as add_norm
from qgemm.kernels.reference import norm_quantize_reference as norm_quantize
