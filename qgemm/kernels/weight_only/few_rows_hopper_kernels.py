"""Products of up to 16 rows with weights of 4 and 8 bits on Hopper (sm_90), as they are stored, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import constexpr_function

from qgemm.kernels.stages.aggregate import OPTIONAL, aggregate
from qgemm.kernels.stages.ring import copy_to_shared
from qgemm.kernels.stages.unpack_words import INT4_BIAS, times_of_words, unpack_words, zero_of_words
from qgemm.kernels.weight_only.hopper_epilogue import SwappedEpilogue
from qgemm.kernels.weight_only.kernels import BLOCK, scale_value

WORDS = gl.constexpr(BLOCK.value // 4)


@constexpr_function
def how_scaled(scales_values, scale, dtype):
    """Which of ``unpack_words``'s ways: by one factor if the scales are of few bits, or as wide as the values."""
    if not scales_values:
        return ""
    if dtype == gl.float16:
        return " float"
    return " exact" if scale in (gl.bfloat16, gl.int8, gl.uint8) else " rest"


@constexpr_function
def sums_layout(tile):
    """Of each of the warps that share K, rows of the weight and of x."""
    return gl.NVMMADistributedLayout([2, 0], [tile.splits, tile.warps // tile.splits, 1], [1, 16, 8])


@constexpr_function
def gathered_layout(tile):
    """A thread has the sums of all warps that share K; threads side by side have rows of the weight side by side."""
    rows = min(tile.rows, 32)
    return gl.BlockedLayout([tile.splits, 1, 1], [1, rows, 32 // rows], [1, 1, tile.warps], [1, 2, 0])


@constexpr_function
def copy_layout(tile, values, width):
    """Threads side by side copy ``values`` each of a row of ``width``, 16 bytes."""
    threads = width // values
    warps = [tile.splits, tile.warps // tile.splits, 1]
    return gl.BlockedLayout([1, 1, values], [1, 32 // threads, threads], warps, [2, 1, 0])


@aggregate
class Blocks:
    """Blocks of a matrix's rows on their way to shared memory: in each step one for each warp that shares K."""

    slots: gl.shared_memory_descriptor
    """For the blocks of so many steps, in turn."""
    pointers: gl.tensor
    column: gl.tensor
    end: gl.tensor
    """Columns there are; zeros take the place of others."""
    split: gl.tensor
    cache: gl.constexpr
    """Through which caches a copy goes, in PTX."""

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
        """Where a step's blocks are."""
        DEPTH: gl.constexpr = self.slots.shape[0]
        return self.slots.index(step % DEPTH)


@gluon.jit
def _weight_blocks(weight, row, N, num_blocks, K, stride, FORM: gl.constexpr, TILE: gl.constexpr):
    """Of the weight's rows from ``row`` on, by words of four bytes. Rows beyond the last are as good as any."""
    layout: gl.constexpr = copy_layout(TILE, 4, WORDS)
    # Threads that read the same part of neighbouring rows meet no bank twice.
    shape: gl.constexpr = [TILE.depth, TILE.splits, TILE.rows, WORDS]
    slots = gl.allocate_shared_memory(gl.int32, shape, gl.SwizzledSharedLayout(16, 1, 2, [2, 1, 0]))
    n = gl.minimum(row + gl.arange(0, TILE.rows, gl.SliceLayout(0, gl.SliceLayout(2, layout))), N - 1)
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    split = gl.arange(0, TILE.splits, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    words = weight.cast(gl.pointer_type(gl.int32), bitcast=True)
    words += n.to(gl.int64)[None, :, None] * (stride // 4) + word
    # Rows of 8-bit values end with K, which may be inside a block.
    end = num_blocks * WORDS if FORM.bits == 4 else K // 16 * 4
    return Blocks(slots, words, word, end, split, ".cg")


@gluon.jit
def _x_blocks(x, M, K, stride, WIDTH: gl.constexpr, TILE: gl.constexpr):
    """Of the rows of x. Rows beyond the last are as good as any."""
    layout: gl.constexpr = copy_layout(TILE, 8, WIDTH)
    shape: gl.constexpr = [TILE.depth, TILE.splits, TILE.x_rows, WIDTH]
    slots = gl.allocate_shared_memory(x.dtype.element_ty, shape, gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
    m = gl.minimum(gl.arange(0, TILE.x_rows, gl.SliceLayout(0, gl.SliceLayout(2, layout))), M - 1)[None, :, None]
    k = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    split = gl.arange(0, TILE.splits, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    x += m.to(gl.int64) * (stride // 8 * 8) + k
    return Blocks(slots, x, k, K, split, "")


@aggregate
class Groups:
    """Scales of a program's rows of the weight, and zero points: pointers to those of the rows' first groups."""

    scale: gl.tensor
    zero_point: OPTIONAL
    split: gl.tensor
    part: OPTIONAL
    """Of half a block, the begin of each 16 bytes, or None if half a block has one group."""
    K: gl.tensor
    form: gl.constexpr

    @gluon.jit
    def load(self, step):
        """``(scales, zero points)`` of a step's halves of blocks."""
        SPLITS: gl.constexpr = self.split.shape[0]
        GROUP: gl.constexpr = self.form.group
        ZERO_GROUP: gl.constexpr = GROUP if GROUP > 0 else 1 << 30  # one for a row
        block = step * SPLITS + self.split
        scales = _load_groups(self.scale, self.part, block, self.K, GROUP, self.form)
        return scales, _load_groups(self.zero_point, self.part, block, self.K, ZERO_GROUP, self.form)


@gluon.jit
def _groups(scale, zero_point, row, N, K, stride, FORM: gl.constexpr, TILE: gl.constexpr):
    """The ``Groups`` of the weight's rows from ``row`` on."""
    mma: gl.constexpr = sums_layout(TILE)
    # Of each 16 bytes of a row, or of rows.
    layout: gl.constexpr = gl.DotOperandLayout(0, mma, 1) if FORM.scales_values else mma
    rows: gl.constexpr = gl.SliceLayout(2, layout)
    split = gl.arange(0, TILE.splits, gl.SliceLayout(1, rows))
    n = gl.minimum(row + gl.arange(0, TILE.rows, gl.SliceLayout(0, rows)), N - 1).to(gl.int64)[None, :]
    part = None
    if FORM.scales_values:
        part = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :] * 16
        n = n[:, :, None]
    zero_pointers = None
    if FORM.has_zeros:
        zero_pointers = zero_point + n * stride
    if FORM.paired:
        scale_pointers = scale.cast(gl.pointer_type(gl.int32), bitcast=True) + n * (stride // 2)
    else:
        scale_pointers = scale + n * stride
    return Groups(scale_pointers, zero_pointers, split, part, K, FORM)


@gluon.jit
def _load_groups(values, part, block, K, GROUP: gl.constexpr, FORM: gl.constexpr):
    """Of the groups of a block's halves, ``values``: scales or zero points, or None. Zeros beyond K.

    ``part``: of half a block, the begin of each 16 bytes, or None if half a block has one group.
    """
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    loaded = ()
    if values is not None and GROUP > 0:
        if values.dtype.element_ty == gl.int32:
            loaded = loaded + (gl.load(values + block[:, None], mask=(block * (2 * BLOCK) < K)[:, None], other=0),)
        else:
            for half in gl.static_range(HALVES):
                k = ((block * HALVES + half) * BLOCK)[:, None]
                if part is not None:
                    k = k[:, :, None] + part
                loaded = loaded + (gl.load(values + k // GROUP, mask=k < K, other=0),)
    return loaded


@gluon.jit
def _halves(pair, DTYPE: gl.constexpr):
    """The two 16-bit values in words."""
    low = (pair & 0xFFFF).to(gl.uint16).to(DTYPE, bitcast=True)
    return low, (pair.to(gl.uint32, bitcast=True) >> 16).to(gl.uint16).to(DTYPE, bitcast=True)


@gluon.jit
def _of_words(values, layout: gl.constexpr):
    """Values ``[s, n, 8]`` of 16 bytes each, for each of their words."""
    S: gl.constexpr = values.shape[0]
    ROWS: gl.constexpr = values.shape[1]
    values = gl.join(values, values)
    values = gl.join(values, values).reshape([S, ROWS, WORDS])
    return gl.convert_layout(values, layout, assert_trivial=True)


@gluon.jit
def _twice(values, DTYPE: gl.constexpr):
    """int32 of which either half is a value as ``DTYPE``."""
    return (values.to(DTYPE).to(gl.uint16, bitcast=True).to(gl.uint32) * 0x10001).to(gl.int32, bitcast=True)


@gluon.jit
def _factors(raw, layout: gl.constexpr, DTYPE: gl.constexpr, SCALES: gl.constexpr):
    """What ``unpack_words`` multiplies by: scales as they are stored, of each 16 bytes."""
    factors = ()
    for half in gl.static_range(len(raw)):
        scale = scale_value(raw[half])
        if SCALES == " float":
            factors = factors + (_of_words(scale.to(gl.int32, bitcast=True), layout),)
        else:
            factors = factors + (_of_words(_twice(scale, DTYPE), layout),)
            if SCALES == " rest":
                rest = scale - scale.to(DTYPE).to(gl.float32)
                factors = factors + (_of_words(_twice(rest, DTYPE), layout),)
    return factors


@gluon.jit
def _zero_points(raw, words, FORM: gl.constexpr, DTYPE: gl.constexpr):
    """What ``unpack_words`` takes for zero points of ``words``: ``raw`` are those of each 16 bytes, or of rows ``[s, n]``."""
    SHAPE: gl.constexpr = words.shape
    layout: gl.constexpr = words.type.layout
    FORMAT: gl.constexpr = FORM.name
    zeros = ()
    for half in gl.static_range(len(raw)):
        zero = _twice(zero_of_words(raw[half].to(gl.float32), FORMAT, DTYPE, half), DTYPE)
        if FORM.scales_values:
            zeros = zeros + (_of_words(zero, layout),)
        else:
            rows = gl.convert_layout(zero, gl.SliceLayout(2, layout), assert_trivial=True)[:, :, None]
            zeros = zeros + (gl.broadcast(rows, gl.zeros(SHAPE, gl.int32, layout))[0],)
    return zeros


@gluon.jit
def _load_x(slot, FIRST: gl.constexpr, COUNT: gl.constexpr, xl: gl.constexpr, TILE: gl.constexpr):
    """What ``COUNT`` values of the blocks from ``FIRST`` on are multiplied by."""
    values = slot.slice(FIRST, COUNT, 2).permute((0, 2, 1)).load(xl)
    if TILE.x_rows < TILE.columns:
        # Columns beyond the only one are as good as any.
        COLUMNS: gl.constexpr = TILE.columns
        values = gl.broadcast(values, gl.zeros([1, 1, COLUMNS], values.dtype, xl))[0]
    return values


@gluon.jit
def _in_words(values, mma: gl.constexpr):
    """``[s, k, m]`` of x, 16 neighbours along K a thread, as four at a time are for an instruction.

    No value moves: K is in another order, the one that the weight's words are in.
    """
    layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    S: gl.constexpr = values.shape[0]
    COLS: gl.constexpr = values.shape[2]
    split = values.reshape([S, values.shape[1] // 64, 4, 4, 2, 2, COLS]).permute(0, 1, 3, 4, 2, 5, 6)
    return gl.convert_layout(split.reshape(values.shape), layout, assert_trivial=True)


@gluon.jit
def _operand(parts, mma: gl.constexpr):
    """The four values of each word ``[s, n, word]``, in tiles of their own, as operand A: ``[s, n, k]``."""
    layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    S: gl.constexpr = parts[0].shape[0]
    ROWS: gl.constexpr = parts[0].shape[1]
    joined = gl.join(gl.join(parts[0], parts[1]), gl.join(parts[2], parts[3]))
    COUNT: gl.constexpr = parts[0].shape[2]
    split = joined.reshape([S, ROWS, COUNT // 16, 4, 4, 2, 2]).permute(0, 1, 2, 4, 6, 3, 5)
    return gl.convert_layout(split.reshape([S, ROWS, 4 * COUNT]), layout, assert_trivial=True)


@gluon.jit
def _minus_bias(M, COUNT: gl.constexpr, DTYPE: gl.constexpr, TILE: gl.constexpr):
    """Operand A of a product that takes ``INT4_BIAS`` from ``COUNT`` values of each row."""
    SPLITS: gl.constexpr = TILE.splits
    ROWS: gl.constexpr = TILE.rows
    ml: gl.constexpr = gl.DotOperandLayout(0, sums_layout(TILE), 2)
    # Not constants to the assembler, which would make them anew for each product.
    n = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, ml)))[None, :, None]
    j = gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(1, ml)))[None, None, :]
    same = gl.zeros([SPLITS, ROWS, COUNT], gl.int32, ml) + (1 | (M + (n & 8) + (j & 8)) >> 31)
    return (same * -INT4_BIAS).to(gl.float32).to(DTYPE)


@gluon.jit
def _unpack(
    words, scales, zeros, SCALE: gl.constexpr, DTYPE: gl.constexpr, BIASED: gl.constexpr, FORM: gl.constexpr
):  # fmt: skip
    """What ``unpack_words`` makes of a step's blocks: less zero points, and times the scales of small groups."""
    FORMAT: gl.constexpr = FORM.name
    SCALES: gl.constexpr = how_scaled(FORM.scales_values, SCALE, DTYPE)
    layout: gl.constexpr = words.type.layout
    factors = ()
    if FORM.scales_values:
        factors = _factors(scales, layout, DTYPE, SCALES)
    zero_points = ()
    if FORM.has_zeros:
        zero_points = _zero_points(zeros, words, FORM, DTYPE)
    return unpack_words(words, zero_points, factors, FORMAT, DTYPE, BIASED, SCALES)


@gluon.jit
def _add_products(
    acc, w_slot, x_slot, scales, zeros, minus_bias, SCALE: gl.constexpr, BIASED: gl.constexpr,
    FORM: gl.constexpr, TILE: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """``acc`` of each half of the blocks, and the products of a step's blocks of the weight and of x.

    ``PARTS``: in how many the blocks are unpacked and multiplied, one after the other.
    """
    mma: gl.constexpr = acc[0].type.layout
    wl: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    xl: gl.constexpr = gl.DotOperandLayout(1, mma, 16)
    HALVES: gl.constexpr = len(acc)
    COUNT: gl.constexpr = WORDS // PARTS
    SCALES_SUMS: gl.constexpr = FORM.group > 0 and not FORM.scales_values
    nothing = gl.zeros(acc[0].shape, gl.float32, mma)
    sums = ()
    for half in gl.static_range(HALVES):
        sums = sums + ((nothing if SCALES_SUMS else acc[half]),)
    for part in gl.static_range(PARTS):
        words = w_slot.slice(part * COUNT, COUNT, 2).load(wl)
        values = _unpack(words, scales, zeros, SCALE, x_slot.dtype, BIASED, FORM)
        so_far = sums
        sums = ()
        for half in gl.static_range(HALVES):
            b = _in_words(_load_x(x_slot, half * BLOCK + part * COUNT * 4, COUNT * 4, xl, TILE), mma)
            own = mma_v2(_operand(values[half], mma), b, so_far[half])
            if BIASED and half == 0:
                # Two chains of products are shorter than one.
                own = own + mma_v2(minus_bias, b, nothing)
            sums = sums + (own,)
    if SCALES_SUMS:
        scaled = ()
        for half in gl.static_range(HALVES):
            factor = gl.broadcast(scale_value(scales[half])[:, :, None], nothing)[0]
            scaled = scaled + (gl.fma(sums[half], factor, acc[half]),)
        return scaled
    else:
        return sums


@gluon.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x, weight, scale, zero_point, global_scale, bias, residual, out,
    M, N, K,
    stride_xm, stride_wn, stride_sn, stride_residual, stride_out,
    FORM: gl.constexpr, TILE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    SPLITS: gl.constexpr = TILE.splits
    DEPTH: gl.constexpr = TILE.depth
    ROWS: gl.constexpr = TILE.rows
    COLS: gl.constexpr = TILE.columns
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    WIDTH: gl.constexpr = BLOCK * HALVES
    FORMAT: gl.constexpr = FORM.name
    DTYPE: gl.constexpr = x.dtype.element_ty
    SCALE: gl.constexpr = scale.dtype.element_ty
    # Of few columns a product of x takes the bias away at less cost than subtractions.
    PLAIN: gl.constexpr = FORM.name == "int4" and not FORM.scales_values and not FORM.has_zeros
    BIASED: gl.constexpr = PLAIN and gl.bfloat16 == DTYPE and COLS == 8
    mma: gl.constexpr = sums_layout(TILE)
    if PDL:
        gdc_launch_dependents()
    row = gl.program_id(0) * ROWS
    num_blocks = gl.cdiv(K, WIDTH)
    # Multiples of 8, which the compiler knows only of multiples of 16.
    K = K // 8 * 8
    w_blocks = _weight_blocks(weight, row, N, num_blocks, K, stride_wn, FORM, TILE)
    for i in gl.static_range(DEPTH - 1):
        w_blocks.copy(i)
    async_copy.commit_group()
    groups = _groups(scale, zero_point, row, N, K, stride_sn, FORM, TILE)
    loaded = ()
    for i in gl.static_range(DEPTH - 1):
        loaded = loaded + (groups.load(i),)
    x_blocks = _x_blocks(x, M, K, stride_xm, WIDTH, TILE)
    acc = ()
    for _half in gl.static_range(HALVES):
        acc = acc + (gl.zeros([SPLITS, ROWS, COLS], gl.float32, mma),)
    # Small groups' factors are of whole blocks.
    PARTS: gl.constexpr = 1 if FORM.scales_values else TILE.parts
    minus_bias = _minus_bias(M, 4 * WORDS // PARTS, DTYPE, TILE)
    if PDL:
        gdc_wait()
    for i in gl.static_range(DEPTH - 1):
        x_blocks.copy(i)
        async_copy.commit_group()
    for step in range(gl.cdiv(num_blocks, SPLITS)):
        ahead = step + DEPTH - 1
        scales, zeros = loaded[0]
        if FORM.paired:
            scales = _halves(scales[0], SCALE)
        loaded = loaded[1:] + (groups.load(ahead),)
        async_copy.wait_group(DEPTH - 2)
        w_blocks.copy(ahead)
        x_blocks.copy(ahead)
        async_copy.commit_group()
        acc = _add_products(
            acc, w_blocks.slot(step), x_blocks.slot(step), scales, zeros, minus_bias, SCALE, BIASED, FORM, TILE, PARTS
        )

    of_splits = acc[0] * times_of_words(FORMAT, DTYPE, 0)
    if HALVES == 2:
        of_splits = of_splits + acc[1] * times_of_words(FORMAT, DTYPE, 1)
    total = gl.sum(gl.convert_layout(of_splits, gathered_layout(TILE)), 0)
    rl: gl.constexpr = total.type.layout
    n = row + gl.arange(0, ROWS, gl.SliceLayout(1, rl))
    m = gl.arange(0, COLS, gl.SliceLayout(0, rl))
    if FORM.group == 0:
        factor = scale_value(gl.load(scale + n.to(gl.int64) * stride_sn, mask=n < N, other=0))
        total = total * factor[:, None]
    epilogue = SwappedEpilogue(global_scale, bias, residual, stride_residual, M, N)
    total = epilogue.add(epilogue.scale(total), n, 0)
    inside = (m < M)[None, :] & (n < N)[:, None]
    pointers = out + m.to(gl.int64)[None, :] * stride_out + n[:, None]
    gl.store(pointers, total.to(out.dtype.element_ty), mask=inside)
