"""Scales of blocks: one for each ``BLOCK`` values along K of an activation's row, and ``BLOCK x BLOCK`` of a weight.

The last block of a dimension is shorter if ``BLOCK`` doesn't divide it. This is the format of DeepSeek-V3's checkpoints
(arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.numerics.formats import FP8
from qgemm.numerics.groups import dequantize, grouped, spread
from qgemm.numerics.integers import cdiv

BLOCK = 128


def spread_blocks(scale: Tensor, N: int, K: int) -> Tensor:
    """The scale of each value, ``[N, K]``, from scales of blocks ``[ceil(N / 128), ceil(K / 128)]``."""
    return spread_rows(spread(scale, BLOCK, K), N)


def spread_rows(scale: Tensor, N: int) -> Tensor:
    """The scales of each row, ``[..., N, ceil(K / 128)]``, from scales of blocks ``[..., ceil(N / 128), ...]``."""
    return scale.repeat_interleave(BLOCK, dim=-2)[..., :N, :]


def block_scales(weight: Tensor) -> Tensor:
    """The scales of a float weight ``[N, K]`` for e4m3, float32 ``[ceil(N / 128), ceil(K / 128)]``."""
    N, K = weight.shape
    rows = F.pad(grouped(weight.abs(), BLOCK).amax(-1), (0, 0, 0, -N % BLOCK))
    return FP8.scale_of(rows.reshape(cdiv(N, BLOCK), BLOCK, cdiv(K, BLOCK)).amax(1))


def round_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    """Rounds a float weight ``[N, K]`` to nearest with scales from ``block_scales``: e4m3 ``[N, K]``."""
    return FP8.store(weight.float() / spread_blocks(scale, *weight.shape))


def dequantize_blocks(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``weight * scale`` for each block, ``[N, K]`` in ``dtype``, computed as in ``groups.dequantize``."""
    N, K = weight.shape
    return dequantize(weight, spread_rows(scale, N), None, None, FP8, BLOCK, K, dtype)
