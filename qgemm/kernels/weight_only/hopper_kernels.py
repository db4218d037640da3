"""Products with weights of 4 and 8 bits on Hopper (sm_90), as they are stored, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages import GemmContext, ScheduleContext
from qgemm.kernels.stages.epilogue import added
from qgemm.kernels.stages.ring import barriers, initialize, load_block, store_block
from qgemm.kernels.stages.unpack import INT4_BIAS, unpack, unpack_biased, unpack_pairs, widen, widen_pairs
from qgemm.kernels.weight_only.kernels import scale_value

BLOCK = gl.constexpr(128)  # bytes of a row; of a packed one those of 256 values, whose halves are neighbours in K


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
def _load_groups(values, step, split, num_blocks, FORM: gl.constexpr, TILE: gl.constexpr):
    """Of the groups of each piece's halves, ``values``: scales or zero points, or None."""
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    loaded = ()
    if values is not None and FORM.group > 0:
        block = step * TILE.splits + split
        inside = (block < num_blocks)[:, None]
        for piece in gl.static_range(BLOCK // FORM.piece):
            for half in gl.static_range(HALVES):
                group = ((block * HALVES + half) * BLOCK + piece * FORM.piece) // FORM.group
                loaded = loaded + (gl.load(values + group[:, None], mask=inside, other=0),)
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
        scales_ahead = scales_ahead + (_load_groups(scale, i, split, num_blocks, FORM, TILE),)
        zeros_ahead = zeros_ahead + (_load_groups(zero_point, i, split, num_blocks, FORM, TILE),)

    if X_ROWS > 0:
        m = gl.arange(0, X_ROWS, gl.SliceLayout(0, gl.SliceLayout(2, xc)))[None, :, None]
        k = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, xc)))[None, None, :]
        k = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, xc)))[:, None, None] * WIDTH + k
    else:
        m = gl.arange(0, COLS, gl.SliceLayout(0, gl.SliceLayout(1, xl)))[None, None, :]
        k = gl.arange(0, PIECE, gl.SliceLayout(0, gl.SliceLayout(2, xl)))[None, :, None]
        k = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, xl)))[:, None, None] * WIDTH + k
    x += m.to(gl.int64) * stride_xm + k
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
        scales_ahead = next_scales + (_load_groups(scale, step + DEPTH - 1, split, num_blocks, FORM, TILE),)
        zeros_ahead = next_zeros + (_load_groups(zero_point, step + DEPTH - 1, split, num_blocks, FORM, TILE),)
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


