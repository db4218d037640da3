"""Launcher of the kernel that reorders columns, on GPU tensors, or CPU tensors in Triton's interpreter."""

from __future__ import annotations

from torch import Tensor

from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.launch import MAX_ROWS_TO_OVERLAP, Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.quantize import launcher as quantize
from qgemm.kernels.reorder.kernels import _reorder_kernel
from qgemm.numerics.integers import cdiv

BLOCK = 512  # columns of a program
FEW_ROWS, ROWS = 16, 4  # up to so many, a program has one; else this many


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """``x.index_select(-1, order)`` for a float ``x [..., K]`` and a contiguous int32 ``order [K]``."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = x.new_empty(x.shape)
    if out.numel():
        find_launch(rows)(rows, order, out)
    return out


def find_launch(x: Tensor) -> Launch:
    """The launch for ``x [M, K]`` with contiguous columns, to be called with it, the order and the output."""
    kind = (reorder, x.shape, x.stride(0), x.dtype, x.device)
    launch: Launch | None = plans.get(kind)
    if launch is None:
        (M, K), limits = x.shape, device_limits(x.device)
        rows = 1 if M <= FEW_ROWS else ROWS
        work = cdiv(M, rows) * cdiv(K, BLOCK)
        grid, next_early = quantize.programs(work, limits, M <= MAX_ROWS_TO_OVERLAP)
        constants = (rows, BLOCK, limits.pdl, next_early)
        launch = Launch(_reorder_kernel, grid, (M, K, work, x.stride(0)), constants, num_warps=4, pdl=limits.pdl)
        plans.keep(kind, launch)
    return launch
