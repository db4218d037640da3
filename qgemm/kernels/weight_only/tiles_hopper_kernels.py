"""Products of many rows with stored 4- and 8-bit weights on Hopper (sm_90), in Gluon.

A tile is 128 rows of the weight by up to 256 rows of x. One producer warp keeps TMA filling two rings: packed blocks of
the weight, and panels of x. Two consumer groups of four warps each unpack their rows of the weight into registers, from
which ``wgmma`` reads its operand A, while the other group's products run (``tiles_hopper_products.py``).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages import GemmContext, ScheduleContext
from qgemm.kernels.stages.ring import PRODUCER_REGISTERS, barriers, initialize, store_block
from qgemm.kernels.stages.staged_residual import add_residual
from qgemm.kernels.weight_only import config
from qgemm.kernels.weight_only.hopper_epilogue import SwappedEpilogue
from qgemm.kernels.weight_only.items import Items
from qgemm.kernels.weight_only.kernels import BLOCK, scale_value
from qgemm.kernels.weight_only.partial_sums import add_parts, in_blocks
from qgemm.kernels.weight_only.tiles_hopper_factors import PANEL, factors_of
from qgemm.kernels.weight_only.tiles_hopper_products import (
    Rings,
    accumulator_layout,
    factors_layout,
    how_scaled,
    left_over,
    multiply,
    multiply_in_turn,
)

ROWS = gl.constexpr(config.TILE_ROWS)
# Registers per thread: of consumers, more with over 128 rows of x, whose sums alone take 80 to 128. The producer then
# has fewer.
MULTIPLYING_REGISTERS, MORE_REGISTERS = gl.constexpr(232), gl.constexpr(240)
FEWER_PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _produce(X, W, rings, items, FORM: gl.constexpr, TILE: gl.constexpr):
    PANELS: gl.constexpr = TILE.panels
    SLOTS: gl.constexpr = (4 if FORM.bits == 4 else 2) // PANELS
    _, col, first, last, _ = items.place(gl.program_id(0) * 0)
    # Weights don't change, so the first blocks are loaded while the preceding kernel in the stream ends.
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
                mbarrier.expect(full, PANELS * TILE.columns // X.block_shape[0] * X.block_type.nbytes)
                for panel in gl.static_range(PANELS):
                    k = ((block * SLOTS + i) * PANELS + panel) * PANEL
                    rings.load_x(X, row, k, full, slot * PANELS + panel, TILE)
                x_step += 1


@gluon.jit
def _consume(
    Y, partial, counts, scale, zero_point, global_scale, bias, residual, rings, staging, items,
    stride_sn, stride_residual, FORM: gl.constexpr, TILE: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    sched = items.sched
    epilogue = SwappedEpilogue(global_scale, bias, residual, stride_residual, sched.M, sched.N)
    SCALE: gl.constexpr = scale.dtype.element_ty
    ZERO: gl.constexpr = zero_point.dtype.element_ty if FORM.has_zeros else None
    SCALED: gl.constexpr = how_scaled(FORM, TILE, SCALE, rings.x.dtype)
    WIDTHS: gl.constexpr = TILE.widths
    STORED_FIRST: gl.constexpr = WIDTHS[0] // staging.shape[1]
    zl: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, accumulator_layout(WIDTHS[0]), 2))
    rl: gl.constexpr = factors_layout(FORM, TILE, SCALE, rings.x.dtype)
    groups = gl.cdiv(sched.K, FORM.group) if FORM.group > 0 else 1
    w_step = 0
    x_step = 0
    for turn in range(items.turns()):
        row, col, first, last, shared = items.place(turn)
        col += WHO * 64
        scales = factors_of(scale, col, sched.N, stride_sn, rl, FORM, TILE)
        zero_points = None
        if FORM.has_zeros:
            zero_points = factors_of(zero_point, col, sched.N, stride_sn, zl, FORM, TILE)
        accs = ()
        for i in gl.static_range(len(WIDTHS)):
            accs = accs + (_zeros(TILE, i),)
        if TILE.in_turn > 0 and SCALED != "sums":
            w_step, x_step, accs = multiply_in_turn(
                w_step, x_step, accs, scales, zero_points, rings, first, last, groups, SCALE, ZERO, FORM, TILE, WHO
            )
        else:
            w_step, x_step, accs = multiply(
                w_step, x_step, accs, scales, zero_points, rings, first, last, groups, SCALE, ZERO, FORM, TILE, WHO
            )
        sums, at = (), ()
        for i in gl.static_range(len(WIDTHS)):
            acc = accs[i]
            if FORM.group == 0:
                n = gl.minimum(_rows(col, acc), sched.N - 1)
                acc = acc * scale_value(gl.load(scale + n.to(gl.int64) * stride_sn))[:, None]
            sums = sums + (epilogue.scale(acc * left_over(FORM, SCALED, rings.x.dtype)),)
            at = at + (in_blocks(acc) + i * WIDTHS[0] * 64,)
        finishes = turn >= 0
        if items.shares:
            if shared >= 0:
                sums, finishes = add_parts(sums, at, partial, counts, items, shared, WHO, 2)
        if finishes:
            for i in gl.static_range(len(WIDTHS)):
                out = epilogue.add_bias(sums[i], _rows(col, sums[i]))
                _store_across(Y, staging, row + i * WIDTHS[0], col, out, epilogue, WHO, i * STORED_FIRST)
    tma.store_wait(0)


@gluon.jit
def _zeros(TILE: gl.constexpr, PIECE: gl.constexpr):
    """The accumulator of a piece of a tile's columns."""
    COLUMNS: gl.constexpr = TILE.widths[PIECE]
    return gl.zeros([64, COLUMNS], gl.float32, accumulator_layout(COLUMNS))


