"""How a product with a stored weight of 4 or 8 bits is computed: ``Stored``, and the tile shapes of Hopper's kernels.

``select_few_rows`` and ``select_tiles`` choose by rules that were found on one H200 (docs/performance.md); nothing is
timed, so that the same problem always gets the same kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qgemm.kernels.launch.device import DeviceLimits
from qgemm.numerics.integers import cdiv, next_power_of_2

BLOCK_BYTES = 128
"""Of a row of the weight, that are multiplied at a time."""
MAX_FEW_ROWS = 16
TILE_ROWS = 128  # of the weight
MAX_SPLITS = 8
# In microseconds, on an H200.
BLOCK_TIMES = {32: 1.06, 64: 1.23, 128: 1.62, 256: 2.8}  # for a tile's 256 values of K, by rows of x
SECOND_LAUNCH = 1.5
SPLIT = 0.6
PARTIAL_SUM = 1.8e-6


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
    """A tile of a product of more rows, ``TILE_ROWS`` of the weight by ``columns`` rows of x; for ``_tiles_kernel``."""

    columns: int
    x_depth: int
    """Slots for x, ``panels`` of 64 columns each."""
    w_depth: int
    """Slots for blocks of the weight."""
    sums: bool = False
    """Whether scales are applied to sums of groups, not to the unpacked values, if groups have at least 128."""
    unpacks_blocks: bool = True
    """Whether a block is unpacked at a time, not half of one."""
    panels: int = 2
    splits: int = 1
    """How many programs share K of a tile that is shared. Their sums are added in order, by a second kernel."""
    shared: int = 0
    """How many of the last tiles are."""
    group_size_m: int = 8
    """Rows of tiles that are computed together."""

    def tiles(self, M: int, N: int) -> int:
        """How many an output of ``[M, N]`` has."""
        return cdiv(M, self.columns) * cdiv(N, TILE_ROWS)


TILES = (
    Tiles(32, 8, 8, sums=True),
    Tiles(64, 7, 5, sums=True),
    Tiles(128, 5, 3),
    Tiles(256, 5, 3, unpacks_blocks=False, panels=1),
)
"""Slots fill shared memory. With more rows of x registers hold no sums of groups, or no unpacked block, besides."""


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


def select_tiles(M: int, N: int, K: int, form: Stored, limits: DeviceLimits, exact: bool = True) -> Tiles:
    """The tiles of a product of ``M`` rows, more than 16: those that take the least time by ``_microseconds``.

    ``exact``: whether scales are values of the dtype of x. If not, they take registers, as zero points do.
    """
    plain = form.group == 0 or (form.group >= BLOCK_BYTES and exact)
    widest = 256 if plain and not form.has_zeros else 128
    candidates = []
    for one in TILES:
        if one.columns > min(max(32, next_power_of_2(M)), widest):
            continue
        last = one.tiles(M, N) % limits.num_sms
        most = min(MAX_SPLITS, cdiv(K, form.block)) if last else 1
        candidates += [replace(one, splits=splits, shared=last if splits > 1 else 0) for splits in range(1, most + 1)]
    return min(candidates, key=lambda tile: _microseconds(tile, M, N, K, form, limits))


def _microseconds(tile: Tiles, M: int, N: int, K: int, form: Stored, limits: DeviceLimits) -> float:
    """About how long a product takes, but for what all take. Tiles that aren't shared come first."""
    blocks = cdiv(K, form.block)
    rounds = cdiv(tile.tiles(M, N) - tile.shared, limits.num_sms) * blocks
    time = 0.0
    if tile.splits > 1:
        rounds += cdiv(tile.shared * tile.splits, limits.num_sms) * cdiv(blocks, tile.splits)
        sums = tile.shared * tile.splits * TILE_ROWS * tile.columns
        time = SECOND_LAUNCH + tile.splits * SPLIT + sums * PARTIAL_SUM
    return time + rounds * BLOCK_TIMES[tile.columns] * form.block / 256
