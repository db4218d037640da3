"""Blocks of a weight, of its small groups' scales and of x that warps copy to shared memory, and their products.

What the kernels of up to 16 rows and of few tokens of experts share, on Hopper (sm_90), in Gluon.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.runtime.jit import constexpr_function

from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.ring import copy_to_shared
from qgemm.kernels.weight_only.few_rows_groups import add_groups, ones_of, words_of_thread
from qgemm.kernels.weight_only.few_rows_products import WORDS, rows_of_tile
from qgemm.kernels.weight_only.kernels import BLOCK


@constexpr_function
def copy_layout(tile, values, width):
    """Neighbouring threads copy ``values`` elements, 16 bytes, of a row of ``width``."""
    threads = width // values
    warps = [tile.splits, tile.warps // tile.splits, 1]
    return gl.BlockedLayout([1, 1, values], [1, 32 // threads, threads], warps, [2, 1, 0])


@aggregate
class Blocks:
    """Blocks of a matrix's rows that are copied to shared memory: in each step, one for each warp that shares K."""

    slots: gl.shared_memory_descriptor
    """Slots for the blocks of ``depth`` steps, used in turn."""
    pointers: gl.tensor
    column: gl.tensor
    end: gl.tensor
    """The number of columns; beyond it zeros are written."""
    split: gl.tensor
    cache: gl.constexpr
    """The cache modifier of the copy in PTX."""

    @gluon.jit
    def copy(self, step):
        """Starts copying a step's blocks to their slot."""
        SPLITS: gl.constexpr = self.slots.shape[1]
        WIDTH: gl.constexpr = self.slots.shape[3]
        start = (step * SPLITS + self.split)[:, None, None] * WIDTH
        slot = self.slot(step)
        inside = start + self.column < self.end
        copy_to_shared(slot, self.pointers + start, mask=inside, cache_modifier=self.cache)

    @gluon.jit
    def slot(self, step):
        """The slot of a step's blocks."""
        DEPTH: gl.constexpr = self.slots.shape[0]
        return self.slots.index(step % DEPTH)


