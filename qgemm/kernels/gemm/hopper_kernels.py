"""The GEMM for Hopper (sm_90), in Gluon: ``C = A @ B.T``, scaled, with the same rounding as the other kernels.

``C[m, n] = sum over k of A[m, k] * B[n, k]``, times ``A_scale[m]`` and ``B_scale[n]``, plus ``bias[n]``, rounded; then
``residual[m, n]`` is added. Operands are ``[M, K]`` and ``[N, K]``, int8, e4m3, float16 or bfloat16, with K contiguous;
addresses and row strides are multiples of 16 bytes. TMA fills what lies beyond the edges with zeros and stores nothing
there, so there is no mask.

Programs are persistent. One producer warp keeps TMA loading blocks of A and B into a ring of shared memory. Four or
eight consumer warps wait for a block, multiply it with ``wgmma`` and release its slot. At the end of a tile they scale
the sums and TMA stores them, while the producer loads for the next tile. Where two groups of consumer warps take turns,
the other group multiplies the next tile meanwhile. docs/performance/int8.md says what this reaches, why, and what was
tried.

The tensor cores' own sums of fp8 keep only 14 bits. So they sum over 256 values of K, and the multiplying warps add
these sums in float32; with a scale for each 128 values, they sum over 128 values and the warps scale the sums before
adding. From 128 rows on, two groups of warps share a tile: while one adds, the other's products are computed. With
block scales, a group also adds while its own next products are computed; tiles of 256 rows leave no registers for that.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_init
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.quantize.hopper_kernels import SharedRows
from qgemm.kernels.stages import GemmContext, ScheduleContext
from qgemm.kernels.stages.block_scales import AllBlockScales
from qgemm.kernels.stages.epilogue import Epilogue, added
from qgemm.kernels.stages.promoted_sums import reduce_promoted
from qgemm.kernels.stages.ring import (
    MMA_ROWS,
    PANEL,
    PRODUCER_REGISTERS,
    barriers,
    initialize,
    make_ring,
    store_block,
)
from qgemm.kernels.stages.rows import RowQuantization, e4m3_quantization
from qgemm.kernels.stages.staged_residual import add_residual

TURNING_ROWS = gl.constexpr(256)  # of tiles that go through K alternately forwards and backwards
QUANTIZING_REGISTERS = gl.constexpr(64)  # per thread of a producer that may have to quantize
MORE_QUANTIZING_REGISTERS = gl.constexpr(80)  # the same beside eight warps, where the assembler keeps more for it
BESIDE_QUANTIZING_REGISTERS = gl.constexpr(224)  # per multiplying thread, where the producer may have to quantize
IN_TURN_REGISTERS = gl.constexpr(232)  # per multiplying thread of two groups: all but the producer's
MAX_EARLY_VALUES = gl.constexpr(40)  # of a residual that a thread loads before the sums are complete


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
    """Starts loading the block at ``(row, k)`` of A, after ``_fill_b``: ``LAST_PARTS`` parts if A ends in it."""
    ends = row + ring.block_m > A.shape[0]
    ring.load_a(step, A, row, k, gl.where(ends, LAST_PARTS, ring.block_m // A.block_shape[0]))


@gluon.jit
def _produce(
    A, B, rows, ring, sched, num_k, ready,
    LAST_PARTS: gl.constexpr, CONSTANT_B: gl.constexpr, NEXT_EARLY: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    QUANTIZES: gl.constexpr = rows is not None
    BLOCK_K: gl.constexpr = sched.ctx.block_k
    start, total, stride = sched.persistent_tile_range()
    tile = sched.get_tile_from_idx(start)
    row, col = tile.pid_m * tile.block_m, tile.pid_n * tile.block_n
    if NEXT_EARLY:
        gdc_launch_dependents()
    # One warp initializes the barriers: several would have to meet after each.
    ring.initialize()
    if not QUANTIZES:
        mbarrier.arrive(ready, count=1)
    ahead = 0
    if CONSTANT_B:
        ahead = gl.minimum(num_k, ring.depth)
        for k_idx in range(ahead):
            _fill_b(ring, k_idx, A, B, row, col, k_idx * BLOCK_K, LAST_PARTS)
    # Nothing else is read before the preceding kernel in the stream has ended; see Launch.
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
            # The next tile starts at the K where the previous one ended: the cache still has what others loaded there.
            k = gl.where(backwards, num_k - 1 - k_idx, k_idx) * BLOCK_K
            _fill_b(ring, step, A, B, row, col, k, LAST_PARTS)
            _fill_a(ring, step, A, row, k, LAST_PARTS)
            step += 1
        if TURNS:
            backwards = not backwards
    if not NEXT_EARLY:
        # If this came earlier, programs of the next kernel would crowd onto the SMs that happen to be free.
        gdc_launch_dependents()
    if QUANTIZES:
        rows.forget(ready)


@gluon.jit
def _store(C, staging, row, col, out, residual, ROWS: gl.constexpr):
    """Stores the first ``ROWS`` rows of ``out`` at ``(row, col)``, by TMA.

    ``residual``: None, or the epilogue that has one to add.
    """
    # Waits until the previous store has read the staging memory.
    tma.store_wait(0)
    staging.store(out)
    if residual is not None:
        pointer, stride = residual.residual, residual.stride_residual
        add_residual(staging, pointer, stride, row, col, C.shape[0], C.shape[1])
    fence_async_shared()
    store_block(C, [row, col], staging.slice(0, ROWS))


@gluon.jit
def _store_pieces(C, staging, row, col, out, residual, ROWS: gl.constexpr):
    """As ``_store``, as many columns at a time as ``staging`` has."""
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
    DEPTH: gl.constexpr = ring.columns // 4  # values of K per instruction
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, MAIN, DEPTH])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, REST, DEPTH])
    SUM: gl.constexpr = gl.int32 if sched.ctx.quantized else gl.float32
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
        accs = (warpgroup_mma_init(gl.zeros((ROWS, MAIN), SUM, layout)),)
        if MAIN < BLOCK_N:
            rest_cols = col + MAIN + gl.arange(0, REST, gl.SliceLayout(0, rest_layout))
            rest_rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, rest_layout))
            rest_scales = epilogue.load_scales(rest_rows, rest_cols, sched.M, sched.N)
            if EARLY:
                rest_residual = epilogue.load_residual(rest_rows, rest_cols, sched.M, sched.N)
            accs = accs + (warpgroup_mma_init(gl.zeros((ROWS, REST), SUM, rest_layout)),)

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
    """Scales and stores sums at ``(row, col)``, as many columns at a time as ``staging`` has."""
    COLS: gl.constexpr = staging.shape[1]
    if acc.shape[1] == COLS:
        rows = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        cols = col + gl.arange(0, COLS, gl.SliceLayout(0, acc.type.layout))
        out = epilogue.apply(acc, epilogue.load_scales(rows, cols, sched.M, sched.N), cols, sched.N)
        residual = None if epilogue.residual is None else epilogue
        _store(C, staging, row, col, out.to(C.dtype), residual, C.block_shape[0])
    else:
        HALF: gl.constexpr = acc.shape[1] // 2
        halves = acc.reshape([acc.shape[0], 2, HALF]).permute(0, 2, 1).split()
        for i in gl.static_range(2):
            _store_sums(C, epilogue, staging, halves[i], row, col + i * HALF, sched)


@gluon.jit
def _consume_in_turn(C, epilogue, ring, staging, sched, num_k, ready, turns, WHO: gl.constexpr):
    """As ``_consume``, but for every second tile of a program, while the other group stores its sums.

    ``turns``: a barrier for each group, which completes when the other group has waited for all blocks of its tile. So
    a group never waits for a block while earlier ones are still to come: a barrier can only tell a phase from the next.
    """
    gdc_wait()
    mbarrier.wait(ready, 0)
    MAIN: gl.constexpr = ring.widths[0]
    REST: gl.constexpr = ring.widths[-1]
    BLOCK_M: gl.constexpr = sched.ctx.block_m
    BLOCK_N: gl.constexpr = sched.ctx.block_n
    DEPTH: gl.constexpr = ring.columns // 4  # values of K per instruction
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, MAIN, DEPTH])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, REST, DEPTH])
    SUM: gl.constexpr = gl.int32 if sched.ctx.quantized else gl.float32

    start, total, stride = sched.persistent_tile_range()
    step = WHO * num_k
    phase = 1 - WHO  # the first group's first turn needs no arrival
    for tile_id in range(start + WHO * stride, total, 2 * stride):
        accs = (warpgroup_mma_init(gl.zeros((BLOCK_M, MAIN), SUM, layout)),)
        if MAIN < BLOCK_N:
            accs = accs + (warpgroup_mma_init(gl.zeros((BLOCK_M, REST), SUM, rest_layout)),)
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
def _consume_promoted(
    C, epilogue, rows, ring, staging, sched, num_k, ready, scales, WHO: gl.constexpr
):  # fmt: skip
    """As ``_consume``, for fp8 and part ``WHO`` of each tile's rows. ``scales``: the ``AllBlockScales``, or None."""
    gdc_wait()
    if rows is not None and WHO == 0:
        rows.quantize_own(ready)
    mbarrier.wait(ready, 0)
    BLOCK_M: gl.constexpr = sched.ctx.block_m
    PARTS: gl.constexpr = max(BLOCK_M, MMA_ROWS) // (ring.consumers * MMA_ROWS)
    FIRST: gl.constexpr = WHO * PARTS * MMA_ROWS
    MAIN: gl.constexpr = ring.widths[0]
    REST: gl.constexpr = ring.widths[-1]
    PIECES: gl.constexpr = len(ring.widths)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, MAIN, 32])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, REST, 32])

    start, total, stride = sched.persistent_tile_range()
    step = 0
    for tile_id in range(start, total, stride):
        tile = sched.get_tile_from_idx(tile_id)
        row, col = tile.pid_m * BLOCK_M + FIRST, tile.pid_n * sched.ctx.block_n
        sums = ()
        for _ in gl.static_range(PARTS):
            sums = sums + (gl.zeros((MMA_ROWS, MAIN), gl.float32, layout),)
            if PIECES > 1:
                sums = sums + (gl.zeros((MMA_ROWS, REST), gl.float32, rest_layout),)
        own = None
        if scales is not None:
            gl.static_assert(PARTS == 1, "with scales of blocks, a group has 64 rows of a tile")
            own = scales.of_tile(row, col, sched.M, sched.N, sched.ctx.block_n, rest_layout)
        sums, step = reduce_promoted(ring, step, num_k, sums, FIRST, own)
        for i in gl.static_range(PARTS):
            _store_sums(C, epilogue, staging, sums[i * PIECES], row + i * MMA_ROWS, col, sched)
            if PIECES > 1:
                _store_sums(C, epilogue, staging, sums[i * PIECES + 1], row + i * MMA_ROWS, col + MAIN, sched)
    tma.store_wait(0)


