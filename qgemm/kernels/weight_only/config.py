"""How a product with a stored 4- or 8-bit weight is computed: the tile shapes of Hopper's kernels.

``select_ring`` and ``select_tiles`` choose by rules fitted to measurements on H200s
(docs/performance/w4a16_design.md). Nothing is timed at run time, so the same problem always gets the same kernel.
``few_rows_config`` has the rules of other products of few rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.launch.memory import COUNTS_BYTES
from qgemm.kernels.stored_form import Precision, StoredForm
from qgemm.kernels.weight_only.few_rows_config import MAX_FEW_ROWS, columns_of
from qgemm.numerics.integers import cdiv, next_power_of_2

MAX_RING_ROWS = 32
TILE_ROWS = 128  # of the weight
COUNT_BITS = 4  # of the count of programs that have finished their part of a shared tile
COUNTS_IN_A_WORD = 32 // COUNT_BITS
MAX_PARTS = 2**COUNT_BITS - 1
MAX_COUNTS = COUNTS_BYTES // 4 * COUNTS_IN_A_WORD
# In microseconds, fitted so that the best of the timed tiles are chosen: on an H100; 192 and 256 rows with 4 bits on an
# H200.
BLOCK_TIMES = {
    4: {32: 0.88, 64: 1.12, 128: 1.53, 160: 1.98, 192: 2.33, 256: 2.88},
    8: {32: 1.1, 64: 1.23, 128: 1.7, 160: 2.16, 192: 2.4, 256: 3.04},
}
"""The time of 256 values of K in a tile, by the weight's bits and the rows of x."""
ZEROS = 0.15
"""What zero points add to it."""
SCALING: dict[Precision, float] = {"exact": 0.0, "two": 0.2, "float": 0.5}
"""What scaling values adds to it."""
HANDOVER = 1.1
PARTIAL_SUM = 0.007  # for a row of x, of each part but the last
# Programs that have parts of two tiles are at other values of K than their neighbours, which load the same x and, with
# several rows of tiles, the same weight.
SECOND_PART = 1.6
APART, APART_IN_A_ROW = 1.06, 1.14


S = TypeVar("S", bound="Shareable")


@dataclass(frozen=True, kw_only=True)
class Shareable:
    """How programs share the last tiles along K; see ``Items``. The last sharer of a tile adds up all parts."""

    shared: int = 0
    """The number of tiles that are shared."""
    sharers: int = 0
    """The number of programs that share them."""

    @property
    def counts(self) -> int:
        """How many counts a tile has of the programs that have finished their part."""
        return 1

    @property
    def parts(self) -> int:
        """The maximum number of programs that share a tile."""
        return cdiv(self.sharers, self.shared) + (self.sharers % self.shared > 0)

    @property
    def unshared(self: S) -> S:
        """The same tile without sharing. Its kernel is the same however programs share it."""
        return replace(self, shared=0, sharers=0)

    def grid(self, tiles: int, programs: int) -> int:
        """How many programs compute ``tiles`` tiles, at most ``programs``."""
        return min(tiles - self.shared, programs) or self.sharers

    def partial_sums(self, rows: int, columns: int) -> int:
        """How many sums programs leave to one another, for tiles of ``rows`` rows and ``columns`` columns."""
        return (self.sharers + self.shared) * rows * columns

    def shared_by(self: S, shared: int, programs: int, steps: int) -> list[S]:
        """Ways to share the last ``shared`` tiles of ``steps`` steps: as many programs for each, or all for all."""
        if not 0 < shared * self.counts <= MAX_COUNTS:
            return []
        sharers = {*range(2 * shared, programs + 1, shared), programs}
        ways = [replace(self, shared=shared, sharers=each) for each in sorted(sharers) if each <= shared * steps]
        return [way for way in ways if way.parts <= MAX_PARTS]


