"""``ScheduleContext``: which program computes which tile, in which order.

Tiles of the ``M x N`` output are numbered, and ``get_tile`` maps a number to a place. It takes ``group_size_m`` rows
and ``group_size_n`` columns of tiles together, so that tiles in flight together share operands in cache. Within such a
block it goes row by row, so that neighbours share a block of A; if the block has a single column, neighbours share a
block of B. Programs take tiles in one of two ways, and a kernel may use both:

- persistent: program p takes tiles p, p + num_sms, ... (``persistent_tile_range``).
- Stream-K (Osama et al. 2023, arXiv:2301.03598): the K blocks of the last ``streamk_tiles`` tiles are laid end to end
  and cut into ``num_sms`` equal runs (``iter_range``), so that few tiles still occupy every SM.

On a device with chiplets, consecutive programs run on different chiplets. Programs are renumbered so that each chiplet
gets runs of ``chunk_size`` neighbouring tiles, which then share its cache.
"""

import triton
import triton.language as tl

from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.context import GemmContext
from qgemm.kernels.stages.tile import Tile


@aggregate
class ScheduleContext:
    """The schedule of an ``M x N x K`` problem. Launch ``ctx.num_sms`` programs along the grid's axis 0.

    ``streamk_tiles``: how many tiles are left to Stream-K, at most all of them; 0 for none.
    """

    M: tl.tensor
    N: tl.tensor
    K: tl.tensor
    ctx: GemmContext
    streamk_tiles: tl.constexpr = 0

    @triton.jit
    def persistent_tile_range(self):
        """``(start, total, stride)`` for ``range``: this program's tiles, except those left to Stream-K."""
        return self._program(), self._num_tiles() - self._num_streamk_tiles(), self.ctx.num_sms

    @triton.jit
    def iter_range(self):
        """``(start, end)``: this program's run of K blocks over the tiles left to Stream-K."""
        num_k = self._num_k_blocks()
        num_streamk = self._num_streamk_tiles()
        first = (self._num_tiles() - num_streamk) * num_k
        share = num_streamk * num_k // self.ctx.num_sms
        rest = num_streamk * num_k % self.ctx.num_sms
        program = self._program()
        start = first + program * share + tl.minimum(program, rest)
        end = start + share + (program < rest).to(tl.int32)
        return start, end

    @triton.jit
    def get_iter(self, iter_id):
        """``(pid_m, pid_n, k_idx)`` of a K block from ``iter_range``."""
        num_k = self._num_k_blocks()
        pid_m, pid_n = self.get_tile(iter_id // num_k)
        return pid_m, pid_n, iter_id % num_k

    @triton.jit
    def get_tile(self, tile_id):
        """``(pid_m, pid_n)`` of a tile number."""
        num_pid_m = tl.cdiv(self.M, self.ctx.block_m)
        num_pid_n = tl.cdiv(self.N, self.ctx.block_n)
        group = tile_id // (self.ctx.group_size_m * num_pid_n)
        in_group = tile_id % (self.ctx.group_size_m * num_pid_n)
        first_m = group * self.ctx.group_size_m
        size_m = tl.minimum(num_pid_m - first_m, self.ctx.group_size_m)
        if self.ctx.group_size_n == 1:
            return first_m + in_group % size_m, in_group // size_m
        else:
            first_n = in_group // (size_m * self.ctx.group_size_n) * self.ctx.group_size_n
            size_n = tl.minimum(num_pid_n - first_n, self.ctx.group_size_n)
            in_block = in_group - first_n * size_m
            return first_m + in_block // size_n, first_n + in_block % size_n

    @triton.jit
    def get_tile_from_idx(self, tile_id):
        """The output ``Tile`` of a tile number."""
        pid_m, pid_n = self.get_tile(tile_id)
        return self.get_tile_from_coord(pid_m, pid_n)

    @triton.jit
    def get_tile_from_coord(self, pid_m, pid_n):
        """The output ``Tile`` at ``(pid_m, pid_n)``."""
        return Tile(pid_m, pid_n, self.ctx.block_m, self.ctx.block_n)

    @triton.jit
    def _num_tiles(self):
        return tl.cdiv(self.M, self.ctx.block_m) * tl.cdiv(self.N, self.ctx.block_n)

    @triton.jit
    def _num_streamk_tiles(self):
        return tl.minimum(self._num_tiles(), self.streamk_tiles)

    @triton.jit
    def _num_k_blocks(self):
        return tl.cdiv(self.K, self.ctx.block_k)

    @triton.jit
    def _program(self):
        """The number of this program, ordered by chiplet: a permutation of ``[0, num_sms)``."""
        pid = tl.program_id(0)
        if self.ctx.num_xcds == 1:
            return pid
        else:
            round_size: tl.constexpr = self.ctx.num_xcds * self.ctx.chunk_size
            whole: tl.constexpr = self.ctx.num_sms // round_size * round_size
            on_chiplet = pid // self.ctx.num_xcds
            chunk = on_chiplet // self.ctx.chunk_size
            moved = (
                chunk * round_size + pid % self.ctx.num_xcds * self.ctx.chunk_size + on_chiplet % self.ctx.chunk_size
            )
            # Programs beyond the last whole round keep their numbers.
            return tl.where(pid < whole, moved, pid)
