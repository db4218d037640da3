"""Launcher of xIELU's kernel, on GPU tensors, or CPU tensors in Triton's interpreter; PyTorch takes 18 kernels."""

from __future__ import annotations

from torch import Tensor

from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.quantize import launcher as quantize
from qgemm.kernels.xielu.coefficients import Coefficients
from qgemm.kernels.xielu.kernels import _xielu_kernel
from qgemm.numerics.integers import cdiv

BLOCK = 1024  # values per program


def xielu(x: Tensor, coefficients: Coefficients) -> Tensor:
    """``dispatch.xielu`` on a GPU, for a contiguous ``x``."""
    out = x.new_empty(x.shape)
    if out.numel():
        find_launch(x)(x, *coefficients, out)
    return out


def find_launch(x: Tensor) -> Launch:
    """The launch of such a call, to be called with its tensors and the output."""
    kind = (xielu, x.numel(), x.dtype, x.device)
    launch: Launch | None = plans.get(kind)
    if launch is None:
        limits, programs = device_limits(x.device), cdiv(x.numel(), BLOCK)
        grid, next_early = quantize.programs(programs, limits)
        constants = (BLOCK, limits.pdl, next_early)
        launch = Launch(_xielu_kernel, grid, (x.numel(),), constants, num_warps=4, pdl=limits.pdl)
        plans.keep(kind, launch)
    return launch