@dataclass(frozen=True)
class FewRowsRing(Shareable):
    """A tile of a product of up to 32 rows, for ``_few_rows_ring_kernel``."""

    splits: int
    """The number of warps that share K, block by block in turn."""
    rows: int
    """Rows of the weight: 32 for each of ``warps // splits`` warps."""
    columns: int
    """Rows of x: 8, 16 or 32."""
    depth: int
    """The number of slots. Each has a block of the weight and of x for all warps that share K."""
    warps: int
    programs: int
    """The number of programs on an SM."""
    biased: ClassVar[bool] = True
    gated: ClassVar[bool] = False
    """As in ``FewRows``."""

    @property
    def registers(self) -> int | None:
        """Registers per thread at launch, if other programs need room; later the multiplying warps get most of them."""
        return None if self.programs == 1 else 128

    def tiles(self, N: int) -> int:
        """How many tiles an output with ``N`` columns has."""
        return cdiv(N, self.rows)


# The slots fill shared memory, except for 4 to 32 KB in which warps exchange sums.
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
"""By the weight's bits and the maximum number of rows of x: tiles, each with the microseconds of a step while every SM
has as many programs as fit.
"""
RING_FEWER = {4: 0.88, 8: 0.72}
"""The minimum fraction of a step's time that it takes while there are fewer programs."""
RING_TILE_END = 0.25
RING_HANDOVER = 2.3
RING_PARTIAL_SUM = 1e-4  # of each part but the last
TILES_LATER = 0.6
"""Microseconds that tiles for more rows take in addition, which both models leave out."""


@dataclass(frozen=True)
class Tiles(Shareable):
    """A tile of a product of more rows: ``TILE_ROWS`` of the weight by ``columns`` of x, for ``_tiles_kernel``."""

    columns: int
    x_depth: int
    """The number of slots for x, each with ``panels`` panels of 64 columns."""
    w_depth: int
    """The number of slots for blocks of the weight."""
    sums: bool = False
    """Whether scales of groups with at least 128 values multiply the groups' sums instead of the unpacked values."""
    in_turn: int = 0
    """Of how many blocks panels are unpacked and multiplied in turn, without a pause; 0: a block's panels together."""
    panels: int = 2
    staging: int = 1
    """The slots in which a group of warps stages its outputs."""
    group_size_m: int = 8
    """Rows of tiles that are computed together."""

    @property
    def counts(self) -> int:
        """One count for each group of warps."""
        return 2

    @property
    def widths(self) -> tuple[int, ...]:
        """The columns of each accumulator: powers of 2, so 160 and 192 are split."""
        rest = self.columns % 128
        return (128, rest) if rest and self.columns > 128 else (self.columns,)

    def tiles(self, M: int, N: int) -> int:
        """How many tiles an output of ``[M, N]`` has."""
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
"""By the weight's bits. Slots fill shared memory. With int4 and up to 64 rows of x, a slot has all panels of a block,
which needs fewer barriers. With 128 rows of x, the registers can't hold sums of groups as well, and with more rows no
unpacked block either. For a single row of tiles with 128 rows of x, a second slot for staged outputs is faster; for
several rows of tiles, another slot for x is.
"""


def fits_ring(M: int, K: int, form: StoredForm) -> bool:
    """Whether ``_few_rows_ring_kernel`` has tiles for a product: blocks that end with K, and no small groups.

    A single row by a 4-bit weight is left to ``_few_rows_kernel``, which takes less time for it; with float zero points
    of 4 bits, registers don't hold the sums of more than 16 rows.
    """
    if M > MAX_FEW_ROWS and form.float_zeros and form.bits == 4:
        return False
    return M <= MAX_RING_ROWS and K % form.block == 0 and not form.has_small_groups and (M > 1 or form.bits == 8)


def select_ring(M: int, N: int, K: int, form: StoredForm, limits: DeviceLimits) -> FewRowsRing:
    """The tiles of a product that ``fits_ring``: the fastest by ``_ring_microseconds``."""
    return _best_ring(M, N, K, form, limits)[1]


def prefers_tiles(M: int, N: int, K: int, form: StoredForm, limits: DeviceLimits) -> bool:
    """Whether a product that ``fits_ring`` is faster with ``Tiles``, as some with more than 16 rows and 4 bits are.

    With zero points, tiles take longer than the model says.
    """
    if M <= MAX_FEW_ROWS or form.bits > 4 or form.has_zeros:
        return False
    tile = select_tiles(M, N, K, form, limits, "exact")
    return _microseconds(tile, M, N, K, form, "exact", limits) + TILES_LATER < _best_ring(M, N, K, form, limits)[0]


