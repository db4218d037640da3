"""Products of few tokens with the weights of their experts, as they are stored, on Hopper: a read of the weights.

A program has some rows of one expert's weight and the tokens that chose it, which it finds among the ids itself. Rows
of the weight are those of a tensor core's instruction, tokens its columns, eight at a time. The warps of a program
share K: each copies its own blocks to shared memory, and their sums are added at the end. Pairs of a token and an
expert stay in their order: row ``p`` of the output is that of pair ``p``. A program takes some tiles of rows one after
the other, since to begin takes as long as a tile.

Where scales are powers of two, values become bfloat16 by them, exactly, each thread having the blocks of one scale:
within a block of K the weight and x are read in the same other order. Other scales are applied to sums in float32.

Gates and ups, 8 and 8 rows, are those of an instruction, so the activation happens where the sums are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.activations import gate_value, up_value
from qgemm.kernels.stages.unpack import scale_value, unpack, unpack_scaled, widen

# Renamed in Triton 3.9.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

BLOCK = gl.constexpr(128)  # bytes of a row
COLUMNS = gl.constexpr(8)  # tokens at a time


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _expert_ids(ids, pairs, P, E):
    """Experts of ``pairs``, -1 for those outside ``[0, E)`` and beyond ``P``."""
    found = gl.load(ids + pairs, mask=pairs < P, other=-1)
    return gl.where((found >= 0) & (found < E), found, -1).to(gl.int32)


@gluon.jit
def _pairs_of(rank, pairs, first, LAYOUT: gl.constexpr):
    """The pairs with ranks from ``first`` on, -1 for none; ``rank``: of each pair, -1 for those of other experts."""
    columns = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return gl.sum(gl.where(rank[:, None] == columns[None, :], pairs[:, None] + 1, 0), axis=0) - 1


@gluon.jit
def _outputs(r, GATED: gl.constexpr):
    """Which of a tile's outputs rows ``r`` of the weight in a tile are for; with gates and ups, 8 and 8, two each."""
    return r // 16 * 8 + r % 8 if GATED else r


@gluon.jit
def _rows(start, r, columns, GATED: gl.constexpr):
    """Which rows of an expert's weight are rows ``r`` of a tile whose outputs begin at ``start``."""
    n = start + _outputs(r, GATED)
    return n + r // 8 % 2 * columns if GATED else n


@gluon.jit
def _in_order(j, SCALED: gl.constexpr):
    """Which byte of a block is the ``j``-th: pieces of 16 so that a thread's two pieces have one scale."""
    return j // 16 % 4 * 32 + j // 64 * 16 + j % 16 if SCALED else j


@gluon.jit
def _following(tile, step, steps):
    """The tile and step after these, of a program that takes one tile after the other."""
    last = step + 1 == steps
    return gl.where(last, tile + 1, tile), gl.where(last, 0, step + 1)


@gluon.jit
def _copy_weight(
    slots, index, weight, tile, step, stride, row, column, row_bytes, TILE: gl.constexpr, OUT_ROWS: gl.constexpr
):
    """Starts copying each warp's block of a step of a tile to its slot, the ``index``-th.

    ``row``: how many rows before the first that a program hasn't. ``column``: of bytes in a step's part of a row.
    """
    start = step * (TILE.splits * BLOCK)
    inside = (row + tile * OUT_ROWS < 0) & (column + start < row_bytes) & (tile < TILE.count)
    copy_to_shared(
        slots.index(index % TILE.depth),
        weight + (tile * OUT_ROWS).to(gl.int64) * stride + start,
        mask=inside,
        cache_modifier=".cg",
    )
    async_copy.commit_group()


