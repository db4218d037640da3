"""How a product with a stored weight of 4 or 8 bits is computed: the tile shapes of Hopper's kernels.

``select_ring``, ``select_few_rows`` and ``select_tiles`` choose by rules that H200s gave (docs/performance.md). Nothing
is timed, so that the same problem always gets the same kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.launch.memory import COUNTS_BYTES
from qgemm.kernels.stored_form import BLOCK_BYTES, StoredForm
from qgemm.numerics.integers import cdiv, next_power_of_2

MAX_FEW_ROWS = 16
MAX_RING_ROWS = 32
TILE_ROWS = 128  # of the weight
COUNT_BITS = 4  # of a count of the programs that have finished their part of a shared tile
COUNTS_IN_A_WORD = 32 // COUNT_BITS
MAX_PARTS = 2**COUNT_BITS - 1
MAX_COUNTS = COUNTS_BYTES // 4 * COUNTS_IN_A_WORD
# In microseconds, as they choose best of what was timed on an H100; of 192 and 256 rows and 4 bits on an H200.
BLOCK_TIMES = {
    4: {32: 0.88, 64: 1.12, 128: 1.53, 160: 1.98, 192: 2.33, 256: 2.88},
    8: {32: 1.1, 64: 1.23, 128: 1.7, 160: 2.16, 192: 2.4, 256: 3.04},
}
"""Of 256 values of K in a tile, by the weight's bits and rows of x."""
HANDOVER = 1.1
PARTIAL_SUM = 0.007  # for a row of x, of each part but the last
# Where programs have parts of two tiles, they are at other values of K than their neighbours, which load the same x,
# and with several rows of tiles the same weight.
SECOND_PART = 1.6
APART, APART_IN_A_ROW = 1.06, 1.14


@dataclass(frozen=True)
class FewRows:
    """A tile of a product of up to 16 rows, for ``_few_rows_kernel``."""

    splits: int
    """Warps that share K, block by block in turn."""
    rows: int
    """Of the weight: 16 or 32 for each of ``warps // splits`` warps."""
    columns: int
    """Rows of x, 8 or 16."""
    depth: int
    """Slots of a warp for blocks of the weight, of which all but one are on their way."""
    warps: int
    x_rows: int
    """Of x in shared memory, as ``columns``, or 1."""
    registers: int | None = None
    """Of a thread, at most."""


S = TypeVar("S", bound="Shareable")


@dataclass(frozen=True, kw_only=True)
class Shareable:
    """How programs share the last tiles along K, as ``Items`` has it. The last sharer of a tile adds up all parts."""

    shared: int = 0
    """How many tiles."""
    sharers: int = 0
    """How many programs share them."""

    @property
    def counts(self) -> int:
        """Of programs that have finished their part, for each tile."""
        return 1

    @property
    def parts(self) -> int:
        """How many programs share a tile, at most."""
        return cdiv(self.sharers, self.shared) + (self.sharers % self.shared > 0)

    @property
    def unshared(self: S) -> S:
        """The same tile, which has the same kernel however programs share it."""
        return replace(self, shared=0, sharers=0)

    def grid(self, tiles: int, programs: int) -> int:
        """How many programs compute so many tiles, ``programs`` at most."""
        return min(tiles - self.shared, programs) or self.sharers

    def partial_sums(self, rows: int, columns: int) -> int:
        """How many sums programs leave to one another, of tiles of so many rows and columns."""
        return (self.sharers + self.shared) * rows * columns

    def shared_by(self: S, shared: int, programs: int, steps: int) -> list[S]:
        """Ways to share the last ``shared`` tiles of so many steps of K: each by as many programs, or all by all."""
        if not 0 < shared * self.counts <= MAX_COUNTS:
            return []
        sharers = {*range(2 * shared, programs + 1, shared), programs}
        ways = [replace(self, shared=shared, sharers=each) for each in sorted(sharers) if each <= shared * steps]
        return [way for way in ways if way.parts <= MAX_PARTS]