def _best_ring(M: int, N: int, K: int, form: StoredForm, limits: DeviceLimits) -> tuple[float, FewRowsRing]:
    blocks = K // form.block
    candidates: list[tuple[float, FewRowsRing]] = []
    for one, step in RING[form.bits, columns_of(M)]:
        programs = one.programs * limits.num_sms
        ways = one.shared_by(one.tiles(N) % programs, programs, cdiv(blocks, one.splits))
        candidates += [(_ring_microseconds(way, step, N, blocks, form.bits, limits), way) for way in (one, *ways)]
    return min(candidates, key=lambda each: each[0])


def _ring_microseconds(tile: FewRowsRing, step: float, N: int, blocks: int, bits: int, limits: DeviceLimits) -> float:
    """Roughly how long a product takes, without what is the same for all tiles. Tiles that aren't shared come first."""
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


def most_rows(form: StoredForm, precision: Precision) -> float:
    """How many rows tiles are faster for than a float weight that is made for the call."""
    cheap = precision == "two" and form.name == "int4" and not form.has_small_groups
    if cheap or precision == "exact" or form.group == 0:
        return math.inf
    return 768 if _takes_registers(form) else 2048


def _takes_registers(form: StoredForm) -> bool:
    """Whether scales and zero points take so many registers that tiles can't hold all of a block's values as well."""
    return form.bits == 4 and form.float_zeros and form.group < 64


def _widest(form: StoredForm) -> int:
    """The rows of x of the widest tile: registers hold its sums and what is loaded ahead."""
    zeros_of_16 = form.bits == 4 and form.has_zeros and form.group == 16
    return 192 if zeros_of_16 or _takes_registers(form) else 256


def _in_turn(tile: Tiles, form: StoredForm, precision: Precision) -> int:
    """``tile.in_turn`` for ``form``: what takes many instructions is faster in fewer blocks at a time."""
    if _takes_registers(form):
        return 1
    plain = form.group == 0 or (precision == "exact" and not form.has_small_groups)
    if plain and not form.has_zeros:
        return tile.in_turn
    return min(tile.in_turn, 2 if plain and form.bits == 8 and not form.float_zeros else 1)


def select_tiles(
    M: int, N: int, K: int, form: StoredForm, limits: DeviceLimits, precision: Precision = "exact"
) -> Tiles:
    """The tiles of a product of ``M`` rows, more than 16: the fastest by ``_microseconds``."""
    candidates: list[Tiles] = []
    widest = min(max(32, next_power_of_2(M)), _widest(form))
    for one in TILES[form.bits]:
        if one.columns > widest:
            continue
        if one.columns == 128 and one.staging != (2 if M <= 128 else 1):
            continue
        one = replace(one, in_turn=_in_turn(one, form, precision))
        last = one.tiles(M, N) % limits.num_sms
        candidates += [one, *one.shared_by(last, limits.num_sms, cdiv(K, form.block))]
    return min(candidates, key=lambda tile: _microseconds(tile, M, N, K, form, precision, limits))


def _microseconds(
    tile: Tiles, M: int, N: int, K: int, form: StoredForm, precision: Precision, limits: DeviceLimits
) -> float:
    """Roughly how long a product takes, without what is the same for all tiles. Tiles that aren't shared come first."""
    blocks = cdiv(K, form.block)
    rounds = float(cdiv(tile.tiles(M, N) - tile.shared, limits.num_sms) * blocks)
    time = 0.0
    if tile.shared:
        slower, time = 1.0, HANDOVER + (tile.parts - 1) * tile.columns * PARTIAL_SUM
        if tile.sharers % tile.shared > 0:
            in_a_row = M <= tile.columns < 256
            slower, time = (APART_IN_A_ROW, time) if in_a_row else (APART, time + SECOND_PART)
        rounds += cdiv(tile.shared * blocks, tile.sharers) * slower
    block = BLOCK_TIMES[form.bits][tile.columns] + (ZEROS if form.has_zeros else 0)
    if form.group > 0 and (form.scales_values or not tile.sums):
        block += SCALING[precision]
    return time + rounds * block * form.block / 256
