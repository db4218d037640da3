"""The kernels' functions on a GPU, in Triton; importing this imports Triton. Only for ``dispatch.py``."""

# ruff: noqa: F401
from qgemm.kernels.activation.launcher import activate, activation_quantize
from qgemm.kernels.gemm.launcher import int_mm, matmul, scaled_mm
from qgemm.kernels.grouped.launcher import grouped_mm
from qgemm.kernels.linear.launcher import quant_linear
from qgemm.kernels.moe.launcher import experts
from qgemm.kernels.moe.weight_launcher import weight_only_experts
from qgemm.kernels.norm.launcher import norm_rows
from qgemm.kernels.quantize.launcher import quantize_groups, quantize_rows
from qgemm.kernels.router.launcher import route