@gluon.jit
def _load_scales(scale, tile, step, row, group, groups, FORM: gl.constexpr, TILE: gl.constexpr, OUT_ROWS: gl.constexpr):
    """The scales, or zero points, of each half of a step's blocks; none where rows have one."""
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    loaded = ()
    if scale is not None and FORM.group > 0:
        for half in gl.static_range(HALVES):
            if FORM.scaled:
                at = group + (step * TILE.splits * HALVES + half) * (BLOCK // FORM.group)
            else:
                at = (group + (step * TILE.splits * HALVES + half)) * BLOCK // FORM.group
            inside = (row + tile * OUT_ROWS < 0) & (at < groups) & (tile < TILE.count)
            loaded = loaded + (gl.load(scale + (tile * (OUT_ROWS * groups) + at), mask=inside, other=0),)
    return loaded


@gluon.jit
def _in_words(tile, mma: gl.constexpr, OPERAND: gl.constexpr):
    """An operand of which threads have 16 neighbours along K each, as one of two for each instruction.

    No value moves: K is in another order, for both operands the same.
    """
    layout: gl.constexpr = gl.DotOperandLayout(OPERAND, mma, 2)
    WORDS: gl.constexpr = tile.shape[2 - OPERAND] // 32
    if OPERAND == 0:
        split = tile.reshape([tile.shape[0], tile.shape[1], 2, 4, WORDS, 2, 2]).permute(0, 1, 2, 4, 5, 3, 6)
    else:
        split = tile.reshape([tile.shape[0], 2, 4, WORDS, 2, 2, tile.shape[2]]).permute(0, 1, 3, 4, 2, 5, 6)
    return gl.convert_layout(split.reshape(tile.shape), layout, assert_trivial=True)


@gluon.jit
def _of_pieces(scale, SHAPE: gl.constexpr):
    """Powers of two by their exponents, ``[splits, rows, groups]``, for each value of a block ``SHAPE``."""
    bits = gl.where(scale == 0, 1 << 6, scale.to(gl.int16) << 7).to(gl.int16)
    value = bits.to(gl.bfloat16, bitcast=True).expand_dims(2).expand_dims(4)
    return value.broadcast_to([SHAPE[0], SHAPE[1], 2, 4, 16]).reshape(SHAPE)


@gluon.jit
def _swapped(x):
    """``x [splits, k, columns]`` with the inner two of each four along k swapped, as ``unpack_scaled`` gives them."""
    fours = x.reshape([x.shape[0], x.shape[1] // 4, 2, 2, x.shape[2]]).permute(0, 1, 3, 2, 4)
    return gl.convert_layout(fours.reshape(x.shape), x.type.layout, assert_trivial=True)


@gluon.jit
def _add_block(acc, total_x, packed, xs, scales, zeros, FORM: gl.constexpr):
    """Adds a block's products to ``acc``, and where zero points of rows are subtracted in the end, x to ``total_x``."""
    SUMS: gl.constexpr = acc.type.layout
    DTYPE: gl.constexpr = xs[0].dtype
    FORMAT: gl.constexpr = FORM.name
    if FORM.scaled:
        low = gl.convert_layout(_of_pieces(scales[0], packed.shape), packed.type.layout, assert_trivial=True)
        high = gl.convert_layout(_of_pieces(scales[1], packed.shape), packed.type.layout, assert_trivial=True)
        values = unpack_scaled(packed, low, high)
    elif FORM.bits == 4:
        values = unpack(packed, FORMAT, DTYPE)
    else:
        values = (widen(packed, FORMAT, DTYPE),)
    for half in gl.static_range(len(xs)):
        w = _in_words(values[half], SUMS, 0)
        b = _in_words(_swapped(xs[half]) if FORM.scaled else xs[half], SUMS, 1)
        if FORM.scaled or FORM.group == 0:
            acc = mma_v2(w, b, acc)
        else:
            sums = mma_v2(w, b, gl.zeros(acc.shape, gl.float32, SUMS))
        if FORM.has_zeros:
            ones = gl.full(w.shape, 1.0, DTYPE, w.type.layout)
            if FORM.group == 0:
                total_x = mma_v2(ones, b, total_x)
            else:
                of_x = mma_v2(ones, b, gl.zeros(acc.shape, gl.float32, SUMS))
                zero = zeros[half].to(gl.float32)[:, :, None]
                sums = gl.fma(of_x, gl.broadcast(-zero, sums)[0], sums)
        if not FORM.scaled and FORM.group > 0:
            factor = scale_value(scales[half])[:, :, None]
            acc = gl.fma(sums, gl.broadcast(factor, sums)[0], acc)
    return acc, total_x


@gluon.jit(do_not_specialize=["P"])
def _few_tokens_kernel(
    x, ids, weight, scale, zero_point, bias, out,
    P, E, N, K,
    FORM: gl.constexpr, TILE: gl.constexpr, FUNCTION: gl.constexpr, ACTIVATION: gl.constexpr,
    PAIRS_OF_ROW: gl.constexpr, BY_PAIR: gl.constexpr, EAGER: gl.constexpr, PAIRS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """``x [P / PAIRS_OF_ROW, K]``, ``ids [P]``, ``weight [E, N, bytes]``, ``scale``, ``zero_point [E, N, groups]``,
    ``bias [E, N]``, ``out [P, N]``; with a gated ``ACTIVATION`` half as many columns, gates before ups in ``N``.

    ``BY_PAIR``: program's experts are those of pairs, of which all but an expert's first have nothing to do; else each
    expert has programs. ``EAGER``: weights are loaded before it is known whether they are needed. ``PAIRS``: a power of
    2, at least ``P`` and 32 for each warp.
    """
    SPLITS: gl.constexpr = TILE.splits
    DEPTH: gl.constexpr = TILE.depth
    ROWS: gl.constexpr = TILE.rows
    WARPS: gl.constexpr = TILE.warps
    COUNT: gl.constexpr = TILE.count
    WARPS_N: gl.constexpr = WARPS // SPLITS
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    WIDTH: gl.constexpr = BLOCK * HALVES
    FIRST: gl.constexpr = ACTIVATION is not None
    GATED: gl.constexpr = ACTIVATION is not None and ACTIVATION.gated
    OUT_ROWS: gl.constexpr = ROWS // 2 if GATED else ROWS
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SPLITS, WARPS_N, 1], [1, 16, 8])
    wl: gl.constexpr = gl.DotOperandLayout(0, mma, 16)
    xl: gl.constexpr = gl.DotOperandLayout(1, mma, 16)
    # Threads side by side copy 16 bytes each of a row.
    cl: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 4, 8], [SPLITS, WARPS_N, 1], [2, 1, 0])
    w_shared: gl.constexpr = gl.SwizzledSharedLayout(64, 1, 2, [2, 1, 0])
    pl: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [WARPS, 1], [1, 0])
    w_slots = gl.allocate_shared_memory(weight.dtype.element_ty, [DEPTH, SPLITS, ROWS, BLOCK], w_shared)
    columns = N // 2 if GATED else N
    programs = gl.cdiv(columns, OUT_ROWS * COUNT)
    item = gl.program_id(0) // programs
    start = gl.program_id(0) % programs * (OUT_ROWS * COUNT)
    if PDL:
        # The ids are there once the kernel before this one has begun: then the one that wrote them has ended.
        if BY_PAIR:
            if FIRST:
                gdc_wait()
    if BY_PAIR:
        expert = gl.load(ids + item).to(gl.int32)
        known = (expert >= 0) & (expert < E)
        first_row = gl.where(known, expert, 0).to(gl.int64) * N
    else:
        expert = item
        first_row = expert.to(gl.int64) * N

    r = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, cl)))
    w_split = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, cl)))
    j = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, cl)))
    # The compiler doesn't see that 16 neighbours stay together.
    j = gl.max_contiguous(gl.multiple_of(_in_order(j, FORM.scaled), 16), 16)
    w_column = w_split[:, None, None] * BLOCK + j[None, None, :]
    if HALVES == 2:
        stride = gl.cdiv(K, WIDTH) * BLOCK
        row_bytes = (K // WIDTH * (BLOCK // 16) + gl.minimum(gl.cdiv(K % WIDTH, 16), BLOCK // 16)) * 16
    else:
        stride = K
        row_bytes = K
    w_row = (start + _outputs(r, GATED) - columns)[None, :, None]
    weight += (first_row + _rows(start, r, columns, GATED))[None, :, None] * stride + w_column
    num_blocks = gl.cdiv(K, WIDTH)
    steps = gl.cdiv(num_blocks, SPLITS)
    if EAGER:
        tile_ahead = start * 0
        step_ahead = start * 0
        for i in gl.static_range(DEPTH - 1):
            _copy_weight(w_slots, i, weight, tile_ahead, step_ahead, stride, w_row, w_column, row_bytes, TILE, OUT_ROWS)
            tile_ahead, step_ahead = _following(tile_ahead, step_ahead, steps)
    if PDL:
        if not BY_PAIR:
            if FIRST:
                gdc_wait()

    pairs = gl.arange(0, PAIRS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    found = _expert_ids(ids, pairs, P, E)
    if BY_PAIR:
        earlier = gl.max(((found == expert) & (pairs < item)).to(gl.int32), axis=0)
        chosen = (found == gl.where(known & (earlier == 0), expert, -2)).to(gl.int32)
    else:
        chosen = (found == expert).to(gl.int32)
    count = gl.sum(chosen, axis=0)
    rank = gl.where(chosen > 0, gl.associative_scan(chosen, 0, _add) - 1, -1)
    rank = gl.convert_layout(rank, gl.SliceLayout(1, pl))
    pairs = gl.arange(0, PAIRS, gl.SliceLayout(1, pl))
    if PDL:
        if not FIRST:
            gdc_wait()
        # Not earlier: the kernel after the next relies on what this one has waited for.
        gdc_launch_dependents()

    groups = gl.cdiv(K, FORM.group) if FORM.group > 0 else 1
    if FORM.scaled:
        # Where a thread's two pieces of 16 bytes lie along K.
        pieces: gl.constexpr = (
            gl.zeros([SPLITS, ROWS, BLOCK], gl.uint8, wl).reshape([SPLITS, ROWS, 2, 4, 16]).type.layout
        )
        sl: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, pieces))
        rl: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, sl))
        group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, sl)))[None, None, :]
        group = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, sl)))[:, None, None] * (4 * HALVES) + group
    else:
        sl: gl.constexpr = gl.SliceLayout(2, mma)
        rl: gl.constexpr = gl.SliceLayout(0, sl)
        group = gl.arange(0, SPLITS, gl.SliceLayout(1, sl))[:, None] * HALVES
    r = gl.arange(0, ROWS, rl)
    s_row = start + _outputs(r, GATED) - columns
    s_row = s_row[None, :, None] if FORM.scaled else s_row[None, :]
    if FORM.group > 0:
        at = (first_row + _rows(start, r, columns, GATED)) * groups
        at = at[None, :, None] if FORM.scaled else at[None, :]
        scale += at
        if FORM.has_zeros:
            zero_point += at

    c = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, xl)))
    k = _in_order(gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, xl))), FORM.scaled)[None, :, None]
    k = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, xl)))[:, None, None] * WIDTH + k
    ll: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, mma))
    sum_rows = gl.arange(0, ROWS, ll)
    DTYPE: gl.constexpr = out.dtype.element_ty
    for first in range(0, count, COLUMNS):
        tile_ahead = start * 0
        step_ahead = start * 0
        scales_ahead = ()
        zeros_ahead = ()
        for i in gl.static_range(DEPTH - 1):
            if EAGER:
                if first > 0:
                    _copy_weight(
                        w_slots, i, weight, tile_ahead, step_ahead, stride, w_row, w_column, row_bytes, TILE, OUT_ROWS
                    )
            else:
                _copy_weight(
                    w_slots, i, weight, tile_ahead, step_ahead, stride, w_row, w_column, row_bytes, TILE, OUT_ROWS
                )
            own = _load_scales(scale, tile_ahead, step_ahead, s_row, group, groups, FORM, TILE, OUT_ROWS)
            scales_ahead = scales_ahead + (own,)
            own = _load_scales(zero_point, tile_ahead, step_ahead, s_row, group, groups, FORM, TILE, OUT_ROWS)
            zeros_ahead = zeros_ahead + (own,)
            tile_ahead, step_ahead = _following(tile_ahead, step_ahead, steps)
        pair = _pairs_of(rank, pairs, first, pl)
        token = gl.convert_layout(pair, gl.SliceLayout(0, gl.SliceLayout(1, xl))) // PAIRS_OF_ROW
        there = first + c < count
        x_rows = x + gl.where(there, token, 0).to(gl.int64)[None, None, :] * K + k
        index = start * 0
        for tile in range(COUNT):
            n = start + tile * OUT_ROWS + _outputs(sum_rows, GATED)
            of_sum = first_row + _rows(start + tile * OUT_ROWS, sum_rows, columns, GATED)
            if bias is not None:
                added = gl.load(bias + of_sum, mask=n < columns, other=0.0)
            acc = gl.zeros([SPLITS, ROWS, COLUMNS], gl.float32, mma)
            total_x = gl.zeros([SPLITS, ROWS, COLUMNS], gl.float32, mma)
            for step in range(steps):
                xs = ()
                for half in gl.static_range(HALVES):
                    begin = step * (SPLITS * WIDTH) + half * BLOCK
                    inside = there[None, None, :] & (k + begin < K)
                    xs = xs + (gl.load(x_rows + begin, mask=inside, other=0.0),)
                scales = scales_ahead[0]
                zeros = zeros_ahead[0]
                next_scales = ()
                next_zeros = ()
                for i in gl.static_range(DEPTH - 2):
                    next_scales = next_scales + (scales_ahead[i + 1],)
                    next_zeros = next_zeros + (zeros_ahead[i + 1],)
                own = _load_scales(scale, tile_ahead, step_ahead, s_row, group, groups, FORM, TILE, OUT_ROWS)
                scales_ahead = next_scales + (own,)
                own = _load_scales(zero_point, tile_ahead, step_ahead, s_row, group, groups, FORM, TILE, OUT_ROWS)
                zeros_ahead = next_zeros + (own,)
                async_copy.wait_group(DEPTH - 2)
                _copy_weight(
                    w_slots, index + DEPTH - 1, weight, tile_ahead, step_ahead, stride, w_row, w_column, row_bytes,
                    TILE, OUT_ROWS,
                )  # fmt: skip
                tile_ahead, step_ahead = _following(tile_ahead, step_ahead, steps)
                packed = w_slots.index(index % DEPTH).load(wl)
                acc, total_x = _add_block(acc, total_x, packed, xs, scales, zeros, FORM)
                index += 1

            total = gl.sum(acc, 0)
            if FORM.group == 0:
                if FORM.has_zeros:
                    zero = gl.load(zero_point + of_sum, mask=n < columns, other=0).to(gl.float32)
                    total = total - gl.sum(total_x, 0) * zero[:, None]
                total = total * scale_value(gl.load(scale + of_sum, mask=n < columns, other=0))[:, None]
            if bias is not None:
                total += added.to(gl.float32)[:, None]
            if GATED:
                halves = total.reshape([ROWS // 16, 2, 8, COLUMNS]).permute(0, 2, 3, 1).split()
                gate = halves[0].reshape([OUT_ROWS, COLUMNS]).to(DTYPE).to(gl.float32)
                up = halves[1].reshape([OUT_ROWS, COLUMNS]).to(DTYPE).to(gl.float32)
                total = gate_value(gate, FUNCTION, ACTIVATION) * up_value(up, ACTIVATION)
            elif ACTIVATION is not None:
                total = gate_value(total.to(DTYPE).to(gl.float32), FUNCTION, ACTIVATION)
            ol: gl.constexpr = total.type.layout
            column = start + tile * OUT_ROWS + gl.arange(0, OUT_ROWS, gl.SliceLayout(1, ol))
            row = gl.convert_layout(pair, gl.SliceLayout(0, ol))
            to = out + gl.maximum(row, 0).to(gl.int64)[None, :] * columns + column[:, None]
            gl.store(to, total.to(DTYPE), mask=(row >= 0)[None, :] & (column < columns)[:, None])
    if EAGER:
        async_copy.wait_group(0)
