"""Products of up to 16 rows with weights of 4 and 8 bits on Hopper (sm_90), as they are stored, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import constexpr_function

from qgemm.kernels.stages.epilogue import added
from qgemm.kernels.stages.unpack_words import INT4_BIAS, times_of_words, unpack_words, zero_of_words
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


@gluon.jit
def _copy_words(slots, weight, word, step, split, num_blocks, K, FORM: gl.constexpr, TILE: gl.constexpr):
    """Starts copying each warp's block of a step to its slot, by words of four bytes."""
    block = (step * TILE.splits + split)[:, None, None]
    # Rows of 8-bit values end with K, which may be inside a block.
    end = num_blocks * WORDS if FORM.bits == 4 else K // 16 * 4
    inside = block * WORDS + word < end
    slot = slots.index(step % TILE.depth)
    async_copy.async_copy_global_to_shared(slot, weight + block * WORDS, mask=inside, cache_modifier=".cg")


@gluon.jit
def _copy_x(slots, x, step, split, k, K, FORM: gl.constexpr, TILE: gl.constexpr):
    """Starts copying what a step's blocks are multiplied by; zeros beyond K."""
    WIDTH: gl.constexpr = BLOCK * (2 if FORM.bits == 4 else 1)
    start = (step * TILE.splits + split)[:, None, None] * WIDTH
    slot = slots.index(step % TILE.depth)
    async_copy.async_copy_global_to_shared(slot, x + start, mask=start + k < K)


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
def _zero_points(raw, layout: gl.constexpr, FORM: gl.constexpr, DTYPE: gl.constexpr):
    """What ``unpack_words`` takes for zero points: of each 16 bytes, or of rows ``[s, n]``."""
    FORMAT: gl.constexpr = FORM.name
    zeros = ()
    for half in gl.static_range(len(raw)):
        zero = _twice(zero_of_words(raw[half].to(gl.float32), FORMAT, DTYPE, half), DTYPE)
        if FORM.scales_values:
            zeros = zeros + (_of_words(zero, layout),)
        else:
            rows = gl.convert_layout(zero, gl.SliceLayout(2, layout), assert_trivial=True)[:, :, None]
            like = gl.zeros([zero.shape[0], zero.shape[1], WORDS], gl.int32, layout)
            zeros = zeros + (gl.broadcast(rows, like)[0],)
    return zeros


@gluon.jit
def _load_x(slot, HALF: gl.constexpr, xl: gl.constexpr, TILE: gl.constexpr):
    """What half a block is multiplied by."""
    values = slot.slice(HALF * BLOCK, BLOCK, 2).permute((0, 2, 1)).load(xl)
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
    split = values.reshape([S, 2, 4, 4, 2, 2, COLS]).permute(0, 1, 3, 4, 2, 5, 6)
    return gl.convert_layout(split.reshape(values.shape), layout, assert_trivial=True)


@gluon.jit
def _operand(parts, mma: gl.constexpr):
    """The four values of each word ``[s, n, word]``, in tiles of their own, as operand A: ``[s, n, k]``."""
    layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    S: gl.constexpr = parts[0].shape[0]
    ROWS: gl.constexpr = parts[0].shape[1]
    joined = gl.join(gl.join(parts[0], parts[1]), gl.join(parts[2], parts[3]))
    split = joined.reshape([S, ROWS, 2, 4, 4, 2, 2]).permute(0, 1, 2, 4, 6, 3, 5)
    return gl.convert_layout(split.reshape([S, ROWS, 4 * WORDS]), layout, assert_trivial=True)