@gluon.jit
def _rows(col, sums):
    """The rows of the weight, from ``col`` on, that ``sums`` belong to."""
    return col + gl.arange(0, 64, gl.SliceLayout(1, sums.type.layout))


@gluon.jit
def _store_across(Y, staging, row, col, values, epilogue, WHO: gl.constexpr, NUMBER: gl.constexpr):
    """Stores transposed ``values`` by TMA, as many columns at a time as a slot of ``staging`` has.

    ``NUMBER``: how many slots' worth of this tile were stored before.
    """
    SLOTS: gl.constexpr = staging.shape[0] // 2
    if values.shape[1] == staging.shape[1]:
        slot = staging.index(WHO * SLOTS + NUMBER % SLOTS)
        # The last store of the previous tile may still be reading any slot.
        UNREAD: gl.constexpr = SLOTS - 1 if NUMBER > 0 else 0
        tma.store_wait(UNREAD)
        slot.store(values.to(Y.dtype).permute((1, 0)))
        if epilogue.residual is not None:
            add_residual(slot, epilogue.residual, epilogue.stride, row, col, epilogue.M, epilogue.N)
        fence_async_shared()
        store_block(Y, [row, col], slot)
    else:
        HALF: gl.constexpr = values.shape[1] // 2
        halves = values.reshape([64, 2, HALF]).permute(0, 2, 1).split()
        for i in gl.static_range(2):
            _store_across(
                Y, staging, row + i * HALF, col, halves[i], epilogue, WHO, NUMBER + i * (HALF // staging.shape[1])
            )


@gluon.jit(do_not_specialize=["M", "alone", "sharers"])
def _tiles_kernel(
    X, W, scale, zero_point, global_scale, bias, residual, Y, partial, counts,
    M, N, K, alone, sharers, stride_sn, stride_residual,
    FORM: gl.constexpr, TILE: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """``X``, ``W``, ``Y``: tensor maps of ``[M, K]``, the stored weight, and ``[M, N]``.

    ``alone``, ``sharers``: as in ``Items``. ``partial``: float32, space for each part of a shared tile. ``counts``:
    ``COUNTS_BYTES`` of zeros; they are zeros again when the kernel ends.
    """
    ctx = GemmContext(TILE.columns, ROWS, 64, 1, 1, TILE.group_size_m)
    sched = ScheduleContext(M, N, K, ctx)
    if SHARES:
        counts = counts.cast(gl.pointer_type(gl.int32), bitcast=True)
    items = Items(sched, alone, gl.cdiv(K, BLOCK * (2 if FORM.bits == 4 else 1)), sharers, SHARES)
    WIDTHS: gl.constexpr = TILE.widths
    x_slots = gl.allocate_shared_memory(X.dtype, [TILE.x_depth * TILE.panels, WIDTHS[0], PANEL], X.layout)
    x_rest = x_slots
    if len(WIDTHS) > 1:
        x_rest = gl.allocate_shared_memory(X.dtype, [TILE.x_depth * TILE.panels, WIDTHS[1], PANEL], X.layout)
    w_slots = gl.allocate_shared_memory(W.dtype, [TILE.w_depth * 2, 64, BLOCK // 2], W.layout)
    x_full, x_empty = barriers(TILE.x_depth), barriers(TILE.x_depth)
    w_full, w_empty = barriers(TILE.w_depth), barriers(TILE.w_depth)
    initialize(x_full, TILE.x_depth)
    initialize(w_full, TILE.w_depth)
    initialize(x_empty, TILE.x_depth, 2)
    initialize(w_empty, TILE.w_depth, 2)
    rings = Rings(x_slots, x_rest, w_slots, x_full, x_empty, w_full, w_empty)
    staging = gl.allocate_shared_memory(Y.dtype, [2 * TILE.staging, Y.block_shape[0], 64], Y.layout)
    gdc_launch_dependents()
    WIDE: gl.constexpr = TILE.columns > 128
    MULTIPLYING: gl.constexpr = MORE_REGISTERS if WIDE else MULTIPLYING_REGISTERS
    LOADING: gl.constexpr = FEWER_PRODUCER_REGISTERS if WIDE else PRODUCER_REGISTERS
    # Constants stay constants only in a tuple that is written out here.
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
        [MULTIPLYING, LOADING],
    )  # fmt: skip
