"""As ``few_rows_hopper_kernels``, with blocks that TMA brings: up to 16 rows, of weights that it can read."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.ring import PRODUCER_REGISTERS, barriers, initialize, load_block
from qgemm.kernels.stages.unpack_words import times_of_words
from qgemm.kernels.weight_only.few_rows_hopper_kernels import (
    _groups,
    _halves,
    _in_words,
    _minus_bias,
    _operand,
    _unpack,
    gathered_layout,
    sums_layout,
)
from qgemm.kernels.weight_only.hopper_epilogue import SwappedEpilogue
from qgemm.kernels.weight_only.kernels import BLOCK, scale_value

PANEL = gl.constexpr(64)
PARTS = gl.constexpr(2)


@aggregate
class RowsRing:
    w: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def _produce(X, W, ring, tiles, steps, ROWS: gl.constexpr, PANELS: gl.constexpr):
    STAGES: gl.constexpr = ring.full.shape[0]
    SPLITS: gl.constexpr = W.block_shape[0]
    SIZE: gl.constexpr = PARTS * W.block_type.nbytes + PANELS * X.block_type.nbytes
    HALF: gl.constexpr = W.block_shape[2]
    gdc_launch_dependents()
    start, stride = gl.program_id(0), gl.num_programs(0)
    total = gl.cdiv(tiles - start, stride) * steps
    ahead = gl.minimum(total, STAGES)
    for step in range(ahead):
        mbarrier.expect(ring.full.index(step), SIZE)
        tile = start + step // steps * stride
        for i in gl.static_range(PARTS):
            to = ring.w.index(step * PARTS + i)
            load_block(W, [step % steps * SPLITS, tile * ROWS, i * HALF], ring.full.index(step), to)
    gdc_wait()
    step = 0
    for tile in range(start, tiles, stride):
        for k in range(steps):
            slot = step % STAGES
            full = ring.full.index(slot)
            if step >= ahead:
                mbarrier.wait(ring.empty.index(slot), (step // STAGES + 1) & 1)
                mbarrier.expect(full, SIZE)
                for i in gl.static_range(PARTS):
                    load_block(W, [k * SPLITS, tile * ROWS, i * HALF], full, ring.w.index(slot * PARTS + i))
            for i in gl.static_range(PANELS):
                load_block(X, [k * SPLITS, 0, i * PANEL], full, ring.x.index(slot * PANELS + i))
            step += 1


@gluon.jit
def _add(
    acc, ring, slot, scales, zeros, minus_bias, SCALE: gl.constexpr, BIASED: gl.constexpr, FORM: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = acc[0].type.layout
    wl: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    xl: gl.constexpr = gl.DotOperandLayout(1, mma, 16)
    HALVES: gl.constexpr = len(acc)
    SCALES_SUMS: gl.constexpr = FORM.group > 0
    nothing = gl.zeros(acc[0].shape, gl.float32, mma)
    sums = ()
    for half in gl.static_range(HALVES):
        sums = sums + ((nothing if SCALES_SUMS else acc[half]),)
    for part in gl.static_range(PARTS):
        words = ring.w.index(slot * PARTS + part).load(wl)
        values = _unpack(words, scales, zeros, SCALE, ring.x.dtype, BIASED, FORM)
        so_far = sums
        sums = ()
        for half in gl.static_range(HALVES):
            panel = ring.x.index((slot * HALVES + half) * PARTS + part)
            b = _in_words(panel.permute((0, 2, 1)).load(xl), mma)
            own = mma_v2(_operand(values[half], mma), b, so_far[half])
            if BIASED and half == 0:
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


@gluon.jit
def _consume(
    scale, zero_point, global_scale, bias, residual, out, ring, tiles, steps, M, N, K, stride_sn, stride_residual,
    stride_out, FORM: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = ring.full.shape[0]
    SPLITS: gl.constexpr = TILE.splits
    ROWS: gl.constexpr = TILE.rows
    COLS: gl.constexpr = TILE.columns
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    FORMAT: gl.constexpr = FORM.name
    DTYPE: gl.constexpr = ring.x.dtype
    SCALE: gl.constexpr = scale.dtype.element_ty
    PLAIN: gl.constexpr = FORM.name == "int4" and not FORM.has_zeros
    BIASED: gl.constexpr = PLAIN and gl.bfloat16 == DTYPE and COLS == 8
    mma: gl.constexpr = sums_layout(TILE)
    gathered: gl.constexpr = gl.SliceLayout(0, gathered_layout(TILE))
    start, stride = gl.program_id(0), gl.num_programs(0)
    groups = _groups(scale, zero_point, start * ROWS, N, K, stride_sn, FORM, TILE)
    loaded = groups.load(0)
    minus_bias = _minus_bias(M, PANEL, DTYPE, TILE)
    out_rows = gl.arange(0, ROWS, gl.SliceLayout(1, gathered))
    m = gl.arange(0, COLS, gl.SliceLayout(0, gathered))
    epilogue = SwappedEpilogue(global_scale, bias, residual, stride_residual, M, N)
    gdc_wait()
    step = 0
    slot = 0
    for tile in range(start, tiles, stride):
        acc = ()
        for _half in gl.static_range(HALVES):
            acc = acc + (gl.zeros([SPLITS, ROWS, COLS], gl.float32, mma),)
        for k in range(steps):
            mbarrier.arrive(ring.empty.index(slot), count=1, pred=k > 0)
            slot = step % STAGES
            scales, zeros = loaded
            if FORM.paired:
                scales = _halves(scales[0], SCALE)
            loaded = groups.load(k + 1)
            mbarrier.wait(ring.full.index(slot), step // STAGES & 1)
            acc = _add(acc, ring, slot, scales, zeros, minus_bias, SCALE, BIASED, FORM, TILE)
            step += 1
        mbarrier.arrive(ring.empty.index(slot), count=1)
        groups = _groups(scale, zero_point, (tile + stride) * ROWS, N, K, stride_sn, FORM, TILE)
        loaded = groups.load(0)
        of_splits = acc[0] * times_of_words(FORMAT, DTYPE, 0)
        if HALVES == 2:
            of_splits = of_splits + acc[1] * times_of_words(FORMAT, DTYPE, 1)
        total = gl.sum(gl.convert_layout(of_splits, gathered_layout(TILE)), 0)
        n = tile * ROWS + out_rows
        if FORM.group == 0:
            factor = scale_value(gl.load(scale + n.to(gl.int64) * stride_sn, mask=n < N, other=0))
            total = total * factor[:, None]
        total = epilogue.add(epilogue.scale(total), n, 0)
        inside = (m < M)[None, :] & (n < N)[:, None]
        pointers = out + m.to(gl.int64)[None, :] * stride_out + n[:, None]
        gl.store(pointers, total.to(out.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["M"])
def _few_rows_ring_kernel(
    X, W, scale, zero_point, global_scale, bias, residual, out,
    M, N, K, stride_sn, stride_residual, stride_out,
    FORM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    PANELS: gl.constexpr = HALVES * PARTS
    ROWS: gl.constexpr = TILE.rows
    w = gl.allocate_shared_memory(
        W.dtype, [STAGES * PARTS, W.block_shape[0], W.block_shape[1], W.block_shape[2]], W.layout
    )
    x = gl.allocate_shared_memory(
        X.dtype, [STAGES * PANELS, X.block_shape[0], X.block_shape[1], X.block_shape[2]], X.layout
    )
    ring = RowsRing(w, x, barriers(STAGES), barriers(STAGES))
    initialize(ring.full, STAGES)
    initialize(ring.empty, STAGES)
    tiles = gl.cdiv(N, TILE.rows)
    steps = gl.cdiv(K, BLOCK * HALVES * TILE.splits)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    scale, zero_point, global_scale, bias, residual, out, ring, tiles, steps, M, N, K, stride_sn,
                    stride_residual, stride_out, FORM, TILE,
                ),
            ),
            (_produce, (X, W, ring, tiles, steps, ROWS, PANELS)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
