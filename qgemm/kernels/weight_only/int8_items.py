"""What programs of the product of int4 weights by int8 rows compute, in turn: ``Items``, tiles or parts of them.

Where a tile is cut along K, who comes last adds up the parts, in their order: ``PartialSums``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.ring import thread_barrier


@aggregate
class Items:
    """What programs compute, in turn: tiles, each cut along K in ``parts``.

    Neighbouring programs have the same part, and neighbouring tiles in blocks of ``group_m`` rows: they load the same
    blocks at the same time, and the cache answers them together.
    """

    tiles_m: gl.tensor
    tiles: gl.tensor
    blocks: gl.tensor
    """Of K, of a tile."""
    parts: gl.tensor
    cut: gl.constexpr
    """Whether there are several."""
    group_m: gl.constexpr

    @gluon.jit
    def tile(self, item):
        """``(m, n)`` of the tile, in tiles."""
        index = item % self.tiles
        per_group = self.group_m * (self.tiles // self.tiles_m)
        first = index // per_group * self.group_m
        size = gl.minimum(self.tiles_m - first, self.group_m)
        rest = index % per_group
        return first + rest % size, rest // size

    @gluon.jit
    def range_of(self, item):
        """The first block of K, and that after the last."""
        part = item // self.tiles
        if self.cut:
            return part * self.blocks // self.parts, (part + 1) * self.blocks // self.parts
        else:
            return part * 0, part * 0 + self.blocks

    @gluon.jit
    def after(self, item):
        """Of the program's next item, or the last one if there is none, its tile's ``n`` and its first block of K."""
        item = gl.minimum(item + gl.num_programs(0), self.tiles * self.parts - 1)
        _, n = self.tile(item)
        k, _ = self.range_of(item)
        return n, k


@aggregate
class Share:
    """What a consumer has of every tile: some of the weight's rows, and every ``splits``-th block of K."""

    rows: gl.tensor
    owner: gl.constexpr
    """Which of the ``owners``, each of whom has rows of its own, and adds up the sums of all ``splits`` of K."""
    owners: gl.constexpr
    first_block: gl.constexpr
    """0 for an owner."""
    splits: gl.constexpr

    @gluon.jit
    def index(self, tile):
        """Of the owner's rows of a tile, among those of all tiles."""
        return tile * self.owners + self.owner


@aggregate
class PartialSums:
    """Sums of the parts of tiles, in memory, of an owner's rows; of each piece of the columns."""

    sums: gl.tensor
    counts: gl.tensor
    """How many parts of each tile are there."""
    items: Items
    share: Share

    @gluon.jit
    def store(self, item, sums):
        """Stores those of an item, and returns whether all parts of its tile are there."""
        SIZE: gl.constexpr = sums[0].shape[0] * sums[0].shape[1]
        where = _places(sums[0])
        own = self.sums + (self.share.index(item) * len(sums)).to(gl.int64) * SIZE
        for i in gl.static_range(len(sums)):
            gl.store(own + i * SIZE + where, sums[i].to(gl.float32, bitcast=True))
        thread_barrier()
        count = self.counts + self.share.index(item % self.items.tiles)
        return gl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == self.items.parts - 1

    @gluon.jit
    def add_up(self, item, sums, NUMBER: gl.constexpr):
        """The sum of all parts of a tile, in their order, of one piece; those of ``item`` are ``sums``."""
        own = sums[NUMBER]
        SIZE: gl.constexpr = own.shape[0] * own.shape[1]
        where = _places(own)
        tile = item % self.items.tiles
        total = gl.zeros_like(own)
        for part in range(self.items.parts):
            if part == item // self.items.tiles:
                total += own
            else:
                index = self.share.index(tile + part * self.items.tiles) * len(sums) + NUMBER
                other = self.sums + index.to(gl.int64) * SIZE
                total += gl.load(other + where).to(own.dtype, bitcast=True)
        return total


@gluon.jit
def _places(sums):
    """Where among partial sums each is: in blocks of 8 x 8 values, which a warp writes at a time."""
    n = gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
    m = gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
    return (n // 8 * (sums.shape[1] // 8 * 64) + n % 8 * 8)[:, None] + (m // 8 * 64 + m % 8)[None, :]