@dataclass(frozen=True)
class FewRowsRing(Shareable):
    """A tile of a product of up to 32 rows, for ``_few_rows_ring_kernel``."""

    splits: int
    """Warps that share K, block by block in turn."""
    rows: int
    """Of the weight: 32 for each of ``warps // splits`` warps."""
    columns: int
    """Rows of x, 8, 16 or 32."""
    depth: int
    """Slots, each with a block of the weight and of x for all warps that share K."""
    warps: int
    programs: int
    """On a multiprocessor."""

    @property
    def registers(self) -> int | None:
        """Of a thread at the start, if there must be room for others; from then on those that multiply have most."""
        return None if self.programs == 1 else 128

    def tiles(self, N: int) -> int:
        """How many an output with ``N`` columns has."""
        return cdiv(N, self.rows)


# 16 to 24 warps a multiprocessor keep enough of the weight on its way: where it has few rows more warps share K. Each
# program reads all of x, from 9 rows on more than it reads of 16 rows of the weight: it has 32 or 64 of them.
FEW_ROWS = {
    (4, 1): (FewRows(8, 16, 8, 3, 8, 1), FewRows(4, 32, 8, 3, 8, 1), FewRows(4, 16, 8, 4, 4, 1)),
    (4, 8): (FewRows(4, 16, 8, 4, 4, 8), FewRows(4, 32, 8, 2, 8, 8), FewRows(2, 32, 8, 4, 4, 8)),
    (4, 16): (FewRows(4, 32, 16, 3, 8, 16), FewRows(4, 32, 16, 2, 8, 16, 128), FewRows(2, 32, 16, 2, 4, 16, 128)),
    (8, 1): (FewRows(8, 16, 8, 4, 8, 1), FewRows(8, 16, 8, 4, 8, 1), FewRows(4, 16, 8, 4, 4, 1)),
    (8, 8): (FewRows(4, 32, 8, 4, 8, 8), FewRows(4, 32, 8, 4, 8, 8), FewRows(4, 32, 8, 3, 8, 8)),
    (8, 16): (FewRows(4, 32, 16, 4, 8, 16), FewRows(4, 32, 16, 3, 8, 16), FewRows(2, 64, 16, 4, 8, 16)),
}
"""By the weight's bits and the rows of x, at most: of weights with up to 2 and 4 times 16 rows for each multiprocessor,
and of longer ones."""
# Slots fill shared memory, but for 4 to 32 KB in which sums of warps are exchanged.
RING = {
    (4, 8): (
        (FewRowsRing(8, 32, 8, 3, 8, 1), 1.24),
        (FewRowsRing(4, 32, 8, 3, 4, 2), 1.11),
        (FewRowsRing(2, 64, 8, 4, 4, 2), 1.14),
    ),
    (4, 16): (
        (FewRowsRing(8, 32, 16, 2, 8, 1), 1.56),
        (FewRowsRing(4, 32, 16, 2, 4, 2), 1.29),
        (FewRowsRing(2, 64, 16, 3, 4, 2), 1.25),
    ),
    (4, 32): (
        (FewRowsRing(4, 64, 32, 2, 8, 1), 1.88),
        (FewRowsRing(2, 64, 32, 2, 4, 2), 1.82),
        (FewRowsRing(1, 128, 32, 3, 4, 2), 1.8),
    ),
    (8, 1): ((FewRowsRing(4, 64, 8, 5, 8, 1), 0.93), (FewRowsRing(4, 32, 8, 4, 4, 2), 0.98)),
    (8, 8): (
        (FewRowsRing(8, 32, 8, 4, 8, 1), 0.95),
        (FewRowsRing(4, 64, 8, 5, 8, 1), 0.95),
        (FewRowsRing(4, 32, 8, 4, 4, 2), 0.95),
    ),
    (8, 16): (
        (FewRowsRing(8, 32, 16, 3, 8, 1), 1.04),
        (FewRowsRing(4, 64, 16, 4, 8, 1), 0.97),
        (FewRowsRing(4, 32, 16, 3, 4, 2), 0.97),
    ),
    (8, 32): (
        (FewRowsRing(4, 64, 32, 3, 8, 1), 1.14),
        (FewRowsRing(2, 64, 32, 3, 4, 2), 1.12),
        (FewRowsRing(2, 128, 32, 4, 8, 1), 1.16),
    ),
}
"""By the weight's bits and the rows of x, at most: tiles, and the microseconds of a step where all multiprocessors have
as many programs as they take."""
RING_FEWER = {4: 0.88, 8: 0.72}
"""The least share of a step's time that it takes where there are fewer programs."""
RING_TILE_END = 0.25
RING_HANDOVER = 2.3
RING_PARTIAL_SUM = 1e-4  # of each part but the last
TILES_LATER = 0.6
"""Microseconds that tiles for more rows take besides, which this model and theirs leave out."""


