"""Products of up to 16 rows with weights of 4 and 8 bits on Hopper (sm_90), as they are stored, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.epilogue import added
from qgemm.kernels.stages.unpack import INT4_BIAS, unpack, unpack_biased, widen
from qgemm.kernels.weight_only.kernels import BLOCK, scale_value


@gluon.jit
def _copy_weight(slots, weight, step, offset, row_bytes, TILE: gl.constexpr):
    """Starts copying each warp's block of a step to its slot. ``offset``: of its bytes in a step's part of a row."""
    start = step * (TILE.splits * BLOCK)
    slot = slots.index(step % TILE.depth)
    inside = offset + start < row_bytes
    async_copy.async_copy_global_to_shared(slot, weight + start, mask=inside, cache_modifier=".cg")


@gluon.jit
def _copy_x(slots, x, step, k, K, rows, M, FORM: gl.constexpr, TILE: gl.constexpr):
    """Starts copying what a step's blocks are multiplied by."""
    WIDTH: gl.constexpr = BLOCK * (2 if FORM.bits == 4 else 1)
    start = step * (TILE.splits * WIDTH)
    inside = (rows < M) & (k + start < K)
    async_copy.async_copy_global_to_shared(slots.index(step % TILE.depth), x + start, mask=inside)


@gluon.jit
def _load_groups(values, step, split, K, FORM: gl.constexpr, TILE: gl.constexpr):
    """Of the groups of each piece's halves, ``values``: scales or zero points, or None. Zeros beyond K."""
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    loaded = ()
    if values is not None and FORM.group > 0:
        block = step * TILE.splits + split
        for piece in gl.static_range(BLOCK // FORM.piece):
            for half in gl.static_range(HALVES):
                k = (block * HALVES + half) * BLOCK + piece * FORM.piece
                group = k // FORM.group
                loaded = loaded + (gl.load(values + group[:, None], mask=(k < K)[:, None], other=0),)
    return loaded


@gluon.jit
def _x_piece(x, x_slot, step, start, k, K, rows, M, xl: gl.constexpr, FORM: gl.constexpr, TILE: gl.constexpr):
    """What a piece's half, from ``start`` on in its block, is multiplied by."""
    if x_slot is not None:
        xs = x_slot.slice(start, FORM.piece, 2).permute((0, 2, 1)).load(xl)
        if TILE.x_rows < TILE.columns:
            # Columns beyond the only one are as good as any.
            COLUMNS: gl.constexpr = TILE.columns
            xs = gl.broadcast(xs, gl.zeros([1, 1, COLUMNS], xs.dtype, xl))[0]
        return xs
    else:
        WIDTH: gl.constexpr = BLOCK * (2 if FORM.bits == 4 else 1)
        start = start + step * (TILE.splits * WIDTH)
        return gl.load(x + start, mask=(rows < M) & (k + start < K), other=0.0)


@gluon.jit
def _in_words(tile, mma: gl.constexpr, OPERAND: gl.constexpr):
    """An operand whose threads have many neighbours along K each, as one of four neighbours for each instruction.

    So the two registers of x for an instruction are beside one another. No value moves: K is in another order, for both
    operands the same.
    """
    layout: gl.constexpr = gl.DotOperandLayout(OPERAND, mma, 2)
    WORDS: gl.constexpr = tile.shape[2 - OPERAND] // 32
    if WORDS > 0:
        if OPERAND == 0:
            split = tile.reshape([tile.shape[0], tile.shape[1], 2, 4, WORDS, 2, 2]).permute(0, 1, 2, 4, 5, 3, 6)
        else:
            split = tile.reshape([tile.shape[0], 2, 4, WORDS, 2, 2, tile.shape[2]]).permute(0, 1, 3, 4, 2, 5, 6)
        tile = gl.convert_layout(split.reshape(tile.shape), layout, assert_trivial=True)
    return tile


@gluon.jit
def _add_block(acc, total_x, packed, xs, scales, zeros, minus_bias, ones, FORM: gl.constexpr):
    """Adds a block's products to ``acc``.

    ``packed``, ``xs``: its pieces, and what each half of them is multiplied by. ``total_x``: sums of x so far, if zero
    points of rows are subtracted in the end.
    """
    FORMAT: gl.constexpr = FORM.name
    SUMS: gl.constexpr = acc.type.layout
    DTYPE: gl.constexpr = xs[0].dtype
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    BIASED: gl.constexpr = FORM.name == "int4" and gl.bfloat16 == DTYPE and acc.shape[2] == 8
    BIAS: gl.constexpr = INT4_BIAS if BIASED else 0
    for piece in gl.static_range(BLOCK // FORM.piece):
        if BIASED:
            values = unpack_biased(packed[piece])
        elif HALVES == 2:
            values = unpack(packed[piece], FORMAT, DTYPE)
        else:
            values = (widen(packed[piece], FORMAT, DTYPE),)
        for half in gl.static_range(HALVES):
            w = _in_words(values[half], SUMS, 0)
            b = _in_words(xs[piece * HALVES + half], SUMS, 1)
            if FORM.group == 0:
                if BIASED:
                    acc = mma_v2(minus_bias, b, acc)
                if FORM.has_zeros:
                    total_x = mma_v2(ones, b, total_x)
                acc = mma_v2(w, b, acc)
            else:
                sums = gl.zeros(acc.shape, gl.float32, SUMS)
                if FORM.has_zeros:
                    of_x = mma_v2(ones, b, sums)
                    sums = mma_v2(w, b, sums)
                    zero = zeros[piece * HALVES + half].to(gl.float32) + BIAS
                    sums = gl.fma(of_x, gl.broadcast(-zero[:, :, None], sums)[0], sums)
                else:
                    if BIASED:
                        sums = mma_v2(minus_bias, b, sums)
                    sums = mma_v2(w, b, sums)
                factor = scale_value(scales[piece * HALVES + half])[:, :, None]
                acc = gl.fma(sums, gl.broadcast(factor, sums)[0], acc)
    return acc, total_x


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
    X_ROWS: gl.constexpr = TILE.x_rows
    WARPS_N: gl.constexpr = TILE.warps // SPLITS
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    PIECE: gl.constexpr = FORM.piece
    WIDTH: gl.constexpr = BLOCK * HALVES
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SPLITS, WARPS_N, 1], [1, 16, 8])
    wl: gl.constexpr = gl.DotOperandLayout(0, mma, FORM.piece // 8)
    xl: gl.constexpr = gl.DotOperandLayout(1, mma, FORM.piece // 8)
    ml: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    sl: gl.constexpr = gl.SliceLayout(2, mma)
    # Threads side by side copy 16 bytes each of a row.
    cl: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 4, 8], [SPLITS, WARPS_N, 1], [2, 1, 0])
    xc: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // WIDTH, WIDTH // 8], [SPLITS, WARPS_N, 1], [2, 1, 0])
    # Reads of two rows' neighbouring halves meet no bank twice.
    w_shared: gl.constexpr = gl.SwizzledSharedLayout(64, 1, 2, [2, 1, 0])
    x_shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    if PDL:
        gdc_launch_dependents()
    start = gl.program_id(0) * ROWS
    num_blocks = gl.cdiv(K, WIDTH)
    w_slots = gl.allocate_shared_memory(weight.dtype.element_ty, [DEPTH, SPLITS, ROWS, BLOCK], w_shared)
    if X_ROWS > 0:
        x_slots = gl.allocate_shared_memory(x.dtype.element_ty, [DEPTH, SPLITS, X_ROWS, WIDTH], x_shared)

    n = gl.minimum(start + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, cl))), N - 1)
    w_split = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, cl)))
    j = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, cl)))
    offset = w_split[:, None, None] * BLOCK + j[None, None, :]
    row_bytes = num_blocks * BLOCK if FORM.bits == 4 else K
    weight += n.to(gl.int64)[None, :, None] * stride_wn + offset
    for i in gl.static_range(DEPTH - 1):
        _copy_weight(w_slots, weight, i, offset, row_bytes, TILE)
    async_copy.commit_group()

    split = gl.arange(0, SPLITS, gl.SliceLayout(1, sl))
    if FORM.group > 0:
        n = gl.minimum(start + gl.arange(0, ROWS, gl.SliceLayout(0, sl)), N - 1)
        scale += n.to(gl.int64)[None, :] * stride_sn
        if FORM.has_zeros:
            zero_point += n.to(gl.int64)[None, :] * stride_sn
    scales_ahead = ()
    zeros_ahead = ()
    for i in gl.static_range(DEPTH - 1):
        scales_ahead = scales_ahead + (_load_groups(scale, i, split, K, FORM, TILE),)
        zeros_ahead = zeros_ahead + (_load_groups(zero_point, i, split, K, FORM, TILE),)

    if X_ROWS > 0:
        m = gl.arange(0, X_ROWS, gl.SliceLayout(0, gl.SliceLayout(2, xc)))[None, :, None]
        k = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, xc)))[None, None, :]
        k = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, xc)))[:, None, None] * WIDTH + k
    else:
        m = gl.arange(0, COLS, gl.SliceLayout(0, gl.SliceLayout(1, xl)))[None, None, :]
        k = gl.arange(0, PIECE, gl.SliceLayout(0, gl.SliceLayout(2, xl)))[None, :, None]
        k = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, xl)))[:, None, None] * WIDTH + k
    # Both are multiples of 8, which the compiler knows only of multiples of 16: copies are of 16 bytes.
    K = K // 8 * 8
    x += m.to(gl.int64) * (stride_xm // 8 * 8) + k
    if PDL:
        gdc_wait()
    for i in gl.static_range(DEPTH - 1):
        if X_ROWS > 0:
            _copy_x(x_slots, x, i, k, K, m, M, FORM, TILE)
        async_copy.commit_group()

    acc = gl.zeros([SPLITS, ROWS, COLS], gl.float32, mma)
    total_x = gl.zeros([SPLITS, ROWS, COLS], gl.float32, mma)
    # Not constants to the assembler, which would make them anew for each product.
    n = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, ml)))[None, :, None]
    j = gl.arange(0, PIECE, gl.SliceLayout(0, gl.SliceLayout(1, ml)))[None, None, :]
    same = gl.zeros([SPLITS, ROWS, PIECE], gl.int32, ml) + (1 | (M + (n & 8) + (j & 8)) >> 31)
    minus_bias = (same * -INT4_BIAS).to(gl.float32).to(x.dtype.element_ty)
    ones = same.to(gl.float32).to(x.dtype.element_ty)
    for step in range(gl.cdiv(num_blocks, SPLITS)):
        xs = ()
        if X_ROWS == 0:
            for piece in gl.static_range(BLOCK // PIECE):
                for half in gl.static_range(HALVES):
                    xs = xs + (_x_piece(x, None, step, half * BLOCK + piece * PIECE, k, K, m, M, xl, FORM, TILE),)
        scales = scales_ahead[0]
        zeros = zeros_ahead[0]
        next_scales = ()
        next_zeros = ()
        for i in gl.static_range(DEPTH - 2):
            next_scales = next_scales + (scales_ahead[i + 1],)
            next_zeros = next_zeros + (zeros_ahead[i + 1],)
        scales_ahead = next_scales + (_load_groups(scale, step + DEPTH - 1, split, K, FORM, TILE),)
        zeros_ahead = next_zeros + (_load_groups(zero_point, step + DEPTH - 1, split, K, FORM, TILE),)
        async_copy.wait_group(DEPTH - 2)
        _copy_weight(w_slots, weight, step + DEPTH - 1, offset, row_bytes, TILE)
        if X_ROWS > 0:
            _copy_x(x_slots, x, step + DEPTH - 1, k, K, m, M, FORM, TILE)
        async_copy.commit_group()
        w_slot = w_slots.index(step % DEPTH)
        packed = ()
        for piece in gl.static_range(BLOCK // PIECE):
            if PIECE == BLOCK:
                packed = packed + (w_slot.load(wl),)
            else:
                packed = packed + (w_slot.slice(piece * PIECE, PIECE, 2).load(wl),)
            if X_ROWS > 0:
                x_slot = x_slots.index(step % DEPTH)
                for half in gl.static_range(HALVES):
                    xs = xs + (_x_piece(x, x_slot, step, half * BLOCK + piece * PIECE, k, K, m, M, xl, FORM, TILE),)
        acc, total_x = _add_block(acc, total_x, packed, xs, scales, zeros, minus_bias, ones, FORM)

    total = gl.sum(acc, 0)
    rl: gl.constexpr = gl.SliceLayout(0, mma)
    n = start + gl.arange(0, ROWS, gl.SliceLayout(1, rl))
    m = gl.arange(0, COLS, gl.SliceLayout(0, rl))
    if FORM.group == 0:
        if FORM.has_zeros:
            zero = gl.load(zero_point + n.to(gl.int64) * stride_sn, mask=n < N, other=0).to(gl.float32)
            total = total - gl.sum(total_x, 0) * zero[:, None]
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
