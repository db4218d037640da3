"""``Items``: which blocks of which tiles a program of Hopper's kernels computes, and whose parts make up a tile.

The first tiles are whole: programs compute them in turn. Blocks of K of the others, tile by tile, are cut into as many
ranges of equal length as there are sharers, which are the first programs: a range ends in the tile that it begins in,
or in the next. A program that has parts of two tiles computes that of the second one first: the last sharer of a tile
waits for the others, all before it, and none of them for anything.
"""

import triton
import triton.language as tl

from qgemm.kernels.stages import ScheduleContext
from qgemm.kernels.stages.aggregate import aggregate


@aggregate
class Items:
    """The tiles of a product; ``turns`` of them, or parts, are a program's."""

    sched: ScheduleContext
    alone: tl.tensor
    """How many tiles are whole."""
    blocks: tl.tensor
    """Of K, in a tile."""
    sharers: tl.tensor
    """At least as many as tiles that are shared."""
    shares: tl.constexpr
    """Whether there are such tiles."""

    @triton.jit
    def tiles(self):
        """How many there are."""
        return tl.cdiv(self.sched.M, self.sched.ctx.block_m) * tl.cdiv(self.sched.N, self.sched.ctx.block_n)

    @triton.jit
    def whole(self):
        """How many of them are this program's, and whole."""
        ahead = self.alone - tl.program_id(0)
        return tl.cdiv(tl.maximum(ahead, 0), tl.num_programs(0))

    @triton.jit
    def shared_blocks(self):
        """How many blocks shared tiles have."""
        return (self.tiles() - self.alone) * self.blocks

    @triton.jit
    def turns(self):
        """How many tiles, or parts of some, this program computes."""
        turns = self.whole()
        if self.shares:
            program = tl.program_id(0)
            shared = self.shared_blocks()
            first, last = program * shared // self.sharers, (program + 1) * shared // self.sharers - 1
            parts = last // self.blocks - first // self.blocks + 1
            turns += tl.where(program < self.sharers, parts, 0)
        return turns

    @triton.jit
    def part(self, turn):
        """``(index, first, last)``: the number of its tile, and its blocks of K."""
        program = tl.program_id(0)
        index, first, last = program + turn * tl.num_programs(0), 0 * turn, self.blocks
        if self.shares:
            if turn >= self.whole():
                part = self.turns() - 1 - turn
                blocks = self.shared_blocks()
                start, end = program * blocks // self.sharers, (program + 1) * blocks // self.sharers
                shared = start // self.blocks + part
                first = tl.maximum(start - shared * self.blocks, 0)
                last = tl.minimum(end - shared * self.blocks, self.blocks)
                index = self.alone + shared
        return index, first, last

    @triton.jit
    def place(self, turn):
        """``(row, col, first, last, shared)``: where its tile begins, its blocks of K, and its number of those shared.

        The last is negative for a whole tile.
        """
        index, first, last = self.part(turn)
        tile = self.sched.get_tile_from_idx(index)
        return tile.pid_m * tile.block_m, tile.pid_n * tile.block_n, first, last, index - self.alone

    @triton.jit
    def sharers_of(self, shared):
        """The first and the last program of a shared tile. Of its part, a program ``p`` is at ``p + shared``.

        No other part is there: where a program has two, they are of neighbouring tiles, and its range is the only one
        that goes from one to the other.
        """
        blocks = self.shared_blocks()
        start = shared * self.blocks
        return ((start + 1) * self.sharers - 1) // blocks, ((start + self.blocks) * self.sharers - 1) // blocks
