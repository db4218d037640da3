"""Launcher of the row quantization kernel: ``quantize_rows`` on GPU tensors, CPU tensors in Triton's interpreter."""

import torch
from torch import Tensor

from qgemm.kernels.launch.device import DeviceLimits, device_limits
from qgemm.kernels.launch.launch import MAX_ROWS_TO_OVERLAP, Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.quantize.kernels import _quantize_rows_kernel
from qgemm.numerics.blocks import BLOCK
from qgemm.numerics.formats import FP8, INT8
from qgemm.numerics.integers import cdiv, next_power_of_2

MAX_ROW_BYTES_IN_REGISTERS = 131_072  # that a program holds; a longer row is read twice
LONG_ROW_BLOCK = 8192  # values of a longer row that are read at a time


def quantize_rows(
    x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None, dtype: torch.dtype = INT8.storage
) -> tuple[Tensor, Tensor]:
    """``dispatch.quantize_rows`` on a GPU."""
    K = x.shape[-1]
    rows = x.reshape(-1, K) if K else x.reshape(x.shape[:-1].numel(), 0)
    q = x.new_empty(x.shape, dtype=dtype)
    row_scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if row_scale.numel():
        launch = plan_quantization(rows, scale, zero_point, dtype=dtype)
        launch(rows, q.view(torch.int8), row_scale, scale, zero_point)
    return q, row_scale


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """``dispatch.quantize_groups`` on a GPU."""
    K, count = x.shape[-1], cdiv(x.shape[-1], BLOCK)
    q = x.new_empty(x.shape, dtype=FP8.storage)
    scale = x.new_empty((*x.shape[:-1], count), dtype=torch.float32)
    if q.numel():
        rows = x.reshape(-1, K)
        launch = plan_quantization(rows, None, dtype=FP8.storage, group_strides=(count, 1))
        launch(rows, q.view(torch.int8), scale, None, None)
    return q, scale


def plan_quantization(
    rows: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None = None,
    next_early: bool = False,
    dtype: torch.dtype = INT8.storage,
    group_strides: tuple[int, int] | None = None,
) -> Launch:
    """The quantization of ``rows`` like these, ``[M, K]``, to ``dtype``. The kernel gets fp8 as bytes, int8.

    ``group_strides``: from a row's scale to the next row's, and from the scale of 128 values to the next; None for one
    scale per row. ``next_early``: the next kernel on the stream is one of qgemm's products, which may start early.
    Weights must not be quantized so: a product may load them before it waits for this kernel.
    """
    kind = (
        plan_quantization, rows.shape, rows.stride(), rows.dtype, rows.device,
        scale is None, zero_point is None, next_early, dtype, group_strides,
    )  # fmt: skip
    launch: Launch | None = plans.get(kind)
    if launch is None:
        launch = plans.keep(kind, _make_launch(rows, next_early, dtype, group_strides))
    return launch


def _make_launch(rows: Tensor, next_early: bool, dtype: torch.dtype, group_strides: tuple[int, int] | None) -> Launch:
    (M, K), limits = rows.shape, device_limits(rows.device)
    block, blocks, threads = row_blocks(K, rows.itemsize, max_row_bytes(limits), LONG_ROW_BLOCK)
    warps = max(1, threads // limits.warp_size)
    grid, next_early = programs(M, limits, next_early)
    if group_strides is not None:
        block = max(block, BLOCK)
    numbers = (M, K, *rows.stride(), *(group_strides or (1, 1)))
    constants = (block, blocks, limits.pdl, next_early, rounding(dtype, limits), group_strides is not None)
    return Launch(_quantize_rows_kernel, grid, numbers, constants, num_warps=warps, pdl=limits.pdl)


def rounding(dtype: torch.dtype, limits: DeviceLimits) -> bool | None:
    """The kernels' ``E4M3`` for ``dtype``: None for int8; for fp8, whether an instruction rounds to it."""
    return None if dtype == INT8.storage else limits.rounds_fp8


def programs(M: int, limits: DeviceLimits, next_early: bool | None = None) -> tuple[int, bool]:
    """How many programs a kernel with a row each has, and whether the next may start early; None: if rows are few."""
    if next_early is None:
        next_early = M <= MAX_ROWS_TO_OVERLAP
    if not (next_early and limits.pdl):
        return M, False
    # The next kernel's programs arrive while these wait, and go where there are fewest programs: so each SM gets one.
    return max(M, limits.num_sms), True


def max_row_bytes(limits: DeviceLimits) -> int:
    """How many bytes of a row a program keeps in registers.

    It is half on NVIDIA's GPUs before Hopper. They have no maximum of two pairs of 16-bit values, and Triton 3.9 uses
    more registers without it.
    """
    half = not limits.pdl and limits.warp_size != 64
    return MAX_ROW_BYTES_IN_REGISTERS // 2 if half else MAX_ROW_BYTES_IN_REGISTERS


def row_blocks(K: int, itemsize: int, longest: int, part: int) -> tuple[int, int, int]:
    """``(BLOCK, BLOCKS, threads)`` for rows of ``K`` values; ``BLOCKS`` is 0 for a row that is read twice.

    A thread has 8 values of a block, which are 16 bytes of a 16-bit type. Of a row of 1024 values or more that is read
    once, a thread has 32 to 64. Half or twice as many threads took as long on an H200.
    """
    if longest < K * itemsize:
        return part, 0, max(32, part // 16)
    threads = 32 << (min(max(K // 1024, 1), 32).bit_length() - 1)
    block = min(8 * threads, next_power_of_2(K))
    return block, max(1, cdiv(K, block)), threads