@gluon.jit
def _add_half(acc, w, b, scale, minus_bias, BIAS: gl.constexpr):
    """``acc`` and the products of half a block, times ``scale`` if there is one. ``w``: ``BIAS`` more than it is."""
    SUMS: gl.constexpr = acc.type.layout
    nothing = gl.zeros(acc.shape, gl.float32, SUMS)
    sums = mma_v2(w, b, acc if scale is None else nothing)
    if BIAS > 0:
        # Two chains of products are shorter than one.
        sums = sums + mma_v2(minus_bias, b, nothing)
    if scale is not None:
        sums = gl.fma(sums, gl.broadcast(scale_value(scale)[:, :, None], sums)[0], acc)
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
    # Of few columns a product of x takes the bias away at less cost than subtractions.
    PLAIN: gl.constexpr = FORM.name == "int4" and not FORM.scales_values and not FORM.has_zeros
    BIASED: gl.constexpr = PLAIN and gl.bfloat16 == DTYPE and COLS == 8
    BIAS: gl.constexpr = INT4_BIAS if BIASED else 0
    SCALE: gl.constexpr = scale.dtype.element_ty
    PAIRED: gl.constexpr = FORM.paired
    SCALES: gl.constexpr = how_scaled(FORM.scales_values, SCALE, DTYPE)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SPLITS, TILE.warps // SPLITS, 1], [1, 16, 8])
    wl: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    xl: gl.constexpr = gl.DotOperandLayout(1, mma, 16)
    ml: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    if PDL:
        gdc_launch_dependents()
    start = gl.program_id(0) * ROWS
    num_blocks = gl.cdiv(K, WIDTH)
    # Multiples of 8, which the compiler knows only of multiples of 16.
    K = K // 8 * 8
    # Threads side by side copy 16 bytes each of a row.
    cl: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4, 8], [SPLITS, TILE.warps // SPLITS, 1], [2, 1, 0])
    # Threads that read the same part of neighbouring rows meet no bank twice.
    w_slots = gl.allocate_shared_memory(
        gl.int32, [DEPTH, SPLITS, ROWS, WORDS], gl.SwizzledSharedLayout(16, 1, 2, [2, 1, 0])
    )
    n = gl.minimum(start + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, cl))), N - 1)
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, cl)))[None, None, :]
    w_split = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, cl)))
    weight = weight.cast(gl.pointer_type(gl.int32), bitcast=True)
    weight += n.to(gl.int64)[None, :, None] * (stride_wn // 4) + word
    for i in gl.static_range(DEPTH - 1):
        _copy_words(w_slots, weight, word, i, w_split, num_blocks, K, FORM, TILE)
    async_copy.commit_group()

    # The layout of scales: of each 16 bytes of a row, or of rows.
    fl: gl.constexpr = gl.DotOperandLayout(0, mma, 1) if FORM.scales_values else mma
    sl: gl.constexpr = gl.SliceLayout(2, fl)
    split = gl.arange(0, SPLITS, gl.SliceLayout(1, sl))
    n = gl.minimum(start + gl.arange(0, ROWS, gl.SliceLayout(0, sl)), N - 1).to(gl.int64)[None, :]
    part = None
    if FORM.scales_values:
        part = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, fl)))[None, None, :] * 16
        n = n[:, :, None]
    GROUP: gl.constexpr = FORM.group
    ZERO_GROUP: gl.constexpr = FORM.group if FORM.group > 0 else 1 << 30  # one for a row
    zero_pointers = None
    if FORM.has_zeros:
        zero_pointers = zero_point + n * stride_sn
    if PAIRED:
        scale_pointers = scale.cast(gl.pointer_type(gl.int32), bitcast=True) + n * (stride_sn // 2)
    else:
        scale_pointers = scale + n * stride_sn
    scales = ()
    zeros = ()
    for i in gl.static_range(DEPTH - 1):
        scales = scales + (_load_groups(scale_pointers, part, i * SPLITS + split, K, GROUP, FORM),)
        zeros = zeros + (_load_groups(zero_pointers, part, i * SPLITS + split, K, ZERO_GROUP, FORM),)

    xc: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 256 // WIDTH, WIDTH // 8], [SPLITS, TILE.warps // SPLITS, 1], [2, 1, 0]
    )
    x_slots = gl.allocate_shared_memory(
        DTYPE, [DEPTH, SPLITS, TILE.x_rows, WIDTH], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    )
    # Rows beyond the last are as good as any.
    m = gl.minimum(gl.arange(0, TILE.x_rows, gl.SliceLayout(0, gl.SliceLayout(2, xc))), M - 1)[None, :, None]
    k = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, xc)))[None, None, :]
    x_split = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, xc)))
    x += m.to(gl.int64) * (stride_xm // 8 * 8) + k
    acc = ()
    for _half in gl.static_range(HALVES):
        acc = acc + (gl.zeros([SPLITS, ROWS, COLS], gl.float32, mma),)
    # Not constants to the assembler, which would make them anew for each product.
    n = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, ml)))[None, :, None]
    j = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, ml)))[None, None, :]
    same = gl.zeros([SPLITS, ROWS, BLOCK], gl.int32, ml) + (1 | (M + (n & 8) + (j & 8)) >> 31)
    minus_bias = (same * -INT4_BIAS).to(gl.float32).to(DTYPE)
    if PDL:
        gdc_wait()
    for i in gl.static_range(DEPTH - 1):
        _copy_x(x_slots, x, i, x_split, k, K, FORM, TILE)
        async_copy.commit_group()
    for step in range(gl.cdiv(num_blocks, SPLITS)):
        ahead = step + DEPTH - 1
        now_scales = _halves(scales[0][0], SCALE) if PAIRED else scales[0]
        now_zeros = zeros[0]
        next_scales = ()
        next_zeros = ()
        for i in gl.static_range(DEPTH - 2):
            next_scales = next_scales + (scales[i + 1],)
            next_zeros = next_zeros + (zeros[i + 1],)
        scales = next_scales + (_load_groups(scale_pointers, part, ahead * SPLITS + split, K, GROUP, FORM),)
        zeros = next_zeros + (_load_groups(zero_pointers, part, ahead * SPLITS + split, K, ZERO_GROUP, FORM),)
        async_copy.wait_group(DEPTH - 2)
        _copy_words(w_slots, weight, word, ahead, w_split, num_blocks, K, FORM, TILE)
        _copy_x(x_slots, x, ahead, x_split, k, K, FORM, TILE)
        async_copy.commit_group()
        x_slot = x_slots.index(step % DEPTH)
        words = w_slots.index(step % DEPTH).load(wl)
        factors = ()
        if FORM.scales_values:
            factors = _factors(now_scales, wl, DTYPE, SCALES)
        zero_points = ()
        if FORM.has_zeros:
            zero_points = _zero_points(now_zeros, wl, FORM, DTYPE)
        values = unpack_words(words, zero_points, factors, FORMAT, DTYPE, BIASED, SCALES)
        sums = ()
        for half in gl.static_range(HALVES):
            b = _in_words(_load_x(x_slot, half, xl, TILE), mma)
            w = _operand(values[half], mma)
            factor = None
            if FORM.group > 0 and not FORM.scales_values:
                factor = now_scales[half]
            sums = sums + (_add_half(acc[half], w, b, factor, minus_bias, (1 - half) * BIAS),)
        acc = sums

    of_splits = acc[0] * times_of_words(FORMAT, DTYPE, 0)
    if HALVES == 2:
        of_splits = of_splits + acc[1] * times_of_words(FORMAT, DTYPE, 1)
    total = gl.sum(of_splits, 0)
    rl: gl.constexpr = gl.SliceLayout(0, mma)
    n = start + gl.arange(0, ROWS, gl.SliceLayout(1, rl))
    m = gl.arange(0, COLS, gl.SliceLayout(0, rl))
    if FORM.group == 0:
        factor = scale_value(gl.load(scale + n.to(gl.int64) * stride_sn, mask=n < N, other=0))
        total = total * factor[:, None]
    if global_scale is not None:
        total = total * gl.load(global_scale) / gl.load(global_scale + 1)
    if bias is not None:
        total += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    inside = (m < M)[None, :] & (n < N)[:, None]
    if residual is not None:
        pointers = residual + m.to(gl.int64)[None, :] * stride_residual + n[:, None]
        total = added(total, gl.load(pointers, mask=inside, other=0.0))
    pointers = out + m.to(gl.int64)[None, :] * stride_out + n[:, None]
    gl.store(pointers, total.to(out.dtype.element_ty), mask=inside)
