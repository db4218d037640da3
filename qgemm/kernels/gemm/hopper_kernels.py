"""The int8 GEMM for Hopper (sm_90): ``C = A @ B.T``, scaled, with the rounding of the other kernels.

``C[m, n] = sum over k of A[m, k] * B[n, k]``, times ``A_scale[m]`` and ``B_scale[n]``, plus ``bias[n]``, and to what
that is rounded to ``residual[m, n]`` is added. Operands are ``[M, K]`` and ``[N, K]`` with K contiguous, addresses and
row strides multiples of 16 bytes. TMA fills what lies beyond the edges with zeros and stores nothing there, so there is
no mask.

Programs are persistent. One producer warp has TMA load blocks of A and B into a ring of shared memory; four or eight
consumer warps wait for a block, multiply it with ``wgmma`` and release its slot. Then they scale the sums and have TMA
store them, while the producer loads for the next tile, and, where there are two groups of them that take turns, the
other one multiplies it. docs/performance.md: what it reaches, why, and what was tried.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_init
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.quantize.hopper_kernels import SharedRows
from qgemm.kernels.stages import GemmContext, ScheduleContext
from qgemm.kernels.stages.epilogue import Epilogue, added
from qgemm.kernels.stages.ring import MMA_ROWS, PRODUCER_REGISTERS, barriers, initialize, make_ring, store_block
from qgemm.kernels.stages.rows import RowQuantization

TURNING_ROWS = gl.constexpr(256)  # of tiles that go through K forwards and backwards in turn
QUANTIZING_REGISTERS = gl.constexpr(64)  # of a producer's thread that may have to quantize
MORE_QUANTIZING_REGISTERS = gl.constexpr(80)  # beside eight warps, where the assembler keeps more for it
IN_TURN_REGISTERS = gl.constexpr(232)  # of a thread that multiplies, where two groups do: all but the producer's
MAX_EARLY_VALUES = gl.constexpr(40)  # of a residual, that a thread loads before the sums are there
RESIDUAL_VALUES = gl.constexpr(32)  # that it loads at a time of a larger one


@gluon.jit
def _fill_b(ring, step, A, B, row, col, k, LAST_PARTS: gl.constexpr):
    """Waits until the slot is empty, then starts loading the block at ``(col, k)`` of B."""
    ends = row + ring.block_m > A.shape[0]
    ring.claim(step)
    ring.expect(step, A, B, ring.block_m // A.block_shape[0], not ends)
    ring.expect(step, A, B, LAST_PARTS, ends)
    ring.load_b(step, B, col, k)


@gluon.jit
def _fill_a(ring, step, A, row, k, LAST_PARTS: gl.constexpr):
    """Starts loading the block at ``(row, k)`` of A, after ``_fill_b``: ``LAST_PARTS`` of it where A ends in it."""
    ends = row + ring.block_m > A.shape[0]
    ring.load_a(step, A, row, k, gl.where(ends, LAST_PARTS, ring.block_m // A.block_shape[0]))


@gluon.jit
def _produce(
    A, B, rows, ring, sched, num_k, ready,
    LAST_PARTS: gl.constexpr, CONSTANT_B: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    QUANTIZES: gl.constexpr = rows is not None
    # Not in layers of one launch: they are small, and the producer has no register left for it.
    TURNS: gl.constexpr = (sched.ctx.block_m == TURNING_ROWS or sched.ctx.group_size_n > 1) and not QUANTIZES
    BLOCK_K: gl.constexpr = sched.ctx.block_k
    start, total, stride = sched.persistent_tile_range()
    tile = sched.get_tile_from_idx(start)
    row, col = tile.pid_m * tile.block_m, tile.pid_n * tile.block_n
    if NEXT_EARLY:
        gdc_launch_dependents()
    # By one warp: several would meet after each.
    ring.initialize()
    if not QUANTIZES:
        mbarrier.arrive(ready, count=1)
    ahead = 0
    if CONSTANT_B:
        ahead = gl.minimum(num_k, ring.depth)
        for k_idx in range(ahead):
            _fill_b(ring, k_idx, A, B, row, col, k_idx * BLOCK_K, LAST_PARTS)
    # Nothing else is read before the kernel ahead in the stream has ended; see Launch.
    gdc_wait()
    if QUANTIZES:
        rows.wait_for_all(ready)
    if CONSTANT_B:
        for k_idx in range(ahead):
            _fill_a(ring, k_idx, A, row, k_idx * BLOCK_K, LAST_PARTS)

    step = ahead
    backwards = False
    for tile_id in range(start, total, stride):
        tile = sched.get_tile_from_idx(tile_id)
        row, col = tile.pid_m * tile.block_m, tile.pid_n * tile.block_n
        for k_idx in range(gl.where(tile_id == start, ahead, 0), num_k):
            # A tile that follows starts where the one before has ended: the cache still has what others loaded there.
            k = gl.where(backwards, num_k - 1 - k_idx, k_idx) * BLOCK_K
            _fill_b(ring, step, A, B, row, col, k, LAST_PARTS)
            _fill_a(ring, step, A, row, k, LAST_PARTS)
            step += 1
        if TURNS:
            backwards = not backwards
    if not NEXT_EARLY:
        # Earlier, programs of the next kernel would crowd onto the multiprocessors that happen to be free.
        gdc_launch_dependents()
    if QUANTIZES:
        rows.forget(ready)


@gluon.jit
def _add_residual(staging, epilogue, row, col, M, N):
    """Adds the residual at ``(row, col)`` to a tile in shared memory, some rows at a time: sums leave few registers."""
    ROWS: gl.constexpr = staging.shape[0]
    COLS: gl.constexpr = staging.shape[1]
    STEP: gl.constexpr = min(RESIDUAL_VALUES * 32 * gl.num_warps() // COLS, ROWS)
    # Threads side by side have 16 bytes each of a row.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [gl.num_warps(), 1], [1, 0])
    rows = row + gl.arange(0, STEP, gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, COLS, gl.SliceLayout(0, layout))
    for start in gl.static_range(0, ROWS, STEP):
        part = staging.slice(start, STEP)
        values = added(part.load(layout), epilogue.load_residual(rows + start, cols, M, N))
        part.store(values.to(staging.dtype))


@gluon.jit
def _store(C, staging, row, col, out, residual, ROWS: gl.constexpr):
    """Has the copy engine store the first ``ROWS`` rows of ``out`` at ``(row, col)``.

    ``residual``: the epilogue with one to add, or None.
    """
    # The store before has read the staging memory.
    tma.store_wait(0)
    staging.store(out)
    if residual is not None:
        _add_residual(staging, residual, row, col, C.shape[0], C.shape[1])
    fence_async_shared()
    store_block(C, [row, col], staging.slice(0, ROWS))


@gluon.jit
def _store_pieces(C, staging, row, col, out, residual, ROWS: gl.constexpr):
    """As ``_store``, by as many columns at a time as ``staging`` has."""
    if out.shape[1] == staging.shape[1]:
        _store(C, staging, row, col, out, residual, ROWS)
    else:
        HALF: gl.constexpr = out.shape[1] // 2
        halves = out.reshape([out.shape[0], 2, HALF]).permute(0, 2, 1).split()
        for i in gl.static_range(2):
            _store_pieces(C, staging, row, col + i * HALF, halves[i], residual, ROWS)


@gluon.jit
def _consume(C, epilogue, rows, ring, staging, sched, num_k, ready):
    gdc_wait()
    if rows is not None:
        rows.quantize_own(ready)
    mbarrier.wait(ready, 0)
    BLOCK_M: gl.constexpr = sched.ctx.block_m
    BLOCK_N: gl.constexpr = sched.ctx.block_n
    ROWS: gl.constexpr = staging.shape[0]
    MAIN: gl.constexpr = ring.widths[0]
    REST: gl.constexpr = ring.widths[-1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, MAIN, 32])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, REST, 32])
    FEW: gl.constexpr = ROWS * BLOCK_N // (32 * gl.num_warps()) <= MAX_EARLY_VALUES
    EARLY: gl.constexpr = FEW and epilogue.residual is not None
    late = None if FEW or epilogue.residual is None else epilogue

    start, total, stride = sched.persistent_tile_range()
    step = 0
    for tile_id in range(start, total, stride):
        tile = sched.get_tile_from_idx(tile_id)
        row, col = tile.pid_m * BLOCK_M, tile.pid_n * BLOCK_N
        cols = col + gl.arange(0, MAIN, gl.SliceLayout(0, layout))
        own_rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        scales = epilogue.load_scales(own_rows, cols, sched.M, sched.N)
        if EARLY:
            residual = epilogue.load_residual(own_rows, cols, sched.M, sched.N)
        accs = (warpgroup_mma_init(gl.zeros((ROWS, MAIN), gl.int32, layout)),)
        if MAIN < BLOCK_N:
            rest_cols = col + MAIN + gl.arange(0, REST, gl.SliceLayout(0, rest_layout))
            rest_rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, rest_layout))
            rest_scales = epilogue.load_scales(rest_rows, rest_cols, sched.M, sched.N)
            if EARLY:
                rest_residual = epilogue.load_residual(rest_rows, rest_cols, sched.M, sched.N)
            accs = accs + (warpgroup_mma_init(gl.zeros((ROWS, REST), gl.int32, rest_layout)),)

        sums, step = ring.reduce(step, num_k, accs, ROWS)
        out = epilogue.apply(sums[0], scales, cols, sched.N)
        if EARLY:
            out = added(out, residual)
        _store_pieces(C, staging, row, col, out.to(C.dtype), late, BLOCK_M)
        if MAIN < BLOCK_N:
            out = epilogue.apply(sums[1], rest_scales, rest_cols, sched.N)
            if EARLY:
                out = added(out, rest_residual)
            _store_pieces(C, staging, row, col + MAIN, out.to(C.dtype), late, BLOCK_M)
    tma.store_wait(0)


@gluon.jit
def _store_sums(C, epilogue, staging, acc, row, col, sched):
    """Scales and stores sums at ``(row, col)``, by as many columns at a time as ``staging`` has."""
    COLS: gl.constexpr = staging.shape[1]
    if acc.shape[1] == COLS:
        rows = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        cols = col + gl.arange(0, COLS, gl.SliceLayout(0, acc.type.layout))
        out = epilogue.apply(acc, epilogue.load_scales(rows, cols, sched.M, sched.N), cols, sched.N)
        residual = None if epilogue.residual is None else epilogue
        _store(C, staging, row, col, out.to(C.dtype), residual, staging.shape[0])
    else:
        HALF: gl.constexpr = acc.shape[1] // 2
        halves = acc.reshape([acc.shape[0], 2, HALF]).permute(0, 2, 1).split()
        for i in gl.static_range(2):
            _store_sums(C, epilogue, staging, halves[i], row, col + i * HALF, sched)


@gluon.jit
def _consume_in_turn(C, epilogue, ring, staging, sched, num_k, ready, turns, WHO: gl.constexpr):
    """As ``_consume``, but every second tile of a program's, while the other group stores its sums.

    ``turns``: a barrier for each group, which completes when the other one has waited for all blocks of its tile. So a
    group waits for none that come after others yet to come: a barrier tells a phase from the next only.
    """
    gdc_wait()
    mbarrier.wait(ready, 0)
    MAIN: gl.constexpr = ring.widths[0]
    REST: gl.constexpr = ring.widths[-1]
    BLOCK_M: gl.constexpr = sched.ctx.block_m
    BLOCK_N: gl.constexpr = sched.ctx.block_n
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, MAIN, 32])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, REST, 32])

    start, total, stride = sched.persistent_tile_range()
    step = WHO * num_k
    phase = 1 - WHO  # the first group's first turn needs no arrival
    for tile_id in range(start + WHO * stride, total, 2 * stride):
        accs = (warpgroup_mma_init(gl.zeros((BLOCK_M, MAIN), gl.int32, layout)),)
        if MAIN < BLOCK_N:
            accs = accs + (warpgroup_mma_init(gl.zeros((BLOCK_M, REST), gl.int32, rest_layout)),)
        mbarrier.wait(turns.index(WHO), phase)
        sums, step = ring.reduce(step, num_k, accs, BLOCK_M, turns.index(1 - WHO))
        step += num_k
        phase = 1 - phase
        tile = sched.get_tile_from_idx(tile_id)
        row, col = tile.pid_m * BLOCK_M, tile.pid_n * BLOCK_N
        _store_sums(C, epilogue, staging, sums[0], row, col, sched)
        if MAIN < BLOCK_N:
            _store_sums(C, epilogue, staging, sums[1], row, col + MAIN, sched)
    tma.store_wait(0)


@gluon.jit
def _run(
    A, B, C, epilogue, rows, M, N, K,
    CONFIG: gl.constexpr, GROUP_SIZE_N: gl.constexpr, NUM_SMS: gl.constexpr, LAST_PARTS: gl.constexpr,
    CONSTANT_B: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    """``rows``: the ``SharedRows`` that A is to hold; None if it holds the quantized rows already."""
    ctx = GemmContext(
        CONFIG.block_m, CONFIG.block_n, CONFIG.block_k, NUM_SMS, 1, CONFIG.group_size_m,
        quantized=True, group_size_n=GROUP_SIZE_N,
    )  # fmt: skip
    sched = ScheduleContext(M, N, K, ctx)
    num_k = gl.cdiv(K, ctx.block_k)

    ring = make_ring(A, B, CONFIG)
    # Completes when the ring's are initialized and all rows of A quantized.
    ready = barriers(1)
    initialize(ready, 1, 2 if rows is not None else 1)
    ROWS: gl.constexpr = max(CONFIG.block_m, MMA_ROWS)
    staging = gl.allocate_shared_memory(C.dtype, [ROWS, C.block_shape[1]], C.layout)
    if rows is None:
        REGISTERS: gl.constexpr = PRODUCER_REGISTERS
    else:
        REGISTERS: gl.constexpr = QUANTIZING_REGISTERS if gl.num_warps() == 4 else MORE_QUANTIZING_REGISTERS
    # Constants stay constants only in a tuple that is written here.
    if CONFIG.groups == 1:
        gl.warp_specialize(
            [
                (_consume, (C, epilogue, rows, ring, staging, sched, num_k, ready.index(0))),
                (_produce, (A, B, rows, ring, sched, num_k, ready.index(0), LAST_PARTS, CONSTANT_B, NEXT_EARLY)),
            ],
            [1],
            [REGISTERS],
        )
    else:
        gl.static_assert(rows is None, "groups that take turns quantize no rows")
        other_staging = gl.allocate_shared_memory(C.dtype, [ROWS, C.block_shape[1]], C.layout)
        turns = barriers(2)
        initialize(turns, 2)
        gl.warp_specialize(
            [
                (_consume_in_turn, (C, epilogue, ring, staging, sched, num_k, ready.index(0), turns, 0)),
                (_consume_in_turn, (C, epilogue, ring, other_staging, sched, num_k, ready.index(0), turns, 1)),
                (_produce, (A, B, rows, ring, sched, num_k, ready.index(0), LAST_PARTS, CONSTANT_B, NEXT_EARLY)),
            ],
            [gl.num_warps(), 1],
            [IN_TURN_REGISTERS, REGISTERS],
        )


@gluon.jit(do_not_specialize=["M"])
def _gemm_hopper_kernel(
    A, B, C, A_scale, B_scale, bias, residual,
    M, N, K,
    stride_a_scale, stride_b_scale, stride_bias, stride_residual,
    CONFIG: gl.constexpr, GROUP_SIZE_N: gl.constexpr, NUM_SMS: gl.constexpr, LAST_PARTS: gl.constexpr,
    CONSTANT_B: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    """``A``, ``B``, ``C``: tensor maps of ``[M, K]``, ``[N, K]`` and ``[M, N]``. ``CONFIG``: a ``GemmConfig``.

    Their blocks: ``PANEL`` columns and a part of ``block_m`` rows; ``PANEL`` columns and as many rows as the last of
    ``widths``, which make ``block_n``; a tile, or some of its columns.
    ``LAST_PARTS``: parts with rows of A in the last row of tiles. ``CONSTANT_B``: no kernel that may still run writes
    B, so loading it needn't wait. ``NEXT_EARLY``: let the next kernel start once all of this one's programs have, not
    only when they have loaded all.
    """
    epilogue = Epilogue(
        A_scale, B_scale, bias, stride_a_scale, stride_b_scale, stride_bias, None, residual, stride_residual
    )
    _run(A, B, C, epilogue, None, M, N, K, CONFIG, GROUP_SIZE_N, NUM_SMS, LAST_PARTS, CONSTANT_B, NEXT_EARLY)


@gluon.jit(do_not_specialize=["M"])
def _quant_linear_hopper_kernel(
    x, q, q_scale, x_scale, B, C, b_scale, bias, residual, A, counts,
    M, N, K,
    stride_xm, stride_xk, stride_b_scale, stride_bias, stride_residual,
    ROW: gl.constexpr,
    CONFIG: gl.constexpr, GROUP_SIZE_N: gl.constexpr, NUM_SMS: gl.constexpr, LAST_PARTS: gl.constexpr,
    NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    """A quantized linear layer in one launch: the programs quantize the rows of ``x`` together, then compute tiles.

    ``x``: ``[M, K]``. ``q``, ``q_scale``: where its quantized rows go, ``[M, K]`` and ``[M]``, contiguous. ``A``: the
    tensor map of ``q``. ``x_scale``, ``counts``, ``ROW``: see ``SharedRows``. B is constant; the rest is as in
    ``_gemm_hopper_kernel``.
    """
    rows = SharedRows(x, q, q_scale, RowQuantization(x_scale), counts, M, K, stride_xm, stride_xk, ROW)
    epilogue = Epilogue(q_scale, b_scale, bias, 1, stride_b_scale, stride_bias, None, residual, stride_residual)
    _run(A, B, C, epilogue, rows, M, N, K, CONFIG, GROUP_SIZE_N, NUM_SMS, LAST_PARTS, True, NEXT_EARLY)
