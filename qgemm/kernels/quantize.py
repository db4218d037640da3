"""Launcher of the row quantization kernel: ``quantize_rows`` on GPU tensors, CPU tensors in Triton's interpreter."""

import functools

import torch
from torch import Tensor

from qgemm.kernels.launch import Launch
from qgemm.kernels.quantize_kernels import _quantize_rows_kernel
from qgemm.kernels.reference import MIN_SCALE

LONGEST_WHOLE_ROW = 16_384  # values that a program keeps in registers; twice as many spill
PART_OF_A_ROW = 8192  # values at a time of a longer one


def quantize_rows(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``dispatch.quantize_rows`` on a GPU."""
    K = x.shape[-1]
    rows = x.reshape(-1, K) if K else x.reshape(x.shape[:-1].numel(), 0)
    q = x.new_empty(x.shape, dtype=torch.int8)
    row_scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if row_scale.numel():
        plan = _plan(*rows.shape, rows.stride(), x.dtype, scale is None, x.device, LONGEST_WHOLE_ROW, PART_OF_A_ROW)
        plan(rows, q, row_scale, scale)
    return q, row_scale


@functools.lru_cache(maxsize=4096)
def _plan(
    M: int,
    K: int,
    strides: tuple[int, int],
    dtype: torch.dtype,
    dynamic: bool,
    device: torch.device,
    longest: int,
    part: int,
) -> Launch:
    whole = longest >= K
    block = 1 << max(K - 1, 0).bit_length() if whole else part
    return Launch(_quantize_rows_kernel, M, (K, *strides), (MIN_SCALE, block, whole), num_warps=warps(block))


def warps(block: int) -> int:
    """How many warps take ``block`` values: 32 values a thread."""
    return max(1, block // 1024)
