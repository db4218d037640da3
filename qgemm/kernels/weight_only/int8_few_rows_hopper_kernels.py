"""int4 weights by a few int8 rows for Hopper (sm_90), in Gluon.

``C[m, n] = x_scale[m] * sum over g of sums[m, n, g] * w_scale[n, g]``, plus ``bias[n]``, rounded once. ``sums`` are
exact int32 over the values of group ``g``, or over the whole row, which then has one scale. ``K`` is a multiple of 128.
A residual is added to the rounded result.

The operands are swapped: rows of the weight are the rows of a tensor core's instruction, rows of ``x`` its columns. So
packed weights go from shared memory to registers and become int8 there. A program has 32 or 64 rows of the weight, so
that every SM gets the same number of them. It uses the smaller tensor-core instructions; each warp has its own part of
K, and their sums are added at the end of a tile. docs/performance/w4a8.md says what this reaches and why.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.quantize.hopper_kernels import QUANTIZING_REGISTERS, SharedRows
from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.epilogue import added
from qgemm.kernels.stages.ring import PANEL, PRODUCER_REGISTERS, barriers, initialize, load_block, thread_barrier
from qgemm.kernels.stages.rows import RowQuantization, StridedRow, quantize_blocks
from qgemm.kernels.weight_only.hopper_epilogue import SwappedEpilogue
from qgemm.kernels.weight_only.int8_hopper_weights import BLOCK, Weights

MIN_COLS = gl.constexpr(8)  # the minimum that tensor cores multiply


@aggregate
class OwnRow:
    """A single row of x that each program quantizes for itself, of ``steps`` steps with a block for each warp."""

    x: gl.tensor
    K: gl.tensor
    stride: gl.tensor
    steps: gl.constexpr

    @gluon.jit
    def quantize(self, q):
        """Quantizes the row to ``q`` in shared memory, with zeros behind it, and returns its scale.

        ``q``: for every step, the parts of each warp's block of K.
        """
        WARPS: gl.constexpr = q.shape[1]
        STEP: gl.constexpr = q.shape[2]
        PARTS: gl.constexpr = BLOCK // STEP
        LENGTH: gl.constexpr = WARPS * STEP
        layout: gl.constexpr = gl.BlockedLayout([STEP // 32], [32], [WARPS], [0])
        source = StridedRow(self.x, self.K, self.stride)
        index = gl.arange(0, LENGTH, layout)
        index = index // STEP * BLOCK + index % STEP
        parts = ()
        for i in gl.static_range(self.steps * PARTS):
            parts = parts + (source.load(i // PARTS * (WARPS * BLOCK) + i % PARTS * STEP + index),)
        scale, values = quantize_blocks(parts, RowQuantization(None), self.steps * PARTS)
        for i in gl.static_range(self.steps * PARTS):
            q.index(i).store(values[i].reshape([WARPS, STEP]))
        thread_barrier()
        return scale


@gluon.jit
def _load_x(A, barrier, lows, highs, slot, k):
    """Starts loading both halves of the blocks of K from ``k`` on."""
    STEP: gl.constexpr = lows.shape[3]
    SUBS: gl.constexpr = PANEL // STEP
    for i in gl.static_range(SUBS):
        load_block(A, [k, 0, i * STEP], barrier, lows.index(slot * SUBS + i))
        load_block(A, [k, 0, PANEL + i * STEP], barrier, highs.index(slot * SUBS + i))


@gluon.jit
def _produce_few(A, B, weights, rows, ring, steps, ready, NEXT_EARLY: gl.constexpr):
    """``A``: None where no x is to be loaded."""
    w, lows, highs, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    WARPS: gl.constexpr = w.shape[1]
    ROWS: gl.constexpr = w.shape[2]
    STEP: gl.constexpr = w.shape[3]
    SUBS: gl.constexpr = PANEL // STEP
    SIZE: gl.constexpr = SUBS * (B.block_type.nbytes + (2 * A.block_type.nbytes if A is not None else 0))
    if NEXT_EARLY:
        gdc_launch_dependents()
    initialize(full, STAGES)
    initialize(empty, STAGES)
    if rows is None:
        mbarrier.arrive(ready, count=1)
    own_rows = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0]))
    start, stride = gl.program_id(0), gl.num_programs(0)
    total = gl.cdiv(gl.cdiv(weights.N, ROWS) - start, stride) * steps
    ahead = gl.minimum(total, STAGES)
    for step in range(ahead):
        mbarrier.expect(full.index(step), SIZE)
        tile = start + step // steps * stride
        for i in gl.static_range(SUBS):
            load_block(B, [step % steps * WARPS, tile * ROWS, i * STEP], full.index(step), w.index(step * SUBS + i))
        weights.fetch_scales(tile * ROWS + own_rows, step % steps, WARPS * 2 * SUBS, step == 0)
    # Nothing else is read before the preceding kernel in the stream has ended; see Launch.
    gdc_wait()
    if rows is not None:
        rows.wait_for_all(ready)
    step = 0
    for tile in range(start, gl.cdiv(weights.N, ROWS), stride):
        for k in range(steps):
            slot = step % STAGES
            if step >= ahead:
                mbarrier.wait(empty.index(slot), (step // STAGES + 1) & 1)
                mbarrier.expect(full.index(slot), SIZE)
                for i in gl.static_range(SUBS):
                    load_block(B, [k * WARPS, tile * ROWS, i * STEP], full.index(slot), w.index(slot * SUBS + i))
                weights.fetch_scales(tile * ROWS + own_rows, k, WARPS * 2 * SUBS, k == 0)
            if A is not None:
                _load_x(A, full.index(slot), lows, highs, slot, k * WARPS)
            step += 1
    if not NEXT_EARLY:
        gdc_launch_dependents()
    if rows is not None:
        rows.forget(ready)


@gluon.jit
def _consume_few(C, residual, x_scale, weights, rows, row, ring, M, stride_cm, steps, ready):
    """``rows``: the ``SharedRows`` of an x that isn't quantized yet, ``row``: its ``OwnRow``; None where it is."""
    w, lows, highs, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    WARPS: gl.constexpr = w.shape[1]
    ROWS: gl.constexpr = w.shape[2]
    STEP: gl.constexpr = w.shape[3]
    SUBS: gl.constexpr = PANEL // STEP
    COLS: gl.constexpr = MIN_COLS if row is not None else lows.shape[2]
    GROUPS: gl.constexpr = weights.group > 0
    SUMS: gl.constexpr = gl.float32 if GROUPS else gl.int32
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, layout, 4)
    # A thread has the sums of all warps for its outputs; neighbouring threads have neighbouring rows of the weight.
    LANES: gl.constexpr = min(ROWS, 32)
    gathered: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, LANES, 32 // LANES], [1, 1, WARPS], [1, 2, 0])
    out_layout: gl.constexpr = gl.SliceLayout(0, gathered)

    own_rows = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :]
    block = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None]
    a_rows = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, a_layout)))[None, :, None]
    a_block = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, a_layout)))[:, None, None]
    out_rows = gl.arange(0, ROWS, gl.SliceLayout(1, out_layout))
    m = gl.arange(0, COLS, gl.SliceLayout(0, out_layout))
    start, stride = gl.program_id(0), gl.num_programs(0)
    epilogue = SwappedEpilogue(None, None, residual, stride_cm, M, weights.N)
    scales = ()
    if GROUPS:
        scales = weights.scales_of_block(start * ROWS + own_rows, block, 2 * SUBS)
    of_rows = weights.of_rows(start * ROWS + out_rows)
    gdc_wait()
    if rows is not None:
        rows.quantize_own(ready)
    mbarrier.wait(ready, 0)
    if row is not None:
        own_x_scale = row.quantize(lows) + gl.zeros([COLS], gl.float32, gl.SliceLayout(0, out_layout))
    else:
        own_x_scale = gl.load(x_scale + m, mask=m < M, other=0.0)
    step = 0
    # The previous step's slot. It is released in the next step, or after the last one. Within its own step, the
    # assembler would let its loads end after the release: the instructions that use the values may be delayed, and TMA
    # doesn't wait for loads.
    slot = step
    for tile in range(start, gl.cdiv(weights.N, ROWS), stride):
        sums = gl.zeros([WARPS, ROWS, COLS], SUMS, layout)
        n = tile * ROWS + out_rows
        before = epilogue.load_residual(n, m)
        for k in range(steps):
            mbarrier.arrive(empty.index(slot), count=1, pred=k > 0)
            slot = step % STAGES
            if GROUPS:
                # The next step's scales: loading them from memory takes as long as a step.
                ends = k + 1 == steps
                following = gl.where(ends, tile + stride, tile) * ROWS + own_rows
                next_scales = weights.scales_of_block(following, gl.where(ends, 0, k + 1) * WARPS + block, 2 * SUBS)
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            for part in gl.static_range(2 * SUBS):
                packed = w.index(slot * SUBS + part % SUBS).load(a_layout)
                if row is not None:
                    values = lows.index(k * 2 * SUBS + part).load(gl.SliceLayout(2, b_layout))[:, :, None]
                    b = gl.broadcast(values, gl.zeros([WARPS, STEP, COLS], gl.int8, b_layout))[0]
                else:
                    halves = lows if part < SUBS else highs
                    x = halves.index(slot * SUBS + part % SUBS)
                    b = x.permute((0, 2, 1)).load(b_layout)
                group = (k * WARPS + a_block) * 2 * SUBS + part
                a = weights.unpacked(packed, tile * ROWS + a_rows, group, None, part // SUBS)
                if GROUPS:
                    made = mma_v2(a, b, gl.zeros([WARPS, ROWS, COLS], gl.int32, layout))
                    scale = gl.broadcast(scales[part][:, :, None], sums)[0]
                    sums = gl.fma(made.to(gl.float32), scale, sums)
                else:
                    sums = mma_v2(a, b, sums)
            if GROUPS:
                scales = next_scales
            step += 1
        mbarrier.arrive(empty.index(slot), count=1)
        total = gl.sum(gl.convert_layout(sums, gathered), 0)
        out = weights.finish(total, own_x_scale, of_rows)
        if residual is not None:
            out = added(out, before[0])
        of_rows = weights.of_rows(n + stride * ROWS)
        at = C + m[None, :] * stride_cm + n[:, None]
        gl.store(at, out.to(C.dtype.element_ty), mask=(n < weights.N)[:, None] & (m < M)[None, :])


@gluon.jit
def _few(
    A, B, C, residual, x_scale, weights, rows, row, M, K, stride_cm,
    STAGES: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = B.block_shape[0]
    STEP: gl.constexpr = B.block_shape[2]
    SUBS: gl.constexpr = PANEL // STEP
    w = gl.allocate_shared_memory(B.dtype, [STAGES * SUBS, WARPS, B.block_shape[1], STEP], B.layout)
    if row is not None:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        lows = gl.allocate_shared_memory(gl.int8, [row.steps * 2 * SUBS, WARPS, STEP], plain)
        highs = lows
    else:
        lows = gl.allocate_shared_memory(A.dtype, [STAGES * SUBS, WARPS, A.block_shape[1], STEP], A.layout)
        highs = gl.allocate_shared_memory(A.dtype, [STAGES * SUBS, WARPS, A.block_shape[1], STEP], A.layout)
    ring = (w, lows, highs, barriers(STAGES), barriers(STAGES))
    # Completes when the ring's barriers are initialized and all rows are quantized.
    ready = barriers(1)
    initialize(ready, 1, 2 if rows is not None else 1)
    steps = gl.cdiv(K, WARPS * BLOCK)
    first = ready.index(0)
    if rows is None:
        REGISTERS: gl.constexpr = PRODUCER_REGISTERS
    else:
        REGISTERS: gl.constexpr = QUANTIZING_REGISTERS
    gl.warp_specialize(
        [
            (_consume_few, (C, residual, x_scale, weights, rows, row, ring, M, stride_cm, steps, first)),
            (_produce_few, (A, B, weights, rows, ring, steps, first, NEXT_EARLY)),
        ],
        [1],
        [REGISTERS],
    )


@gluon.jit(do_not_specialize=["M"])
def _int4_int8_few_kernel(
    A, B, C, x_scale, scale, zero_point, bias, residual,
    M, N, K, G, stride_cm,
    GROUP: gl.constexpr, STAGES: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    """``A``, ``B``: tensor maps of x as ``[K / 256, M, 256]`` and of the weight as ``[K / 256, N, 128]``.

    A map's block: one block of K for each warp, by 8 or 16 rows of x or by the rows of a tile, and as many bytes as a
    group has values, at most ``PANEL``. ``C``: ``[M, N]`` with contiguous columns; ``residual``: None, or the same with
    the same stride.
    """
    weights = Weights(scale, zero_point, None, bias, N, G, GROUP, 1.0 / 16 if zero_point is None else 1.0, GROUP == 0)
    _few(A, B, C, residual, x_scale, weights, None, None, M, K, stride_cm, STAGES, NEXT_EARLY)


@gluon.jit(do_not_specialize=["M"])
def _int4_int8_layer_kernel(
    x, q, q_scale, B, C, scale, zero_point, bias, residual, A, counts,
    M, N, K, G, stride_xm, stride_xk, stride_cm,
    ROW: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    """The layer in one launch: the programs quantize the rows of ``x`` together, as ``SharedRows`` describes."""
    weights = Weights(scale, zero_point, None, bias, N, G, GROUP, 1.0 / 16 if zero_point is None else 1.0, GROUP == 0)
    rows = SharedRows(x, q, q_scale, RowQuantization(None), counts, M, K, stride_xm, stride_xk, ROW)
    _few(A, B, C, residual, q_scale, weights, rows, None, M, K, stride_cm, STAGES, NEXT_EARLY)


@gluon.jit
def _int4_int8_row_kernel(
    x, B, C, scale, zero_point, bias, residual,
    N, K, G, stride_xk,
    STEPS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    """The layer of a single row in one launch: every program quantizes the row for itself.

    ``STEPS``: how many blocks of 256 values of the row each warp multiplies.
    """
    weights = Weights(scale, zero_point, None, bias, N, G, GROUP, 1.0 / 16 if zero_point is None else 1.0, GROUP == 0)
    row = OwnRow(x, K, stride_xk, STEPS)
    _few(None, B, C, residual, None, weights, None, row, 1, K, N, STAGES, NEXT_EARLY)
