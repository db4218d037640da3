"""How a product with a stored weight of 4 or 8 bits is computed: ``Stored``, and the tile shapes of Hopper's kernels.

``select_few_rows`` and ``select_tiles`` choose by rules that were found on one H200 (docs/performance.md); nothing is
timed, so that the same problem always gets the same kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from qgemm.kernels.launch.device import DeviceLimits
from qgemm.numerics.integers import cdiv, next_power_of_2

BLOCK_BYTES = 128
"""Of a row of the weight, that are multiplied at a time."""
MAX_FEW_ROWS = 16
DEPTHS = {32: (16, 6), 64: (12, 5), 128: (8, 3), 256: (4, 3)}
"""Slots for x and for the weight, which fill shared memory, by rows of x."""
MAX_ROWS_TO_SPLIT = 512
# Of a product's speed, for each program that shares a tile's K.
LOST_BY_A_SPLIT = 0.04
LOST_BY_A_SPLIT_OF_MANY_ROWS = 0.12


@dataclass(frozen=True)
class Stored:
    """How a weight is stored, as far as kernels are compiled for it."""

    name: str
    """Of the format."""
    bits: int
    group: int
    """Values with one scale; 0 for a row."""
    piece: int = BLOCK_BYTES
    """Bytes of a block that are multiplied before they are scaled: those of a group, or all."""
    has_zeros: bool = False
    """Whether there are zero points."""
    even: bool = True
    """Whether K is a whole number of blocks for each warp."""

    @property
    def block(self) -> int:
        """Values of a row in ``BLOCK_BYTES``."""
        return BLOCK_BYTES * 8 // self.bits


@dataclass(frozen=True)
class FewRows:
    """A tile of a product of up to 16 rows, a read of the weight; for ``_few_rows_kernel``."""

    splits: int
    """Warps that share K, block by block in turn."""
    rows: int
    """Of the weight: 16 or 32 for each of ``warps // splits`` warps."""
    columns: int
    """Rows of x, 8 or 16."""
    depth: int
    """Slots of a warp for blocks of the weight, of which all but one are on their way."""
    warps: int
    x_rows: int = 8
    """Of x in shared memory: as ``columns``, or 1; 0 to read them where they are."""


@dataclass(frozen=True)
class Tiles:
    """A tile of a product of more rows, 128 rows of the weight times ``columns`` rows of x; for ``_tiles_kernel``."""

    columns: int
    groups: int = 2
    """Of four warps, for 64 rows of the weight each."""
    x_depth: int = 4
    """Slots for blocks of x, 64 columns each."""
    w_depth: int = 2
    """Slots for blocks of the weight."""
    splits: int = 1
    """How many programs share a tile's K. Their sums are added in order, by a second kernel."""
    sums: bool = True
    """Whether scales are applied to a group's sums, not to the unpacked values."""
    registers: int = 232
    """Of a thread that multiplies."""
    group_size_m: int = 8
    """Rows of tiles that are computed together."""


def select_few_rows(M: int, N: int, form: Stored, limits: DeviceLimits) -> FewRows:
    """The tiles of a product of ``M`` rows, up to 16.

    16 to 20 warps a multiprocessor keep enough of the weight on its way. So where there are few rows of the weight,
    more warps share K. Each program reads all of x: from 9 rows on that is more than it reads of a weight's 16 rows.
    """
    narrow, wide = cdiv(N, 16) <= 2 * limits.num_sms, cdiv(N, 16) > 4 * limits.num_sms
    if M > 8:
        if narrow:
            return FewRows(4, 32, 16, 3, 8, 16)
        if wide:
            return FewRows(2, 64, 16, 3 if form.bits == 4 else 4, 4, 16)
        return FewRows(2, 32, 16, 4, 4, 16) if form.bits == 4 else FewRows(4, 32, 16, 3, 4, 16)
    x_rows, depth = (1, 3) if M == 1 else (0, 4)
    if wide:
        return FewRows(4, 16, 8, 4, 4, x_rows)
    if narrow or form.bits == 8:
        return FewRows(8, 16, 8, depth, 8, x_rows)
    return FewRows(4, 32, 8, depth, 8, x_rows)


def select_tiles(M: int, N: int, K: int, form: Stored, limits: DeviceLimits) -> Tiles:
    """The tiles of a product of ``M`` rows, more than 16."""
    columns = min(max(32, next_power_of_2(M)), 256)
    x_depth, w_depth = DEPTHS[columns]
    tiles = cdiv(M, columns) * cdiv(N, 128)
    splits = 1
    if M <= MAX_ROWS_TO_SPLIT:
        lost = LOST_BY_A_SPLIT if columns <= 128 else LOST_BY_A_SPLIT_OF_MANY_ROWS

        def score(splits: int) -> float:
            items = tiles * splits
            return items / cdiv(items, limits.num_sms) * (1 - lost * splits)

        splits = min(max((1, 2, 4, 8), key=score), cdiv(K, form.block))
    return Tiles(columns, 2, x_depth, w_depth, splits, sums=columns <= 64)