@gluon.jit
def _run(
    A, B, C, epilogue, rows, scales, M, N, K,
    CONFIG: gl.constexpr, GROUP_SIZE_N: gl.constexpr, NUM_SMS: gl.constexpr, LAST_PARTS: gl.constexpr,
    CONSTANT_B: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    """``rows``: the ``SharedRows`` that fill A with quantized rows; None if A holds them already.

    ``scales``: the ``AllBlockScales``, or None.
    """
    ctx = GemmContext(
        CONFIG.block_m, CONFIG.block_n, CONFIG.block_k // A.dtype.itemsize, NUM_SMS, 1, CONFIG.group_size_m,
        quantized=A.dtype.is_int(), group_size_n=GROUP_SIZE_N,
    )  # fmt: skip
    sched = ScheduleContext(M, N, K, ctx)
    num_k = gl.cdiv(K, ctx.block_k)
    # Layers of one launch don't turn: they are small, and the producer has no register left for it. Nor do products
    # with block scales, which are loaded in the order of a tile that goes forwards.
    TURNS: gl.constexpr = (CONFIG.block_m == TURNING_ROWS or GROUP_SIZE_N > 1) and rows is None and scales is None

    ring = make_ring(A, B, CONFIG, CONFIG.sharing_groups)
    # Completes when the ring's barriers are initialized and all rows of A are quantized.
    ready = barriers(1)
    initialize(ready, 1, 2 if rows is not None else 1)
    ROWS: gl.constexpr = max(C.block_shape[0], MMA_ROWS)
    staging = gl.allocate_shared_memory(C.dtype, [ROWS, C.block_shape[1]], C.layout)
    if rows is None:
        REGISTERS: gl.constexpr = PRODUCER_REGISTERS
    else:
        REGISTERS: gl.constexpr = QUANTIZING_REGISTERS if gl.num_warps() == 4 else MORE_QUANTIZING_REGISTERS
    own = ready.index(0)
    # Constants stay constants only in a tuple that is written out here.
    if CONFIG.promotes and CONFIG.sharing_groups == 1:
        gl.warp_specialize(
            [
                (_consume_promoted, (C, epilogue, rows, ring, staging, sched, num_k, own, scales, 0)),
                (_produce, (A, B, rows, ring, sched, num_k, own, LAST_PARTS, CONSTANT_B, NEXT_EARLY, TURNS)),
            ],
            [1],
            [REGISTERS],
        )
    elif CONFIG.promotes:
        other_staging = gl.allocate_shared_memory(C.dtype, [ROWS, C.block_shape[1]], C.layout)
        GROUP_REGISTERS: gl.constexpr = IN_TURN_REGISTERS if rows is None else BESIDE_QUANTIZING_REGISTERS
        gl.warp_specialize(
            [
                (_consume_promoted, (C, epilogue, rows, ring, staging, sched, num_k, own, scales, 0)),
                (_consume_promoted, (C, epilogue, None, ring, other_staging, sched, num_k, own, scales, 1)),
                (_produce, (A, B, rows, ring, sched, num_k, own, LAST_PARTS, CONSTANT_B, NEXT_EARLY, TURNS)),
            ],
            [gl.num_warps(), 1],
            [GROUP_REGISTERS, REGISTERS],
        )
    elif CONFIG.groups == 1:
        gl.warp_specialize(
            [
                (_consume, (C, epilogue, rows, ring, staging, sched, num_k, own)),
                (_produce, (A, B, rows, ring, sched, num_k, own, LAST_PARTS, CONSTANT_B, NEXT_EARLY, TURNS)),
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
                (_consume_in_turn, (C, epilogue, ring, staging, sched, num_k, own, turns, 0)),
                (_consume_in_turn, (C, epilogue, ring, other_staging, sched, num_k, own, turns, 1)),
                (_produce, (A, B, rows, ring, sched, num_k, own, LAST_PARTS, CONSTANT_B, NEXT_EARLY, TURNS)),
            ],
            [gl.num_warps(), 1],
            [IN_TURN_REGISTERS, REGISTERS],
        )


@gluon.jit(do_not_specialize=["M"])
def _gemm_hopper_kernel(
    A, B, C, A_scale, B_scale, bias, residual,
    M, N, K,
    stride_a_scale, stride_b_scale, stride_bias, stride_residual, stride_a_block, stride_b_block,
    CONFIG: gl.constexpr, GROUP_SIZE_N: gl.constexpr, NUM_SMS: gl.constexpr, LAST_PARTS: gl.constexpr,
    CONSTANT_B: gl.constexpr, NEXT_EARLY: gl.constexpr, BLOCK_SCALED: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """``A``, ``B``, ``C``: tensor maps of ``[M, K]``, ``[N, K]`` and ``[M, N]``. ``CONFIG``: a ``GemmConfig``.

    A block of ``A`` is ``PANEL`` bytes of columns by a part of ``block_m`` rows. A block of ``B`` is ``PANEL`` bytes of
    columns by as many rows as the last of ``widths``, which add up to ``block_n``. A block of ``C`` is a tile, or some
    of its rows and columns. ``LAST_PARTS``: how many parts have rows of A in the last row of tiles. ``CONSTANT_B``: no
    kernel that may still run writes B, so loading it needn't wait. ``NEXT_EARLY``: lets the next kernel start as soon
    as all of this one's programs have started, instead of when they have loaded everything. ``BLOCK_SCALED``:
    ``A_scale [M, K / 128]`` and ``B_scale [N / 128, K / 128]`` are scales of blocks; ``stride_a_block``,
    ``stride_b_block``: the strides of their columns.
    """
    if BLOCK_SCALED:
        epilogue = Epilogue(None, None, bias, 1, 1, stride_bias, None, residual, stride_residual)
        scales = AllBlockScales(
            A_scale, B_scale, stride_a_scale, stride_a_block, stride_b_scale, stride_b_block, gl.cdiv(K, PANEL)
        )  # fmt: skip
    else:
        epilogue = Epilogue(
            A_scale, B_scale, bias, stride_a_scale, stride_b_scale, stride_bias, ACTIVATION, residual, stride_residual
        )
        scales = None
    _run(A, B, C, epilogue, None, scales, M, N, K, CONFIG, GROUP_SIZE_N, NUM_SMS, LAST_PARTS, CONSTANT_B, NEXT_EARLY)


@gluon.jit(do_not_specialize=["M"])
def _quant_linear_hopper_kernel(
    x, q, q_scale, x_scale, B, C, b_scale, bias, residual, A, counts,
    M, N, K,
    stride_xm, stride_xk, stride_b_scale, stride_bias, stride_residual, stride_b_block,
    ROW: gl.constexpr,
    CONFIG: gl.constexpr, GROUP_SIZE_N: gl.constexpr, NUM_SMS: gl.constexpr, LAST_PARTS: gl.constexpr,
    NEXT_EARLY: gl.constexpr, BLOCK_SCALED: gl.constexpr,
):  # fmt: skip
    """A quantized linear layer in one launch: the programs quantize the rows of ``x`` together, then compute tiles.

    ``x``: ``[M, K]``. ``q``, ``q_scale``: memory for its quantized rows, ``[M, K]``, and scales, ``[M]`` or, with
    ``BLOCK_SCALED``, ``[M, K / 128]``; contiguous. ``A``: the tensor map of ``q``. ``x_scale``, ``counts``, ``ROW``:
    see ``SharedRows``. B is constant; the rest is as in ``_gemm_hopper_kernel``.
    """
    if A.dtype.is_fp8():
        quantization = e4m3_quantization(x_scale, True)
        q = q.to(gl.pointer_type(gl.int8), bitcast=True)
    else:
        quantization = RowQuantization(x_scale)
    rows = SharedRows(x, q, q_scale, quantization, counts, M, K, stride_xm, stride_xk, ROW, BLOCK_SCALED)
    if BLOCK_SCALED:
        epilogue = Epilogue(None, None, bias, 1, 1, stride_bias, None, residual, stride_residual)
        blocks = gl.cdiv(K, PANEL)
        scales = AllBlockScales(q_scale, b_scale, blocks, 1, stride_b_scale, stride_b_block, blocks)
    else:
        epilogue = Epilogue(q_scale, b_scale, bias, 1, stride_b_scale, stride_bias, None, residual, stride_residual)
        scales = None
    _run(A, B, C, epilogue, rows, scales, M, N, K, CONFIG, GROUP_SIZE_N, NUM_SMS, LAST_PARTS, True, NEXT_EARLY)
