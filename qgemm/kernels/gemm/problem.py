"""``Problem``: the facts about a product that its kernel is chosen and compiled for."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Problem(NamedTuple):
    """A product ``[M, K] @ [K, N]``: everything except its tensors' values. A ``Launch`` is made for one."""

    M: int
    N: int
    K: int
    strides: tuple[int, ...]
    """The strides of a, b and c, rows before columns; then of a's and b's scales, the bias and the residual's rows."""
    dtype: torch.dtype
    """The dtype of a and b."""
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
    """The strides of block scales, from one block of K to the next; None without block scales."""
