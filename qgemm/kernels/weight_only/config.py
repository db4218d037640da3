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
    has_zeros: bool = False
    """Whether there are zero points."""
    paired: bool = False
    """Whether the scales of a block's halves are 32 bits that are loaded together."""

    @property
    def scales_values(self) -> bool:
        """Whether scales are of so few values that these are multiplied by them, not sums of products."""
        return self.group % BLOCK_BYTES > 0

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
    x_rows: int
    """Of x in shared memory, as ``columns``, or 1."""
    registers: int | None = None
    """Of a thread, at most."""


# 16 to 24 warps a multiprocessor keep enough of the weight on its way: where it has few rows more warps share K. Each
# program reads all of x, from 9 rows on more than it reads of 16 rows of the weight: it has 32 or 64 of them.
FEW_ROWS = {
    (4, 1): (FewRows(8, 16, 8, 3, 8, 1), FewRows(4, 16, 8, 4, 4, 1), FewRows(4, 16, 8, 4, 4, 1)),
    (4, 8): (FewRows(4, 16, 8, 4, 4, 8), FewRows(4, 32, 8, 3, 8, 8), FewRows(4, 32, 8, 3, 8, 8)),
    (4, 16): (FewRows(4, 32, 16, 3, 8, 16), FewRows(4, 32, 16, 2, 8, 16, 128), FewRows(2, 32, 16, 2, 4, 16, 128)),
    (8, 1): (FewRows(8, 16, 8, 4, 8, 1), FewRows(8, 16, 8, 4, 8, 1), FewRows(4, 16, 8, 4, 4, 1)),
    (8, 8): (FewRows(4, 32, 8, 4, 8, 8), FewRows(4, 32, 8, 3, 8, 8), FewRows(2, 64, 8, 4, 8, 8)),
    (8, 16): (FewRows(4, 32, 16, 4, 8, 16), FewRows(4, 32, 16, 3, 8, 16), FewRows(2, 64, 16, 4, 8, 16)),
}
"""By the weight's bits and the rows of x, at most: of weights with up to 2 and 4 times 16 rows for each multiprocessor,
and of longer ones."""


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
    """The tiles of a product of ``M`` rows, up to 16."""
    width = sum(cdiv(N, 16) > each * limits.num_sms for each in (2, 4))
    return FEW_ROWS[form.bits, 1 if M == 1 else next_power_of_2(max(M, 8))][width]


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