@gluon.jit
def _load_weight(W, w_slots, w_full, w_empty, step, col, block, TILE: gl.constexpr):
    GROUPS: gl.constexpr = TILE.groups
    slot = step % TILE.w_depth
    full = w_full.index(slot)
    mbarrier.wait(w_empty.index(slot), (step // TILE.w_depth + 1) & 1)
    mbarrier.expect(full, GROUPS * W.block_type.nbytes)
    for group in gl.static_range(GROUPS):
        load_block(W, [col + group * 64, block * (BLOCK // 2)], full, w_slots.index(slot * GROUPS + group))


@gluon.jit
def _produce(
    X, W, x_slots, w_slots, x_full, x_empty, w_full, w_empty, sched, num_blocks, FORM: gl.constexpr, TILE: gl.constexpr
):
    GROUPS: gl.constexpr = TILE.groups
    PANELS: gl.constexpr = 4 if FORM.bits == 4 else 2
    start, total, stride = sched.persistent_tile_range()
    w_step = 0
    x_step = 0
    gdc_wait()
    for item in range(start, total * TILE.splits, stride):
        tile = sched.get_tile_from_idx(item // TILE.splits)
        split = item % TILE.splits
        row, col = tile.pid_m * tile.block_m, tile.pid_n * tile.block_n
        for block in range(num_blocks * split // TILE.splits, num_blocks * (split + 1) // TILE.splits):
            slot = w_step % TILE.w_depth
            mbarrier.wait(w_empty.index(slot), (w_step // TILE.w_depth + 1) & 1)
            mbarrier.expect(w_full.index(slot), GROUPS * W.block_type.nbytes)
            for group in gl.static_range(GROUPS):
                load_block(
                    W,
                    [col + group * 64, block * (BLOCK // 2)],
                    w_full.index(slot),
                    w_slots.index(slot * GROUPS + group),
                )
            w_step += 1
            for panel in gl.static_range(PANELS):
                slot = x_step % TILE.x_depth
                mbarrier.wait(x_empty.index(slot), (x_step // TILE.x_depth + 1) & 1)
                mbarrier.expect(x_full.index(slot), X.block_type.nbytes)
                load_block(X, [row, block * (PANELS * 64) + panel * 64], x_full.index(slot), x_slots.index(slot))
                x_step += 1


@gluon.jit
def _load_factors(pointers, block, last, FORM: gl.constexpr):
    """The scales, or zero points, of a block's halves; of a row's the same each time."""
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    factors = ()
    if pointers is not None:
        for half in gl.static_range(HALVES):
            group = (block * HALVES + half) * BLOCK // FORM.group if FORM.group > 0 else 0
            factors = factors + (gl.load(pointers + group, mask=block < last, other=0),)
    return factors


@gluon.jit
def _consume(
    Y, partial, scale, zero_point, global_scale, bias, residual, x_slots, w_slots, x_full, x_empty, w_full, w_empty,
    staging, sched, num_blocks, stride_sn, stride_residual, FORM: gl.constexpr, TILE: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = TILE.groups
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    BLOCK_M: gl.constexpr = sched.ctx.block_m
    FORMAT: gl.constexpr = FORM.name
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    wl: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    pl: gl.constexpr = gl.DotOperandLayout(0, mma, 1)
    DTYPE: gl.constexpr = x_slots.dtype
    start, total, stride = sched.persistent_tile_range()
    w_step = 0
    x_step = 0
    for item in range(start, total * TILE.splits, stride):
        tile = sched.get_tile_from_idx(item // TILE.splits)
        split = item % TILE.splits
        row, col = tile.pid_m * BLOCK_M, tile.pid_n * tile.block_n + WHO * 64
        n = col + gl.arange(0, 64, gl.SliceLayout(1, mma))
        rows = gl.minimum(n, sched.N - 1).to(gl.int64) * stride_sn
        pointers = scale + rows
        zero_pointers = None
        if FORM.has_zeros:
            zero_pointers = zero_point + rows
        first, last = num_blocks * split // TILE.splits, num_blocks * (split + 1) // TILE.splits
        acc = gl.zeros([64, BLOCK_M], gl.float32, mma)
        next_factors = _load_factors(pointers, first, last, FORM)
        more_factors = _load_factors(pointers, first + 1, last, FORM)
        next_zeros = _load_factors(zero_pointers, first, last, FORM)
        for block in range(first, last):
            w_slot = w_step % TILE.w_depth
            factors = next_factors
            next_factors = more_factors
            more_factors = _load_factors(pointers, block + 2, last, FORM)
            zeros = next_zeros
            next_zeros = _load_factors(zero_pointers, block + 1, last, FORM)
            mbarrier.wait(w_full.index(w_slot), w_step // TILE.w_depth & 1)
            packed = w_slots.index(w_slot * GROUPS + WHO)
            for half in gl.static_range(HALVES):
                values = ()
                for panel in gl.static_range(2):
                    codes = packed.slice(panel * 32, 32, 1).load(pl)
                    w = unpack_pairs(codes, FORMAT, DTYPE)[half] if HALVES == 2 else widen_pairs(codes, FORMAT, DTYPE)
                    w = gl.convert_layout(w, wl, assert_trivial=True)
                    if FORM.has_zeros:
                        zero = gl.convert_layout(zeros[half], gl.SliceLayout(1, wl)).to(gl.float32).to(DTYPE)
                        w = w - zero[:, None]
                    if FORM.group > 0 and not TILE.sums:
                        w = _scaled(w, gl.convert_layout(factors[half], gl.SliceLayout(1, wl)))
                    values = values + (w,)
                sums = acc
                if TILE.sums and FORM.group > 0:
                    sums = gl.zeros([64, BLOCK_M], gl.float32, mma)
                for panel in gl.static_range(2):
                    slot = (x_step + panel) % TILE.x_depth
                    mbarrier.wait(x_full.index(slot), (x_step + panel) // TILE.x_depth & 1)
                    sums = warpgroup_mma(values[panel], x_slots.index(slot).permute((1, 0)), sums, is_async=True)
                # Registers of the weight are written again only when all products have read them: assemblers before
                # CUDA 13.3 may move them too early.
                for panel in gl.static_range(2):
                    sums = warpgroup_mma_wait(1 - panel, deps=(sums,))
                    mbarrier.arrive(x_empty.index((x_step + panel) % TILE.x_depth), count=1)
                x_step += 2
                if TILE.sums and FORM.group > 0:
                    factor = scale_value(factors[half])[:, None]
                    acc = gl.fma(sums, gl.broadcast(factor, sums)[0], acc)
                else:
                    acc = sums
            mbarrier.arrive(w_empty.index(w_slot), count=1)
            w_step += 1
        if FORM.group == 0:
            acc = acc * scale_value(gl.load(pointers))[:, None]
        if global_scale is not None:
            acc = acc * gl.load(global_scale) / gl.load(global_scale + 1)
        if partial is not None:
            m = row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, mma))
            width = gl.cdiv(sched.M, BLOCK_M) * BLOCK_M
            to = (split.to(gl.int64) * sched.N + n)[:, None] * width + m[None, :]
            gl.store(partial + to, acc, mask=(n < sched.N)[:, None])
        else:
            if bias is not None:
                acc = acc + gl.load(bias + n, mask=n < sched.N, other=0.0).to(gl.float32)[:, None]
            if residual is not None:
                m = row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, mma))
                there = residual + m.to(gl.int64)[None, :] * stride_residual + n[:, None]
                inside = (n < sched.N)[:, None] & (m < sched.M)[None, :]
                acc = added(acc, gl.load(there, mask=inside, other=0.0))
            _store_across(Y, staging, row, col, acc.to(Y.dtype))
    if partial is None:
        tma.store_wait(0)


@gluon.jit
def _scaled(w, factor):
    """``w`` times the scales of its rows, rounded once."""
    if factor.dtype == w.dtype:
        return w * factor[:, None]
    else:
        return (w.to(gl.float32) * scale_value(factor)[:, None]).to(w.dtype)


@gluon.jit
def _store_across(Y, staging, row, col, values):
    """Has the copy engine store what is the other way round, by as many columns at a time as ``staging`` has rows."""
    if values.shape[1] == staging.shape[0]:
        tma.store_wait(0)
        staging.store(values.permute((1, 0)))
        fence_async_shared()
        store_block(Y, [row, col], staging)
    else:
        HALF: gl.constexpr = values.shape[1] // 2
        halves = values.reshape([64, 2, HALF]).permute(0, 2, 1).split()
        for i in gl.static_range(2):
            _store_across(Y, staging, row + i * HALF, col, halves[i])


@gluon.jit(do_not_specialize=["M"])
def _tiles_kernel(
    X, W, Y, partial, scale, zero_point, global_scale, bias, residual,
    M, N, K, stride_sn, stride_residual,
    FORM: gl.constexpr, TILE: gl.constexpr, NUM_SMS: gl.constexpr,
):  # fmt: skip
    """``X``, ``W``, ``Y``: tensor maps of ``[M, K]``, the stored weight, and ``[M, N]``."""
    GROUPS: gl.constexpr = TILE.groups
    ctx = GemmContext(X.block_shape[0], GROUPS * 64, 64, NUM_SMS, 1, TILE.group_size_m)
    sched = ScheduleContext(M, N, K, ctx)
    num_blocks = gl.cdiv(K, BLOCK * (2 if FORM.bits == 4 else 1))
    x_slots = gl.allocate_shared_memory(X.dtype, [TILE.x_depth, X.block_shape[0], 64], X.layout)
    w_slots = gl.allocate_shared_memory(W.dtype, [TILE.w_depth * GROUPS, 64, BLOCK // 2], W.layout)
    x_full, x_empty = barriers(TILE.x_depth), barriers(TILE.x_depth)
    w_full, w_empty = barriers(TILE.w_depth), barriers(TILE.w_depth)
    initialize(x_full, TILE.x_depth)
    initialize(w_full, TILE.w_depth)
    initialize(x_empty, TILE.x_depth, GROUPS)
    initialize(w_empty, TILE.w_depth, GROUPS)
    staging = gl.allocate_shared_memory(Y.dtype, [GROUPS, Y.block_shape[0], 64], Y.layout)
    gdc_launch_dependents()
    # Constants stay constants only in tuples that are written here.
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    Y, partial, scale, zero_point, global_scale, bias, residual, x_slots, w_slots, x_full, x_empty,
                    w_full, w_empty, staging.index(0), sched, num_blocks, stride_sn, stride_residual, FORM, TILE, 0,
                ),
            ),
            (
                _consume,
                (
                    Y, partial, scale, zero_point, global_scale, bias, residual, x_slots, w_slots, x_full, x_empty,
                    w_full, w_empty, staging.index(1), sched, num_blocks, stride_sn, stride_residual, FORM, TILE, 1,
                ),
            ),
            (_produce, (X, W, x_slots, w_slots, x_full, x_empty, w_full, w_empty, sched, num_blocks, FORM, TILE)),
        ],
        [4, 1],
        [TILE.registers, 40],
    )  # fmt: skip
