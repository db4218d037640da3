"""The tiles of products of up to 16 rows by ``_few_rows_kernel``: which a weight gets, as they were timed on H200s.

With one row, a tile is chosen so that all programs of a short weight are there at once, with 16 or 24 warps on each SM,
and so that those of a long one are small: its warps wait for one another at every step. Both are worth up to half of
the time (docs/performance/w4a16_design.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.stored_form import StoredForm
from qgemm.numerics.integers import next_power_of_2

MAX_FEW_ROWS = 16


@dataclass(frozen=True)
class FewRows:
    """A tile of a product of up to 16 rows, for ``_few_rows_kernel``."""

    splits: int
    """The number of warps that share K, block by block in turn."""
    rows: int
    """Rows of the weight: 16 or 32 for each of ``warps // splits`` warps."""
    columns: int
    """Rows of x: 8 or 16."""
    depth: int
    """A warp's slots for blocks of the weight; all but one are being loaded."""
    warps: int
    x_rows: int
    """Rows of x in shared memory: ``columns``, or 1."""
    registers: int | None = None
    """The maximum number of registers per thread."""
    biased: bool = True
    gated: bool = False
    """Whether half of the rows are gates, and the other half, which are in the other half of the weight, their ups."""
    """Whether a product with x subtracts the offset of int4's codes: fewer instructions, and more registers."""


Tiles = dict[float, FewRows]
"""Tiles by how many times 16 rows of the weight an SM has at most."""

SIXTEEN_ROWS: Tiles = {
    2: FewRows(4, 32, 16, 3, 8, 16),
    4: FewRows(4, 32, 16, 2, 8, 16, 128),
    math.inf: FewRows(2, 32, 16, 2, 4, 16, 128),
}
"""Of x, by a 4-bit weight."""
# 16 to 24 warps on an SM keep enough of the weight in flight: where the SM has few rows of it, more warps share K.
# Three programs of eight warps fit an SM with 80 registers per thread. Forms that need a few more spill them, and are
# faster all the same. Each program reads all of x; from 9 rows of x on, that is more than 16 rows of the weight, so a
# program has 32 or 64 of those.
FEW_ROWS: dict[tuple[int, int], Tiles] = {
    (4, 1): {
        2: FewRows(8, 16, 8, 2, 8, 1),
        3: FewRows(8, 16, 8, 2, 8, 1, 80, biased=False),
        4: FewRows(4, 32, 8, 2, 8, 1, biased=False),
        8: FewRows(4, 16, 8, 3, 4, 1, biased=False),
        math.inf: FewRows(2, 16, 8, 3, 2, 1, biased=False),
    },
    (4, 8): {2: FewRows(4, 16, 8, 4, 4, 8), 4: FewRows(4, 32, 8, 2, 8, 8), math.inf: FewRows(2, 32, 8, 4, 4, 8)},
    (4, 16): SIXTEEN_ROWS,
    (8, 1): {4: FewRows(8, 16, 8, 4, 8, 1), math.inf: FewRows(4, 16, 8, 4, 4, 1)},
    (8, 8): {4: FewRows(4, 32, 8, 4, 8, 8), math.inf: FewRows(4, 32, 8, 3, 8, 8)},
    (8, 16): {
        2: FewRows(4, 32, 16, 4, 8, 16),
        4: FewRows(4, 32, 16, 3, 8, 16),
        math.inf: FewRows(2, 64, 16, 4, 8, 16),
    },
}
"""By the weight's bits and the maximum number of rows of x."""
BY_GROUPS: dict[tuple[int, int], Tiles] = {
    (4, 1): {
        2: FewRows(8, 16, 8, 2, 8, 1),
        3: FewRows(8, 16, 8, 2, 8, 1, 80, biased=False),
        8: FewRows(4, 16, 8, 3, 4, 1),
        math.inf: FewRows(2, 16, 8, 4, 2, 1, biased=False),
    },
    (4, 8): {2: FewRows(8, 16, 8, 2, 8, 8), 4: FewRows(4, 16, 8, 3, 4, 8), math.inf: FewRows(2, 32, 8, 4, 4, 8)},
    (4, 16): SIXTEEN_ROWS,
    (8, 1): {6: FewRows(8, 16, 8, 3, 8, 1), math.inf: FewRows(4, 16, 8, 3, 4, 1)},
    (8, 8): {2: FewRows(8, 16, 8, 3, 8, 8), 4: FewRows(4, 16, 8, 3, 4, 8), math.inf: FewRows(4, 32, 8, 3, 8, 8)},
    (8, 16): {2: FewRows(8, 16, 16, 2, 8, 16), 4: FewRows(4, 32, 16, 3, 8, 16), math.inf: FewRows(4, 32, 16, 2, 8, 16)},
}
"""The same for products that are scaled group by group."""
ADDENDS: Tiles = {4: FewRows(4, 16, 8, 3, 4, 8), math.inf: FewRows(2, 32, 8, 4, 4, 8)}
"""The same with up to 8 rows of x where each group of 4-bit values has an addend."""
FLOAT_ADDENDS: Tiles = {2: FewRows(4, 16, 8, 3, 4, 8), math.inf: FewRows(4, 16, 8, 2, 4, 8)}
"""The same where addends are floats, of groups of less than 64 values."""
ROOMY = {1: FewRows(4, 16, 8, 2, 4, 1), 16: FewRows(2, 32, 16, 2, 4, 16, 168)}
"""By the maximum number of rows of x: in place of tiles with a bound of registers, for forms that need more."""


def columns_of(M: int) -> int:
    """The columns of the smallest tile for ``M`` rows; 1 for a single one."""
    return 1 if M == 1 else next_power_of_2(max(M, 8))


def select_few_rows(M: int, N: int, form: StoredForm, limits: DeviceLimits) -> FewRows:
    """The tiles of a product of up to ``MAX_FEW_ROWS`` rows that doesn't fit the ring."""
    columns = columns_of(M)
    tile = next(tile for most, tile in _tiles(columns, form).items() if most * 16 * limits.num_sms >= N)
    return ROOMY[columns] if tile.registers is not None and _needs_room(columns, form) else tile


def _tiles(columns: int, form: StoredForm) -> Tiles:
    if not form.by_groups:
        return FEW_ROWS[form.bits, columns]
    if form.bits == 4 and columns == 8 and (form.float_zeros or (form.has_zeros and form.group < 64)):
        return FLOAT_ADDENDS if form.float_zeros and form.group < 64 else ADDENDS
    return BY_GROUPS[form.bits, columns]


def _needs_room(columns: int, form: StoredForm) -> bool:
    """Whether the factors of small groups take more registers than a tile with a bound leaves them."""
    if form.bits == 8 or not form.has_small_groups:
        return False
    if columns == 1:
        return form.has_zeros or form.group == 16
    return form.float_zeros or (form.has_zeros and form.by_groups)
