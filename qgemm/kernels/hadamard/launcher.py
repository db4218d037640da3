"""Launcher of the Hadamard kernel, on GPU tensors, or CPU tensors in Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from qgemm.kernels.hadamard.kernels import _hadamard_kernel
from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.launch import MAX_ROWS_TO_OVERLAP, Launch
from qgemm.kernels.launch.plans import plans
from qgemm.numerics.hadamard import block_size
from qgemm.numerics.integers import cdiv

MIN_SIZE = 16  # that a tensor core sums over
MAX_SIDE = 128
MIN_SQUARE = MIN_SIZE * MIN_SIZE
ROWS = 16  # of a tile, which is that many smaller blocks
VALUES_OF_THREAD = 32
SHARED_BYTES_OF_VALUE = 8  # a value of the block, and what the sums are split into


def fits(x: Tensor) -> bool:
    """Whether the kernel takes ``x [..., K]``: 16 bits, blocks of 16 to 16,384 values, and room for one on an SM."""
    n = block_size(x.shape[-1])
    if x.dtype not in (torch.bfloat16, torch.float16) or not MIN_SIZE <= n <= MAX_SIDE**2:
        return False
    return n * SHARED_BYTES_OF_VALUE <= device_limits(x.device).shared_memory


def hadamard(x: Tensor) -> Tensor:
    """``dispatch.hadamard`` of an ``x`` that ``fits``."""
    rows = x.resolve_neg().contiguous()
    out = torch.empty_like(rows)
    if out.numel():
        find_launch(rows, out)(rows, out)
    return out


def find_launch(x: Tensor, out: Tensor) -> Launch:
    """The launch of such a call, for contiguous tensors."""
    kind = (hadamard, x.numel(), x.shape[-1], x.dtype, x.device)
    launch: Launch | None = plans.get(kind)
    if launch is None:
        n, limits = block_size(x.shape[-1]), device_limits(x.device)
        bits, blocks = n.bit_length() - 1, x.numel() // n
        is_one = n >= MIN_SQUARE
        b = 1 << (bits + 1) // 2 if is_one else n
        a = n // b if is_one else ROWS
        next_early = limits.pdl and x.numel() // x.shape[-1] <= MAX_ROWS_TO_OVERLAP
        warps = min(max(a * b // VALUES_OF_THREAD // limits.warp_size, 1), 8)
        launch = Launch(
            _hadamard_kernel, blocks if is_one else cdiv(blocks, a), (blocks,),
            (2.0 ** (-bits / 2), a, b, is_one, limits.pdl, next_early), num_warps=warps, pdl=limits.pdl,
        )  # fmt: skip
        plans.keep(kind, launch)
    return launch
