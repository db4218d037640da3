"""Grouped products of many rows with mxfp4 weights on Hopper: the choice of the tile, and launches.

The rules were fitted to measurements on one H200 (docs/performance/experts.md); nothing is timed at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qgemm.kernels.grouped.config import rows_of_group
from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.launch.tensor_map import TensorMap
from qgemm.kernels.stored_form import BLOCK_BYTES
from qgemm.numerics.integers import cdiv

PANEL = 64  # values of a row of A that are copied at a time
MIN_MANY_ROWS = 96  # of a group, on average: from there on its unpacked weight is used often enough


@dataclass(frozen=True)
class ManyTokens:
    """A tile for ``_grouped_weight_hopper_kernel``: 128 rows of the weight by up to ``columns`` rows of A."""

    columns: int
    narrowest: int
    """The minimum number of columns of an instruction, for tiles with fewer rows."""
    a_depth: int
    """The number of slots for blocks of A, 64 columns each."""
    w_depth: int
    """The number of slots for blocks of the weight."""
    part: int = 64
    """The number of rows of A in one load."""
    registers: int = 232
    """Registers per thread that multiplies."""
    group_size_m: int = 8
    """How many tiles of A's rows are computed together."""


def select_many_tokens(P: int, E: int) -> ManyTokens | None:
    """The tile for ``P`` rows that go to ``E`` experts at random; None if there are too few rows."""
    return ManyTokens(128, 32, 8, 3) if rows_of_group(P, E) > MIN_MANY_ROWS else None


def many_tokens_launch(
    P: int,
    E: int,
    N: int,
    K: int,
    tile: ManyTokens,
    dtype: torch.dtype,
    limits: DeviceLimits,
) -> Launch:
    """The product of ``[P, K]`` and ``[E, N, K]``, for tiles of ``columns`` rows.

    To be called with the rows, the weight as uint16, the output twice, exponents as uint16, biases and the tiles. K
    must be a multiple of 64.
    """
    from qgemm.kernels.grouped.weight_hopper_kernels import _grouped_weight_hopper_kernel
    from qgemm.kernels.stages.ring import block_layout

    words = cdiv(K, 2 * BLOCK_BYTES) * BLOCK_BYTES // 2
    stored = min(tile.columns, 64)
    maps = {
        0: TensorMap((P, K), (K, 1), (tile.part, PANEL), block_layout((tile.part, PANEL), dtype)),
        1: TensorMap((E * N, words), (words, 1), (64, BLOCK_BYTES // 2), block_layout((64, 64), torch.uint16)),
        2: TensorMap((P, N), (N, 1), (stored, 64), block_layout((stored, 64), dtype)),
    }
    constants = (tile, limits.num_sms)
    return Launch(_grouped_weight_hopper_kernel, limits.num_sms, (N, K), constants, 4, pdl=limits.pdl, maps=maps)
