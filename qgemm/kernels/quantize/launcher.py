"""Launcher of the row quantization kernel: ``quantize_rows`` on GPU tensors, CPU tensors in Triton's interpreter."""

import functools

import torch
from torch import Tensor

from qgemm.kernels.launch.device import DeviceLimits, device_limits
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.quantize.kernels import _quantize_rows_asymmetric_kernel, _quantize_rows_kernel

LONGEST_WHOLE_ROW = 131_072  # bytes of a row that a program keeps in registers, at most
PART_OF_A_ROW = 8192  # values at a time of a longer one
# Up to so many rows, the product that follows may start before rows are quantized, to load its weights meanwhile: 0.5
# to 2 us less for both on an H200. With more, Hopper's may too (``hopper.starts_early``); others weren't tried.
MOST_ROWS_TO_OVERLAP = 64


def quantize_rows(x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``dispatch.quantize_rows`` on a GPU."""
    K = x.shape[-1]
    rows = x.reshape(-1, K) if K else x.reshape(x.shape[:-1].numel(), 0)
    q = x.new_empty(x.shape, dtype=torch.int8)
    row_scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if row_scale.numel() and zero_point is None:
        plan(rows, scale)(rows, q, row_scale, scale)
    elif row_scale.numel():
        longest = longest_whole_row(device_limits(rows.device))
        _plan_asymmetric(*rows.shape, rows.stride(), rows.dtype, rows.device, longest, PART_OF_A_ROW)(
            rows, q, row_scale, scale, zero_point
        )
    return q, row_scale


def plan(rows: Tensor, scale: Tensor | None, next_early: bool = False) -> Launch:
    """The quantization of ``rows`` like these, ``[M, K]``.

    ``next_early``: what follows on the stream is one of qgemm's products, which may start early if it likes. Not for
    weights: a product may load those before it waits for this kernel.
    """
    longest = longest_whole_row(device_limits(rows.device))
    return _plan(*rows.shape, rows.stride(), rows.dtype, scale is None, rows.device, next_early, longest, PART_OF_A_ROW)


@functools.lru_cache(maxsize=4096)
def _plan(
    M: int,
    K: int,
    strides: tuple[int, int],
    dtype: torch.dtype,
    dynamic: bool,
    device: torch.device,
    next_early: bool,
    longest: int,
    part: int,
) -> Launch:
    block, blocks, threads = row_blocks(K, dtype.itemsize, longest, part)
    limits = device_limits(device)
    warps = max(1, threads // limits.warp_size)
    next_early = next_early and limits.pdl
    # The next kernel's programs come while these wait, and go where there are fewest: so each multiprocessor has one.
    grid = max(M, limits.num_sms) if next_early else M
    constants = (block, blocks, limits.pdl, next_early)
    return Launch(_quantize_rows_kernel, grid, (M, K, *strides), constants, num_warps=warps, pdl=limits.pdl)


@functools.lru_cache(maxsize=4096)
def _plan_asymmetric(
    M: int, K: int, strides: tuple[int, int], dtype: torch.dtype, device: torch.device, longest: int, part: int
) -> Launch:
    block, blocks, threads = row_blocks(K, dtype.itemsize, longest, part)
    limits = device_limits(device)
    warps = max(1, threads // limits.warp_size)
    constants = (block, blocks, limits.pdl)
    return Launch(_quantize_rows_asymmetric_kernel, M, (M, K, *strides), constants, num_warps=warps, pdl=limits.pdl)


def longest_whole_row(limits: DeviceLimits) -> int:
    """How many bytes of a row a program keeps in registers.

    Half on NVIDIA's before Hopper: without its maximum of two pairs of 16-bit values Triton 3.9 takes more of them.
    """
    return LONGEST_WHOLE_ROW if limits.pdl or limits.warp_size == 64 else LONGEST_WHOLE_ROW // 2


def row_blocks(K: int, itemsize: int, longest: int, part: int) -> tuple[int, int, int]:
    """``(BLOCK, BLOCKS, threads)`` for rows of ``K`` values; ``BLOCKS`` is 0 for a row that is read twice.

    A thread has 8 values of a block: 16 bytes of a 16-bit type. Of a row that is read once and has 1024 values or more,
    it has 32 to 64. Half or twice as many threads took as long on an H200.
    """
    if longest < K * itemsize:
        return part, 0, max(32, part // 16)
    threads = 32 << (min(max(K // 1024, 1), 32).bit_length() - 1)
    block = min(8 * threads, 1 << max(K - 1, 0).bit_length())
    return block, max(1, -(-K // block)), threads