@dataclass(frozen=True)
class Tiles(Shareable):
    """A tile of a product of more rows, ``TILE_ROWS`` of the weight by ``columns`` rows of x; for ``_tiles_kernel``."""

    columns: int
    x_depth: int
    """Slots for x, ``panels`` of 64 columns each."""
    w_depth: int
    """Slots for blocks of the weight."""
    sums: bool = False
    """Whether scales are applied to sums of groups, not to the unpacked values, if groups have at least 128."""
    in_turn: int = 0
    """Blocks whose panels are unpacked and multiplied in turn, without a pause; 0: those of a block at a time."""
    panels: int = 2
    staging: int = 1
    """Slots of a group of warps for what it stores."""
    group_size_m: int = 8
    """Rows of tiles that are computed together."""

    @property
    def counts(self) -> int:
        """One for each group of warps."""
        return 2

    @property
    def widths(self) -> tuple[int, ...]:
        """The columns of each accumulator: powers of 2, so 160 and 192 are split."""
        rest = self.columns % 128
        return (128, rest) if rest and self.columns > 128 else (self.columns,)

    def tiles(self, M: int, N: int) -> int:
        """How many an output of ``[M, N]`` has."""
        return cdiv(M, self.columns) * cdiv(N, TILE_ROWS)


TILES = {
    4: (
        Tiles(32, 6, 6, sums=True, panels=4),
        Tiles(64, 4, 4, sums=True, panels=4),
        Tiles(128, 5, 3),
        Tiles(128, 4, 3, staging=2),
        Tiles(160, 8, 3, in_turn=4, panels=1, staging=2),
        Tiles(192, 6, 3, in_turn=2, panels=1, staging=2),
        Tiles(256, 5, 3, in_turn=2, panels=1),
    ),
    8: (
        Tiles(32, 8, 8, sums=True),
        Tiles(64, 7, 5, sums=True, in_turn=1),
        Tiles(128, 5, 3, in_turn=1),
        Tiles(128, 4, 4, staging=2, in_turn=1),
        Tiles(160, 8, 3, in_turn=4, panels=1, staging=2),
        Tiles(192, 3, 4, in_turn=4),
        Tiles(256, 5, 3, in_turn=1, panels=1),
    ),
}
"""By the weight's bits. Slots fill shared memory. With int4 and up to 64 rows of x, a slot has all panels of a block:
fewer barriers. With 128 rows of x, registers hold no sums of groups besides, and with more no unpacked block either. In
a single row of tiles of 128 a second slot for what is stored is faster, in several rows one more for x."""


def fits_ring(M: int, K: int, form: StoredForm) -> bool:
    """Whether a product has tiles for ``_few_rows_ring_kernel``: blocks that end with K, and scales of many values.

    One row of 4 bits takes less time by ``_few_rows_kernel``.
    """
    return M <= MAX_RING_ROWS and K % form.block == 0 and not form.scales_values and (M > 1 or form.bits == 8)


def _columns(M: int) -> int:
    """Of the smallest tile for ``M`` rows; 1 for a single one."""
    return 1 if M == 1 else next_power_of_2(max(M, 8))


def select_ring(M: int, N: int, K: int, form: StoredForm, limits: DeviceLimits) -> FewRowsRing:
    """The tiles of a product that ``fits_ring``: those that take the least time by ``_ring_microseconds``."""
    return _best_ring(M, N, K, form, limits)[1]


