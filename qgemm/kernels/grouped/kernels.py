"""Products of several groups of rows in one launch: device code of ``grouped_mm`` and ``experts``.

``C[m] = sum over k of A[m, k] * B[g, n, k]``, scaled, for the group ``g`` of row ``m``. Groups may have any size, even
none, and only the device knows it. So the device cuts the rows into tiles, none of which has rows of two groups
(``write_tiles``), and the products read their tiles from that table (``GroupTiles``). The host only knows the maximum
number of tiles.

``_grouped_gemm_kernel`` is made of the same stages as ``_gemm_kernel``: views of one group's operands, and one tile of
them. ``hopper_kernels.py`` has the kernel for many rows on Hopper.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.gemm.kernels import GROUP, reduce_blocks
from qgemm.kernels.stages import GemmContext, ScheduleContext, make_output_view, make_tensor_view
from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.epilogue import Epilogue
from qgemm.kernels.stages.tile import Tile

# int32 values per entry, and before the first entry, where the numbers of tiles and rows are.
ENTRY = tl.constexpr(4)


@aggregate
class GroupTiles:
    """The table of tiles of rows that ``write_tiles`` has written to ``ptr``."""

    ptr: tl.tensor

    @triton.jit
    def count(self):
        """The number of tiles."""
        return tl.load(self.ptr)

    @triton.jit
    def num_rows(self):
        """The number of rows of all groups together."""
        return tl.load(self.ptr + 1)

    @triton.jit
    def get(self, index):
        """``(group, first, end)`` of a tile: rows ``[first, end)`` of A, all of one group."""
        entry = self.ptr + ENTRY * (1 + index)
        return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)

    @triton.jit
    def schedule(self, N, K, ctx: GemmContext):
        """The schedule of the tiles of all groups. The table must have been written before; see ``gdc_wait``."""
        return ScheduleContext(self.count() * ctx.block_m, N, K, ctx)


@triton.jit
def write_tiles(ptr, starts, sizes, groups, BLOCK_M: tl.constexpr):
    """Writes the table for groups of ``sizes [G]`` rows that begin at ``starts``. ``groups``: their numbers."""
    counts = tl.cdiv(sizes, BLOCK_M)
    before = tl.cumsum(counts, axis=0) - counts
    tl.store(ptr, tl.sum(counts, axis=0))
    tl.store(ptr + 1, tl.sum(sizes, axis=0))
    for i in range(tl.max(counts, axis=0)):
        entry = ptr + ENTRY * (1 + before + i)
        first = starts + i * BLOCK_M
        tl.store(entry, groups, mask=i < counts)
        tl.store(entry + 1, first, mask=i < counts)
        tl.store(entry + 2, tl.minimum(first + BLOCK_M, starts + sizes), mask=i < counts)


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["T"])
def _group_tiles_kernel(
    offsets, tiles, T, G,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program writes the table for groups that end at ``offsets [G]``. ``GROUPS``: a power of 2, at least ``G``.

    An offset below an earlier one, or outside ``[0, T]``, is replaced by the nearest valid one. So no row is outside
    ``[0, T)``, and there are no more tiles than valid offsets can have.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    groups = tl.arange(0, GROUPS)
    ends = tl.load(offsets + groups, mask=groups < G, other=0)
    ends = tl.associative_scan(tl.minimum(tl.maximum(ends, 0), T), 0, _largest)
    starts = tl.load(offsets + groups - 1, mask=(groups > 0) & (groups < G), other=0)
    starts = tl.associative_scan(tl.minimum(tl.maximum(starts, 0), T), 0, _largest)
    write_tiles(tiles, starts, tl.where(groups < G, ends - starts, 0), groups, BLOCK_M)


@triton.jit
def _grouped_gemm_kernel(
    A, B, C, A_scale, B_scale, bias, tiles,
    N, K,
    CONFIG: tl.constexpr, EVEN_K: tl.constexpr, PERSISTENT: tl.constexpr, PDL: tl.constexpr,
    QUANTIZED: tl.constexpr, DECODES: tl.constexpr, BLOCK_SCALED: tl.constexpr,
):  # fmt: skip
    """``A [T, K]``, ``B [G, N, K]``, ``C [T, N]``, ``A_scale [T]``, ``B_scale [G, N]``, ``bias [G, N]`` or None.

    All are contiguous. ``tiles``: the table from ``write_tiles`` for ``BLOCK_M``. ``PERSISTENT``: programs take several
    tiles in turn, else there is at least one program for each tile. ``PDL``: see ``Launch``. ``QUANTIZED``,
    ``DECODES``: as in ``GemmContext``. ``BLOCK_SCALED``: ``A_scale [T, K / 128]`` and ``B_scale [G, N / 128, K / 128]``
    are of blocks.
    """
    ctx = GemmContext(
        CONFIG.block_m, CONFIG.block_n, CONFIG.block_k, num_sms=1, group_size_m=CONFIG.group_size_m,
        even_k=EVEN_K, quantized=QUANTIZED, decodes=DECODES,
    )  # fmt: skip
    if PDL:
        gdc_wait()
    table = GroupTiles(tiles)
    sched = table.schedule(N, K, ctx)
    total = table.count() * tl.cdiv(N, ctx.block_n)
    if PERSISTENT:
        for tile_id in range(tl.program_id(0), total, tl.num_programs(0)):
            _grouped_tile(A, B, C, A_scale, B_scale, bias, table, sched, tile_id, BLOCK_SCALED, False)
    else:
        if tl.program_id(0) < total:
            _grouped_tile(A, B, C, A_scale, B_scale, bias, table, sched, tl.program_id(0), BLOCK_SCALED, PDL)


@triton.jit
def _grouped_tile(
    A, B, C, A_scale, B_scale, bias, table, sched, tile_id, BLOCK_SCALED: tl.constexpr, LAST: tl.constexpr
):  # fmt: skip
    """One tile of the output. ``LAST``: it is this program's last one, so the next kernel may start."""
    N, K = sched.N, sched.K
    pid_m, pid_n = sched.get_tile(tile_id)
    group, first, end = table.get(pid_m)
    group = group.to(tl.int64)
    row = first.to(tl.int64)
    rows = end - first
    tensorA = make_tensor_view(A + row * K, rows, K, K, 1)
    tensorB = make_tensor_view(B + group * N * K, K, N, 1, K)
    tensorC = make_output_view(C + row * N, rows, N, N, 1)
    out_tile = Tile(0, pid_n, sched.ctx.block_m, sched.ctx.block_n)
    if BLOCK_SCALED:
        epilogue = Epilogue(None, None, None if bias is None else bias + group * N)
        rm, rn = out_tile.indices()
        blocks = tl.cdiv(K, GROUP)
        a_scale = A_scale + (row + rm) * blocks
        b_scale = B_scale + (group * tl.cdiv(N, GROUP) + rn // GROUP) * blocks
        acc = reduce_blocks(sched.ctx, tensorA, tensorB, out_tile, a_scale, b_scale, 1, 1, rm < rows, rn < N)
    else:
        epilogue = Epilogue(A_scale + row, B_scale, bias).beyond(group * N)
        acc = sched.ctx.reduce_axis(tensorA, tensorB, out_tile)
    if LAST:
        gdc_launch_dependents()
    epilogue.store(acc, tensorC, out_tile)
