"""Products of many rows with weights of 4 and 8 bits on Hopper (sm_90), as they are stored, in Gluon."""

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

from qgemm.kernels.stages import GemmContext, ScheduleContext
from qgemm.kernels.stages.epilogue import added
from qgemm.kernels.stages.ring import barriers, initialize, load_block, store_block
from qgemm.kernels.stages.unpack import unpack_pairs, widen_pairs
from qgemm.kernels.weight_only.kernels import BLOCK, scale_value


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
def _load_factors(pointers, block, last, K, FORM: gl.constexpr):
    """The scales, or zero points, of a block's halves, zeros for one beyond K; of a row's the same each time."""
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    factors = ()
    if pointers is not None:
        for half in gl.static_range(HALVES):
            k = (block * HALVES + half) * BLOCK
            group = k // FORM.group if FORM.group > 0 else 0
            factors = factors + (gl.load(pointers + group, mask=(block < last) & (k < K), other=0),)
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
        next_factors = _load_factors(pointers, first, last, sched.K, FORM)
        more_factors = _load_factors(pointers, first + 1, last, sched.K, FORM)
        next_zeros = _load_factors(zero_pointers, first, last, sched.K, FORM)
        for block in range(first, last):
            w_slot = w_step % TILE.w_depth
            factors = next_factors
            next_factors = more_factors
            more_factors = _load_factors(pointers, block + 2, last, sched.K, FORM)
            zeros = next_zeros
            next_zeros = _load_factors(zero_pointers, block + 1, last, sched.K, FORM)
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