def prefers_tiles(M: int, N: int, K: int, form: StoredForm, limits: DeviceLimits) -> bool:
    """Whether a product that ``fits_ring`` takes less time by ``Tiles``, as some of more than 16 rows and 4 bits do.

    With zero points tiles take longer than the model says.
    """
    if M <= MAX_FEW_ROWS or form.bits > 4 or form.has_zeros:
        return False
    tile = select_tiles(M, N, K, form, limits)
    return _microseconds(tile, M, N, K, form, limits) + TILES_LATER < _best_ring(M, N, K, form, limits)[0]


def _best_ring(M: int, N: int, K: int, form: StoredForm, limits: DeviceLimits) -> tuple[float, FewRowsRing]:
    blocks = K // form.block
    candidates: list[tuple[float, FewRowsRing]] = []
    for one, step in RING[form.bits, _columns(M)]:
        programs = one.programs * limits.num_sms
        ways = one.shared_by(one.tiles(N) % programs, programs, cdiv(blocks, one.splits))
        candidates += [(_ring_microseconds(way, step, N, blocks, form.bits, limits), way) for way in (one, *ways)]
    return min(candidates, key=lambda each: each[0])


def _ring_microseconds(tile: FewRowsRing, step: float, N: int, blocks: int, bits: int, limits: DeviceLimits) -> float:
    """About how long a product takes, but for what all take. Tiles that aren't shared come first."""
    capacity = tile.programs * limits.num_sms
    steps = cdiv(blocks, tile.splits)

    def tiles(count: int, programs: int) -> float:
        return count * step * max(RING_FEWER[bits], programs / capacity) + RING_TILE_END

    rounds, last = divmod(tile.tiles(N) - tile.shared, capacity)
    time = rounds * tiles(steps, capacity)
    if last:
        time += tiles(steps, last)
    if tile.shared:
        time += RING_HANDOVER + (tile.parts - 1) * tile.rows * tile.columns * RING_PARTIAL_SUM
        time += tiles(cdiv(tile.shared * steps, tile.sharers), tile.sharers)
    return time


def select_few_rows(M: int, N: int, form: StoredForm, limits: DeviceLimits) -> FewRows:
    """The tiles of another product of up to ``MAX_FEW_ROWS`` rows."""
    width = sum(cdiv(N, 16) > each * limits.num_sms for each in (2, 4))
    return FEW_ROWS[form.bits, _columns(M)][width]


def select_tiles(M: int, N: int, K: int, form: StoredForm, limits: DeviceLimits, exact: bool = True) -> Tiles:
    """The tiles of a product of ``M`` rows, more than 16: those that take the least time by ``_microseconds``.

    ``exact``: whether scales are values of the dtype of x. If not, they take registers, as zero points do.
    """
    plain = form.group == 0 or (form.group >= BLOCK_BYTES and exact)
    widest = 256 if plain and not form.has_zeros else 128
    candidates: list[Tiles] = []
    for one in TILES[form.bits]:
        if one.columns > min(max(32, next_power_of_2(M)), widest):
            continue
        if one.columns == 128 and one.staging != (2 if M <= 128 else 1):
            continue
        last = one.tiles(M, N) % limits.num_sms
        candidates += [one, *one.shared_by(last, limits.num_sms, cdiv(K, form.block))]
    return min(candidates, key=lambda tile: _microseconds(tile, M, N, K, form, limits))


def _microseconds(tile: Tiles, M: int, N: int, K: int, form: StoredForm, limits: DeviceLimits) -> float:
    """About how long a product takes, but for what all take. Tiles that aren't shared come first."""
    blocks = cdiv(K, form.block)
    rounds = float(cdiv(tile.tiles(M, N) - tile.shared, limits.num_sms) * blocks)
    time = 0.0
    if tile.shared:
        slower, time = 1.0, HANDOVER + (tile.parts - 1) * tile.columns * PARTIAL_SUM
        if tile.sharers % tile.shared > 0:
            in_a_row = M <= tile.columns < 256
            slower, time = (APART_IN_A_ROW, time) if in_a_row else (APART, time + SECOND_PART)
        rounds += cdiv(tile.shared * blocks, tile.sharers) * slower
    return time + rounds * BLOCK_TIMES[form.bits][tile.columns] * form.block / 256
