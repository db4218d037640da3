"""``Items``: which blocks of which tiles a program of Hopper's kernels computes, and which programs share a tile.

The first tiles are whole: programs compute them in turn. The K blocks of the other tiles, tile by tile, are cut into as
many ranges of equal length as there are sharers. The sharers are the first programs. A range ends in the tile that it
begins in, or in the next one. A program with parts of two tiles computes the second tile's part first. So the last
sharer of a tile waits for the others, which all come before it, and none of those waits for anything.
"""

import triton
import triton.language as tl

from qgemm.kernels.stages import ScheduleContext
from qgemm.kernels.stages.aggregate import aggregate


@aggregate
class Items:
    """The tiles of a product. A program computes ``turns`` of them, or of parts of them."""

    sched: ScheduleContext
    alone: tl.tensor
    """The number of whole tiles."""
    blocks: tl.tensor
    """The number of K blocks of a tile."""
    sharers: tl.tensor
    """The number of sharers, at least as many as shared tiles."""
    shares: tl.constexpr
    """Whether there are shared tiles."""

    @triton.jit
    def tiles(self):
        """The number of tiles."""
        return tl.cdiv(self.sched.M, self.sched.ctx.block_m) * tl.cdiv(self.sched.N, self.sched.ctx.block_n)

    @triton.jit
    def whole(self):
        """The number of whole tiles of this program."""
        ahead = self.alone - tl.program_id(0)
        return tl.cdiv(tl.maximum(ahead, 0), tl.num_programs(0))

    @triton.jit
    def shared_blocks(self):
        """The number of K blocks of all shared tiles."""
        return (self.tiles() - self.alone) * self.blocks

    @triton.jit
    def turns(self):
        """The number of tiles, or parts of tiles, that this program computes."""
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
        """``(index, first, last)`` of a turn: the number of its tile, and its blocks of K."""
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
        """``(row, col, first, last, shared)`` of a turn: where its tile begins, its blocks of K, its number if shared.

        ``shared`` counts from the first shared tile; it is negative for a whole tile.
        """
        index, first, last = self.part(turn)
        tile = self.sched.get_tile_from_idx(index)
        return tile.pid_m * tile.block_m, tile.pid_n * tile.block_n, first, last, index - self.alone

    @triton.jit
    def sharers_of(self, shared):
        """The first and the last program of a shared tile. Program ``p`` keeps its part at place ``p + shared``.

        No two parts have the same place: if a program has two parts, they are of neighbouring tiles, and its range is
        the only one that goes from one of these tiles to the other.
        """
        blocks = self.shared_blocks()
        start = shared * self.blocks
        return ((start + 1) * self.sharers - 1) // blocks, ((start + self.blocks) * self.sharers - 1) // blocks
