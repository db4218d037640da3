"""Launcher of the kernel that reorders columns, on GPU tensors, or CPU tensors in Triton's interpreter.

PyTorch's ``index_select`` takes 1.5 times as long with many rows. With one, of 4,096 columns, it takes 4.5 us instead
of 1.0 (one H200), and the kernels beside it neither overlap with it nor with one another: a decode step of Llama 3 8B
in ``int4-ordered`` took 84 us for a layer instead of 51.
"""

from __future__ import annotations

from torch import Tensor

from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.launch import MAX_ROWS_TO_OVERLAP, Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.quantize import launcher as quantize
from qgemm.kernels.reorder.kernels import _reorder_kernel
from qgemm.numerics.integers import cdiv

ONE_ROW_BLOCK, BLOCK = 512, 2048  # columns of a program


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """``dispatch.reorder`` on a GPU, for a float ``x`` and a contiguous ``order``."""
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
        block = ONE_ROW_BLOCK if M == 1 else BLOCK
        work = M * cdiv(K, block)
        grid, next_early = quantize.programs(work, limits, M <= MAX_ROWS_TO_OVERLAP)
        constants = (block, limits.pdl, next_early)
        launch = Launch(_reorder_kernel, grid, (work, K, x.stride(0)), constants, num_warps=4, pdl=limits.pdl)
        plans.keep(kind, launch)
    return launch
