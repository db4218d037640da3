"""Launcher of the kernel that reorders columns, on GPU tensors, or CPU tensors in Triton's interpreter.

PyTorch's ``index_select`` takes twice as long with many rows, and five times with one. No kernel beside it overlaps
with it, so a decode step of Llama 3 8B in ``int4-ordered`` took 84 us for a layer instead of 51
(docs/performance/rows.md#order-of-columns).
"""

from __future__ import annotations

import math

from torch import Tensor

from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.launch import MAX_ROWS_TO_OVERLAP, Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.quantize import launcher as quantize
from qgemm.kernels.reorder.kernels import _reorder_kernel
from qgemm.numerics.integers import cdiv

TILES = {1: (512, 4), 16: (2048, 4), math.inf: (4096, 8)}
"""The columns of a program and its warps, by the maximum number of rows."""


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """``dispatch.reorder`` on a GPU, for a float ``x`` and a contiguous ``order``."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
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
        block, warps = next(tile for most, tile in TILES.items() if most >= M)
        work = M * cdiv(K, block)
        grid, next_early = quantize.programs(work, limits, M <= MAX_ROWS_TO_OVERLAP)
        constants = (block, limits.pdl, next_early)
        launch = Launch(_reorder_kernel, grid, (work, K, x.stride(0)), constants, num_warps=warps, pdl=limits.pdl)
        plans.keep(kind, launch)
    return launch
