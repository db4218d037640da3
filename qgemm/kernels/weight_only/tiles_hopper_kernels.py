"""Products of many rows with weights of 4 and 8 bits on Hopper (sm_90), as they are stored, in Gluon.

A tile is 128 rows of the weight by up to 256 rows of x. One warp has TMA fill two rings: packed blocks of the
weight, and panels of x. Each of two groups of four warps unpacks its rows of the weight into the registers that
``wgmma`` takes its operand A from, while the other's products run.

Registers of the weight are written again only when all products have read them, and panels that are unpacked while
others' products run have registers of their own: assemblers before CUDA 13.3 may move them too early.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import constexpr_function

from qgemm.kernels.stages import GemmContext, ScheduleContext
from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.ring import (
    PRODUCER_REGISTERS,
    barriers,
    initialize,
    load_block,
    store_block,
)
from qgemm.kernels.stages.unpack import SCALED_BY, times_of_pairs, unpack_pairs, unpack_times_scale, widen_pairs
from qgemm.kernels.weight_only import config
from qgemm.kernels.weight_only.hopper_epilogue import SwappedEpilogue
from qgemm.kernels.weight_only.items import Items
from qgemm.kernels.weight_only.kernels import BLOCK, scale_value
from qgemm.kernels.weight_only.partial_sums import add_parts, in_blocks

PANEL = gl.constexpr(64)  # values of K, of x
ROWS = gl.constexpr(config.TILE_ROWS)


@constexpr_function
def how_scaled(form, tile, scale, dtype):
    """What scales of groups are applied to; nothing if a scale is of a row.

    "sums" of groups; "values", before the first products are started; or "codes" of int4, as they are unpacked: a
    multiply-add scales them and takes away what makes them positive.
    """
    if form.group == 0:
        return ""
    if form.group < BLOCK.value:
        return "values"
    if form.name == "int4" and not form.has_zeros and scale == gl.bfloat16 and dtype == gl.bfloat16:
        return "codes"
    return "sums" if tile.sums else "values"


@constexpr_function
def left_over(form, scaled, dtype):
    """What unpacked values are to be multiplied by; sums are, in the end."""
    if scaled == "codes":
        return 1 / SCALED_BY.value
    return times_of_pairs(form.name, dtype) if form.bits == 8 else 1.0


@aggregate
class Rings:
    """Slots of shared memory for panels of x and blocks of the weight, used in turn, with the barriers that count them.

    As in ``Ring``, but with steps of their own.
    """

    x: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    x_full: gl.shared_memory_descriptor
    x_empty: gl.shared_memory_descriptor
    w_full: gl.shared_memory_descriptor
    w_empty: gl.shared_memory_descriptor

    @gluon.jit
    def load_weight(self, W, slot, col, block):
        """Starts loading a block of the weight, half of its rows for each group of warps."""
        mbarrier.expect(self.w_full.index(slot), 2 * W.block_type.nbytes)
        for i in gl.static_range(2):
            load_block(W, [col + i * 64, block * (BLOCK // 2)], self.w_full.index(slot), self.w.index(slot * 2 + i))


@gluon.jit
def _produce(X, W, rings, items, FORM: gl.constexpr, TILE: gl.constexpr):
    PANELS: gl.constexpr = TILE.panels
    SLOTS: gl.constexpr = (4 if FORM.bits == 4 else 2) // PANELS
    _, col, first, last, _ = items.place(gl.program_id(0) * 0)
    # Weights don't change: the first come while the kernel ahead in the stream ends.
    ahead = gl.minimum(last - first, TILE.w_depth)
    for step in range(ahead):
        rings.load_weight(W, step, col, first + step)
    gdc_wait()
    w_step = 0
    x_step = 0
    for turn in range(items.turns()):
        row, col, first, last, _ = items.place(turn)
        for block in range(first, last):
            if w_step >= ahead:
                slot = w_step % TILE.w_depth
                mbarrier.wait(rings.w_empty.index(slot), (w_step // TILE.w_depth + 1) & 1)
                rings.load_weight(W, slot, col, block)
            w_step += 1
            for i in gl.static_range(SLOTS):
                slot = x_step % TILE.x_depth
                full = rings.x_full.index(slot)
                mbarrier.wait(rings.x_empty.index(slot), (x_step // TILE.x_depth + 1) & 1)
                mbarrier.expect(full, PANELS * X.block_type.nbytes)
                for panel in gl.static_range(PANELS):
                    k = ((block * SLOTS + i) * PANELS + panel) * PANEL
                    load_block(X, [row, k], full, rings.x.index(slot * PANELS + panel))
                x_step += 1


@gluon.jit
def _load_factors(pointers, block, groups, FORM: gl.constexpr):
    """Scales, or zero points, of a block's halves; of smaller groups 32 bits at a time. 0 beyond the last group."""
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    factors = ()
    if pointers is not None:
        if FORM.group > 0 and FORM.group < BLOCK:
            BYTES: gl.constexpr = pointers.dtype.element_ty.primitive_bitwidth // 8
            WORDS: gl.constexpr = BLOCK * HALVES // FORM.group * BYTES // 4
            words = pointers.cast(gl.pointer_type(gl.int32), bitcast=True)
            for i in gl.static_range(WORDS):
                at = block * WORDS + i
                factors = factors + (gl.load(words + at, mask=at < groups * BYTES // 4, other=0),)
        else:
            for half in gl.static_range(HALVES):
                group = (block * HALVES + half) * BLOCK // FORM.group if FORM.group > 0 else 0
                factors = factors + (gl.load(pointers + group, mask=group < groups, other=0),)
    return factors


@gluon.jit
def _of_groups(factors, INDEX: gl.constexpr, DTYPE: gl.constexpr, FORM: gl.constexpr):
    """For each group of a block's panel, a vector of ``DTYPE`` from what ``_load_factors`` gives."""
    own = ()
    if FORM.group > 0 and FORM.group < BLOCK:
        COUNT: gl.constexpr = PANEL // FORM.group
        BITS: gl.constexpr = DTYPE.primitive_bitwidth
        for i in gl.static_range(COUNT):
            word = factors[(INDEX * COUNT + i) * BITS // 32]
            if BITS == 32:
                own = own + (word.to(DTYPE, bitcast=True),)
            elif BITS == 16:
                own = own + ((word >> (INDEX * COUNT + i) * BITS % 32).to(gl.int16).to(DTYPE, bitcast=True),)
            else:
                own = own + ((word >> (INDEX * COUNT + i) * BITS % 32).to(DTYPE),)
    else:
        own = own + (factors[INDEX // 2],)
    return own


@gluon.jit
def _spread(own, w):
    """A vector for each group of a panel as a factor for each of its values ``w``."""
    COUNT: gl.constexpr = len(own)
    ROWS: gl.constexpr = w.shape[0]
    if COUNT == 1:
        return gl.broadcast(own[0][:, None], w)[0]
    else:
        if COUNT == 2:
            groups = gl.join(own[0], own[1])
        else:
            groups = gl.join(gl.join(own[0], own[2]), gl.join(own[1], own[3])).reshape([ROWS, COUNT])
        split = w.reshape([ROWS, COUNT, w.shape[1] // COUNT])
        groups = gl.convert_layout(groups, gl.SliceLayout(2, split.type.layout))
        factors = gl.broadcast(groups[:, :, None], split)[0].reshape(w.shape)
        return gl.convert_layout(factors, w.type.layout)


@gluon.jit
def _values(
    packed, INDEX: gl.constexpr, factors, zeros, SCALE: gl.constexpr, DTYPE: gl.constexpr, mma: gl.constexpr,
    FORM: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """A panel of a block, 64 values of K, as ``wgmma`` takes it, over ``left_over``; ``packed``: its bytes, two by two.

    It is scaled if ``SCALED``, by ``how_scaled``, says so.
    """
    FORMAT: gl.constexpr = FORM.name
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    w = unpack_pairs(packed, FORMAT, DTYPE)[INDEX // 2] if FORM.bits == 4 else widen_pairs(packed, FORMAT, DTYPE)
    w = gl.convert_layout(w, LAYOUT, assert_trivial=True)
    if FORM.has_zeros:
        own = ()
        of_groups = _of_groups(zeros, INDEX, gl.int8, FORM)
        for i in gl.static_range(len(of_groups)):
            own = own + ((of_groups[i].to(gl.float32) * (1 / left_over(FORM, SCALED, DTYPE))).to(DTYPE),)
        w = w - _spread(own, w)
    if SCALED == "values":
        # Exponents and e4m3 are exact in bfloat16. Else a product is rounded once, from float32.
        EXACT: gl.constexpr = SCALE == DTYPE or (SCALE.primitive_bitwidth == 8 and gl.bfloat16 == DTYPE)
        own = ()
        of_groups = _of_groups(factors, INDEX, SCALE, FORM)
        for i in gl.static_range(len(of_groups)):
            own = own + ((scale_value(of_groups[i]).to(DTYPE) if EXACT else scale_value(of_groups[i])),)
        w = w * _spread(own, w) if EXACT else (w.to(gl.float32) * _spread(own, w)).to(DTYPE)
    return w


@gluon.jit
def _scaled_codes(packed, INDEX: gl.constexpr, factors, mma: gl.constexpr):
    """As ``_values``, of symmetric int4, times its scales in bfloat16 and ``SCALED_BY``."""
    own = gl.convert_layout(
        scale_value(factors[INDEX // 2]), gl.SliceLayout(1, packed.type.layout), assert_trivial=True
    )
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    return gl.convert_layout(unpack_times_scale(packed, own, INDEX // 2), LAYOUT, assert_trivial=True)


@gluon.jit
def _start(
    values, packed, factors, acc, rings, x_step,
    FIRST: gl.constexpr, COUNT: gl.constexpr, SCALED: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Starts the products of ``COUNT`` panels of a block, from ``FIRST`` on, with the next ones of x.

    ``values``: the panels. Codes that are scaled are unpacked here: each panel while products of those before it run.
    Sums: with "sums" ``SCALED`` those of every two panels, which are half a block, else ``acc`` plus all.
    """
    PANELS: gl.constexpr = TILE.panels
    SUMS: gl.constexpr = SCALED == "sums"
    mma: gl.constexpr = acc.type.layout
    sums = acc
    of_halves = ()
    for i in gl.static_range(COUNT):
        step = x_step + i // PANELS
        if i % PANELS == 0:
            mbarrier.wait(rings.x_full.index(step % TILE.x_depth), step // TILE.x_depth & 1)
        x = rings.x.index(step % TILE.x_depth * PANELS + i % PANELS).permute((1, 0))
        if SUMS and i % 2 == 0:
            sums = gl.zeros(acc.shape, gl.float32, mma)
        w = _scaled_codes(packed[i % 2], FIRST + i, factors, mma) if SCALED == "codes" else values[i]
        sums = warpgroup_mma(w, x, sums, use_acc=not SUMS or i % 2 > 0, is_async=True)
        if i % 2 == 1:
            of_halves = of_halves + (sums,)
    if SUMS:
        return of_halves
    else:
        return (sums,)


@gluon.jit
def _finish(
    started, acc, scales, rings, x_step, COUNT: gl.constexpr, SUMS: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """``acc`` with the products of ``COUNT`` panels that ``_start`` has started; releases those of x.

    ``scales``: of each half of a block that the panels are from, if there are ``SUMS`` to be scaled.
    """
    PANELS: gl.constexpr = TILE.panels
    sums = started[0]
    for i in gl.static_range(COUNT):
        if SUMS:
            if i % 2 == 1:
                sums = warpgroup_mma_wait(COUNT - 1 - i, deps=(started[i // 2],))
        elif i % PANELS == PANELS - 1:
            sums = warpgroup_mma_wait(COUNT - 1 - i, deps=(sums,))
        if i % PANELS == PANELS - 1:
            mbarrier.arrive(rings.x_empty.index((x_step + i // PANELS) % TILE.x_depth), count=1)
        if SUMS and i % 2 == 1:
            factor = scale_value(scales[i // 2])[:, None]
            acc = gl.fma(sums, gl.broadcast(factor, sums)[0], acc)
    return acc if SUMS else sums


@gluon.jit
def _multiply(
    w_step, x_step, acc, scales, zero_points, rings, first, last, groups,
    FORM: gl.constexpr, TILE: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """``(w_step, x_step, acc)``: the next steps of the rings, and ``acc`` plus the products of blocks of K.

    ``scales``, ``zero_points``: pointers to those of each row's first group; or None.
    """
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    # Panels that are unpacked at a time.
    AT_ONCE: gl.constexpr = 2 * HALVES if TILE.unpacks_blocks else 2
    # Two blocks: one of few rows takes less time than a load from memory.
    AHEAD: gl.constexpr = 2 if FORM.group >= BLOCK else 1
    mma: gl.constexpr = acc.type.layout
    pl: gl.constexpr = gl.DotOperandLayout(0, mma, 1)
    DTYPE: gl.constexpr = rings.x.dtype
    SCALE: gl.constexpr = scales.dtype.element_ty
    SCALED: gl.constexpr = how_scaled(FORM, TILE, SCALE, DTYPE)
    next_factors = ()
    for i in gl.static_range(AHEAD):
        next_factors = next_factors + (_load_factors(scales, first + i, groups, FORM),)
    next_zeros = _load_factors(zero_points, first, groups, FORM)
    for block in range(first, last):
        factors = next_factors[0]
        next_factors = next_factors[1:] + (_load_factors(scales, block + AHEAD, groups, FORM),)
        zeros = next_zeros
        next_zeros = _load_factors(zero_points, block + 1, groups, FORM)
        w_slot = w_step % TILE.w_depth
        mbarrier.wait(rings.w_full.index(w_slot), w_step // TILE.w_depth & 1)
        slot = rings.w.index(w_slot * 2 + WHO)
        packed = (slot.slice(0, 32, 1).load(pl), slot.slice(32, 32, 1).load(pl))
        for panel in gl.static_range(0, 2 * HALVES, AT_ONCE):
            values = ()
            if SCALED != "codes":
                for i in gl.static_range(AT_ONCE):
                    w = _values(packed[i % 2], panel + i, factors, zeros, SCALE, DTYPE, mma, FORM, SCALED)
                    values = values + (w,)
            started = _start(values, packed, factors, acc, rings, x_step, panel, AT_ONCE, SCALED, TILE)
            # Products wait for the loads of the slot; TMA, which writes it next, doesn't.
            if panel == 0:
                mbarrier.arrive(rings.w_empty.index(w_slot), count=1)
            acc = _finish(started, acc, factors[panel // 2 :], rings, x_step, AT_ONCE, SCALED == "sums", TILE)
            x_step += AT_ONCE // TILE.panels
        w_step += 1
    return w_step, x_step, acc


@gluon.jit
def _consume(
    Y, partial, counts, scale, zero_point, global_scale, bias, residual, rings, staging, items,
    stride_sn, stride_residual, FORM: gl.constexpr, TILE: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    sched = items.sched
    epilogue = SwappedEpilogue(global_scale, bias, residual, stride_residual, sched.M, sched.N)
    SCALED: gl.constexpr = how_scaled(FORM, TILE, scale.dtype.element_ty, rings.x.dtype)
    BLOCK_M: gl.constexpr = sched.ctx.block_m
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    # Zero points are those of values, and so are scales if no sums are scaled.
    zl: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, mma, 2))
    rl: gl.constexpr = gl.SliceLayout(1, mma) if SCALED == "sums" else zl
    groups = gl.cdiv(sched.K, FORM.group) if FORM.group > 0 else 1
    w_step = 0
    x_step = 0
    for turn in range(items.turns()):
        row, col, first, last, shared = items.place(turn)
        col += WHO * 64
        n = gl.minimum(col + gl.arange(0, 64, rl), sched.N - 1)
        scales = scale + n.to(gl.int64) * stride_sn
        zero_points = None
        if FORM.has_zeros:
            n = gl.minimum(col + gl.arange(0, 64, zl), sched.N - 1)
            zero_points = zero_point + n.to(gl.int64) * stride_sn
        acc = gl.zeros([64, BLOCK_M], gl.float32, mma)
        w_step, x_step, acc = _multiply(
            w_step, x_step, acc, scales, zero_points, rings, first, last, groups, FORM, TILE, WHO
        )
        n = col + gl.arange(0, 64, gl.SliceLayout(1, mma))
        if FORM.group == 0:
            factor = gl.load(scale + gl.minimum(n, sched.N - 1).to(gl.int64) * stride_sn)
            acc = acc * scale_value(factor)[:, None]
        acc = acc * left_over(FORM, SCALED, rings.x.dtype)
        acc = epilogue.scale(acc)
        finishes = turn >= 0
        if items.shares:
            if shared >= 0:
                acc, finishes = add_parts(acc, in_blocks(acc), partial, counts, items, shared, WHO, 2)
        if finishes:
            _store_across(Y, staging, row, col, epilogue.add_bias(acc, n), epilogue, WHO, 0)
    tma.store_wait(0)


@gluon.jit
def _store_across(Y, staging, row, col, values, epilogue, WHO: gl.constexpr, NUMBER: gl.constexpr):
    """Has the copy engine store what is the other way round, by as many columns at a time as a slot of ``staging`` has.

    A residual is added to so many: registers hold no more of it. ``NUMBER``: how many were stored before.
    """
    SLOTS: gl.constexpr = staging.shape[0] // 2
    if values.shape[1] == staging.shape[1]:
        n = col + gl.arange(0, 64, gl.SliceLayout(1, values.type.layout))
        values = epilogue.add_residual(values, n, row)
        slot = staging.index(WHO * SLOTS + NUMBER % SLOTS)
        tma.store_wait(SLOTS - 1)
        slot.store(values.to(Y.dtype).permute((1, 0)))
        fence_async_shared()
        store_block(Y, [row, col], slot)
    else:
        HALF: gl.constexpr = values.shape[1] // 2
        halves = values.reshape([64, 2, HALF]).permute(0, 2, 1).split()
        for i in gl.static_range(2):
            before = NUMBER + i * (HALF // staging.shape[1])
            _store_across(Y, staging, row + i * HALF, col, halves[i], epilogue, WHO, before)


@gluon.jit(do_not_specialize=["M", "alone", "sharers"])
def _tiles_kernel(
    X, W, scale, zero_point, global_scale, bias, residual, Y, partial, counts,
    M, N, K, alone, sharers, stride_sn, stride_residual,
    FORM: gl.constexpr, TILE: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """``X``, ``W``, ``Y``: tensor maps of ``[M, K]``, the stored weight, and ``[M, N]``.

    ``alone``, ``sharers``: as in ``Items``. ``partial``: float32 for each part of a shared tile. ``counts``:
    ``COUNTS_BYTES`` of zeros, which they are again in the end.
    """
    ctx = GemmContext(X.block_shape[0], ROWS, 64, 1, 1, TILE.group_size_m)
    sched = ScheduleContext(M, N, K, ctx)
    if SHARES:
        counts = counts.cast(gl.pointer_type(gl.int32), bitcast=True)
    items = Items(sched, alone, gl.cdiv(K, BLOCK * (2 if FORM.bits == 4 else 1)), sharers, SHARES)
    x_slots = gl.allocate_shared_memory(X.dtype, [TILE.x_depth * TILE.panels, X.block_shape[0], PANEL], X.layout)
    w_slots = gl.allocate_shared_memory(W.dtype, [TILE.w_depth * 2, 64, BLOCK // 2], W.layout)
    x_full, x_empty = barriers(TILE.x_depth), barriers(TILE.x_depth)
    w_full, w_empty = barriers(TILE.w_depth), barriers(TILE.w_depth)
    initialize(x_full, TILE.x_depth)
    initialize(w_full, TILE.w_depth)
    initialize(x_empty, TILE.x_depth, 2)
    initialize(w_empty, TILE.w_depth, 2)
    rings = Rings(x_slots, w_slots, x_full, x_empty, w_full, w_empty)
    staging = gl.allocate_shared_memory(Y.dtype, [2 * TILE.staging, Y.block_shape[0], 64], Y.layout)
    gdc_launch_dependents()
    # Constants stay constants only in tuples that are written here.
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    Y, partial, counts, scale, zero_point, global_scale, bias, residual, rings, staging,
                    items, stride_sn, stride_residual, FORM, TILE, 0,
                ),
            ),
            (
                _consume,
                (
                    Y, partial, counts, scale, zero_point, global_scale, bias, residual, rings, staging,
                    items, stride_sn, stride_residual, FORM, TILE, 1,
                ),
            ),
            (_produce, (X, W, rings, items, FORM, TILE)),
        ],
        [4, 1],
        [232, PRODUCER_REGISTERS],
    )  # fmt: skip
