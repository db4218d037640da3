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
MAX_SIZE = 4096  # larger blocks take longer than PyTorch's products
MIN_SQUARE = MIN_SIZE * MIN_SIZE
FEW_ROWS, MANY_ROWS = 16, 64  # of a tile, each of which is a smaller block
VALUES_OF_THREAD = 32


def fits(x: Tensor) -> bool:
    """Whether the kernel takes ``x [..., K]``: in 16 bits, with blocks of 16 to 4,096 values."""
    return x.dtype in (torch.bfloat16, torch.float16) and MIN_SIZE <= block_size(x.shape[-1]) <= MAX_SIZE


def hadamard(x: Tensor) -> Tensor:
    """``dispatch.hadamard`` of an ``x`` that ``fits``."""
    rows = x.resolve_neg().contiguous()
    out = x.new_empty(x.shape)  # empty_like keeps the strides of dimensions of size 1
    if out.numel():
        find_launch(rows)(rows, out)
    return out


def find_launch(x: Tensor) -> Launch:
    """The launch of such a call, for a contiguous ``x``, to be called with it and the output."""
    kind = (hadamard, x.numel(), x.shape[-1], x.dtype, x.device)
    launch: Launch | None = plans.get(kind)
    if launch is None:
        n, limits = block_size(x.shape[-1]), device_limits(x.device)
        bits, is_one = n.bit_length() - 1, n >= MIN_SQUARE
        b = 1 << (bits + 1) // 2 if is_one else n
        rows = x.numel() // b
        a = n // b if is_one else MANY_ROWS if rows > FEW_ROWS * limits.num_sms else FEW_ROWS
        next_early = limits.pdl and x.numel() // x.shape[-1] <= MAX_ROWS_TO_OVERLAP
        warps = min(max(a * b // VALUES_OF_THREAD // limits.warp_size, 1), 8)
        launch = Launch(
            _hadamard_kernel, cdiv(rows, a), (rows,),
            (2.0 ** (-bits / 2), a, b, is_one, limits.pdl, next_early), num_warps=warps, pdl=limits.pdl,
        )  # fmt: skip
        plans.keep(kind, launch)
    return launch