@gluon.jit
def _weight_blocks(weight, row, N, num_blocks, K, stride, FORM: gl.constexpr, TILE: gl.constexpr):
    """The ``Blocks`` of the weight's rows from ``row`` on, as words of four bytes. Rows beyond the last repeat it."""
    layout: gl.constexpr = copy_layout(TILE, 4, WORDS)
    # With this swizzle, threads that read the same part of neighbouring rows have no bank conflicts.
    shape: gl.constexpr = [TILE.depth, TILE.splits, TILE.rows, WORDS]
    PHASES: gl.constexpr = 8 // words_of_thread(FORM) if FORM.by_groups else 2
    slots = gl.allocate_shared_memory(gl.int32, shape, gl.SwizzledSharedLayout(WORDS // PHASES, 1, PHASES, [2, 1, 0]))
    n = gl.minimum(rows_of_tile(row, N, gl.SliceLayout(0, gl.SliceLayout(2, layout)), TILE), N - 1)
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    split = gl.arange(0, TILE.splits, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    words = weight.cast(gl.pointer_type(gl.int32), bitcast=True)
    words += n.to(gl.int64)[None, :, None] * (stride // 4) + word
    # Rows of 8-bit values end with K, which may be inside a block.
    end = num_blocks * WORDS if FORM.bits == 4 else K // 16 * 4
    return Blocks(slots, words, word, end, split, ".cg")


@gluon.jit
def _factor_blocks(factors, row, N, num_blocks, stride, FORM: gl.constexpr, TILE: gl.constexpr):
    """The ``Blocks`` of scales or zero points of the weight's rows from ``row`` on, where groups are small."""
    COUNT: gl.constexpr = FORM.block // FORM.group
    VALUES: gl.constexpr = min(COUNT, 128 // factors.dtype.element_ty.primitive_bitwidth)
    layout: gl.constexpr = copy_layout(TILE, VALUES, COUNT)
    shape: gl.constexpr = [TILE.depth, TILE.splits, TILE.rows, COUNT]
    slots = gl.allocate_shared_memory(factors.dtype.element_ty, shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    n = gl.minimum(rows_of_tile(row, N, gl.SliceLayout(0, gl.SliceLayout(2, layout)), TILE), N - 1)
    group = gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    split = gl.arange(0, TILE.splits, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    factors += n.to(gl.int64)[None, :, None] * (stride // COUNT * COUNT) + group
    return Blocks(slots, factors, group, num_blocks * COUNT, split, "")


@constexpr_function
def x_rows_layout(tile, form):
    """The layout of the numbers of x's rows."""
    return gl.SliceLayout(0, gl.SliceLayout(2, copy_layout(tile, 8, form.block)))


@gluon.jit
def x_blocks(x, m, K, stride, FORM: gl.constexpr, TILE: gl.constexpr):
    """The ``Blocks`` of the rows ``m`` of x."""
    WIDTH: gl.constexpr = FORM.block
    layout: gl.constexpr = copy_layout(TILE, 8, WIDTH)
    shape: gl.constexpr = [TILE.depth, TILE.splits, TILE.x_rows, WIDTH]
    slots = gl.allocate_shared_memory(x.dtype.element_ty, shape, gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
    m = m[None, :, None]
    k = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    split = gl.arange(0, TILE.splits, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    x += m.to(gl.int64) * (stride // 8 * 8) + k
    return Blocks(slots, x, k, K, split, "")


@aggregate
class CopiedBlocks:
    """Blocks of the weight and of x, step by step."""

    w: Blocks
    x_blocks: Blocks
    scales: Blocks
    """Of small groups, as ``zeros``; else unused."""
    zeros: Blocks
    form: gl.constexpr
    tile: gl.constexpr

    @gluon.jit
    def copy_weight(self, step):
        """Starts copying a step's blocks of the weight, and their scales and zero points, if they are copied."""
        self.w.copy(step)
        if self.form.by_groups:
            self.scales.copy(step)
            if self.form.has_zeros:
                self.zeros.copy(step)

    @gluon.jit
    def copy_first(self):
        """Starts copying the weight of the steps that have a slot before any is free again, without x."""
        for i in gl.static_range(self.tile.depth - 1):
            self.copy_weight(i)
        async_copy.commit_group()

    @gluon.jit
    def copy(self, step):
        """Starts copying a step's blocks."""
        self.copy_weight(step)
        self.x_blocks.copy(step)
        async_copy.commit_group()

    @gluon.jit
    def words(self, step, part, layout: gl.constexpr):
        """The weight's words. There is only one ``part``, the whole block."""
        return self.w.slot(step).load(layout)

    @gluon.jit
    def x(self, step, half: gl.constexpr, part, layout: gl.constexpr):
        """The values of x that half a block is multiplied by."""
        values = self.x_blocks.slot(step).slice(half * BLOCK, BLOCK, 2).permute((0, 2, 1)).load(layout)
        if self.tile.x_rows < self.tile.columns:
            # The other columns of the product aren't stored, so they may hold anything.
            COLUMNS: gl.constexpr = self.tile.columns
            values = gl.broadcast(values, gl.zeros([1, 1, COLUMNS], values.dtype, layout))[0]
        return values


@gluon.jit
def weight_blocks(
    weight, scale, zero_point, row, N, K, stride_wn, stride_sn, FORM: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """The ``Blocks`` of the weight's rows from ``row`` on, of their scales and of their zero points.

    The last two are unused unless products are scaled group by group.
    """
    num_blocks = gl.cdiv(K, FORM.block)
    w = _weight_blocks(weight, row, N, num_blocks, K, stride_wn, FORM, TILE)
    scales = w
    zeros = w
    if FORM.by_groups:
        scales = _factor_blocks(scale, row, N, num_blocks, stride_sn, FORM, TILE)
        zeros = scales
        if FORM.has_zeros:
            zeros = _factor_blocks(zero_point, row, N, num_blocks, stride_sn, FORM, TILE)
    return w, scales, zeros


@gluon.jit
def begin(blocks, products, row, M):
    """Starts copying the first steps' blocks of the weight's rows from ``row`` on.

    Returns what ``multiply`` needs besides: the scales and zero points of these steps that are loaded.
    """
    blocks.copy_first()
    loaded = ()
    if blocks.form.by_groups:
        loaded = loaded + (ones_of(M, products.dtype, blocks.form, blocks.tile),)
    else:
        groups = products.groups(row)
        for i in gl.static_range(blocks.tile.depth - 1):
            loaded = loaded + (groups.load(i),)
    return loaded


@gluon.jit
def multiply(blocks, products, row, loaded):
    """The sums of each warp over its part of K. ``loaded``: from ``begin``."""
    FORM: gl.constexpr = blocks.form
    DEPTH: gl.constexpr = blocks.tile.depth
    acc = products.zeros()
    for i in gl.static_range(DEPTH - 1):
        blocks.x_blocks.copy(i)
        async_copy.commit_group()
    groups = products.groups(row)
    for step in range(gl.cdiv(gl.cdiv(products.K, FORM.block), blocks.tile.splits)):
        if not FORM.by_groups:
            factors = loaded[0]
            loaded = loaded[1:] + (groups.load(step + DEPTH - 1),)
        async_copy.wait_group(DEPTH - 2)
        blocks.copy(step + DEPTH - 1)
        if FORM.by_groups:
            acc = (add_groups(acc[0], blocks, step, loaded[0], products.dtype, FORM, blocks.tile),)
        else:
            acc = products.add(acc, blocks, step, factors)
    # Copies beyond K write zeros; what follows may use the slots' memory.
    async_copy.wait_group(0)
    return acc
