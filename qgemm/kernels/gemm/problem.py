"""What a kernel for a product is chosen and compiled for: ``Problem``."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Problem(NamedTuple):
    """A product ``[M, K] @ [K, N]``: all about it but its tensors' values. A ``Launch`` is made for one."""

    M: int
    N: int
    K: int
    strides: tuple[int, ...]
    """Of a, b and c, rows before columns; then of a's and b's scales, the bias and the residual's rows."""
    dtype: torch.dtype
    """Of a and b."""
    out_dtype: torch.dtype
    scaled: bool
    """Whether there are scales."""
    bias_dtype: torch.dtype | None
    has_residual: bool
    activation: str | None
    allow_tf32: bool
    device: torch.device
    aligned: bool
    """Whether the addresses of a and b are multiples of 16 bytes."""
    constant_b: bool
    """As in ``dispatch.scaled_mm``."""
    block_strides: tuple[int, int] | None = None
    """Of scales of blocks, from one block of K to the next; None where there are none."""
