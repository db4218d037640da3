"""The grouped product for many rows on Hopper, in Gluon.

The ring, the producer and the consumers are those of the GEMM's ``hopper_kernels.py``; the tiles are those of
``GroupTiles``. To TMA, all groups' weights are one matrix ``[G * N, K]``, in which a tile's block begins at row
``g * N + n``. A tile's block of A begins at the tile's first row and may contain rows of the next group, or what the
slot held before. Those rows aren't stored, so parts of A without a row of the tile aren't loaded. A tile with at most
64 rows in blocks of 128 multiplies half a block.

TMA stores full tiles. It would overwrite the next group's rows with other tiles, so threads store those, from the same
staging memory, 16 bytes at a time. docs/performance/experts.md says what this reaches and what was tried.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_init
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.grouped.kernels import GroupTiles
from qgemm.kernels.stages import GemmContext
from qgemm.kernels.stages.block_scales import AllBlockScales
from qgemm.kernels.stages.epilogue import Epilogue
from qgemm.kernels.stages.promoted_sums import reduce_promoted
from qgemm.kernels.stages.ring import (
    MMA_ROWS,
    PANEL,
    PRODUCER_REGISTERS,
    make_ring,
    store_block,
)


@gluon.jit
def _produce(A, B, tiles, ring, N, K, ctx):
    # Nothing is read before the preceding kernel in the stream has ended; see Launch.
    gdc_wait()
    sched = tiles.schedule(N, K, ctx)
    num_k = gl.cdiv(K, ctx.block_k)
    PART: gl.constexpr = A.block_shape[0]
    PARTS: gl.constexpr = ctx.block_m // PART
    step = 0
    start, total, stride = sched.persistent_tile_range()
    for tile_id in range(start, total, stride):
        pid_m, pid_n = sched.get_tile(tile_id)
        group, first, end = tiles.get(pid_m)
        weight_row = group * N + pid_n * ctx.block_n
        for k_idx in range(num_k):
            # As many parts of A as have rows of the tile, and a block of B.
            needed = gl.cdiv(end - first, PART)
            ring.claim(step)
            for parts in gl.static_range(1, PARTS + 1):
                ring.expect(step, A, B, parts, needed == parts)
            ring.load_a(step, A, first, k_idx * ctx.block_k, needed)
            ring.load_b(step, B, weight_row, k_idx * ctx.block_k)
            step += 1
    # If this came earlier, programs of the next kernel would crowd onto the SMs that happen to be free.
    gdc_launch_dependents()


@gluon.jit
def _consume_tile(
    out_map, out, epilogue, ring, staging, step, num_k, N, group, first, end, pid_n,
    BLOCK_N: gl.constexpr, ROWS: gl.constexpr, BLOCK_SCALED: gl.constexpr,
):  # fmt: skip
    """One tile of the output, of which at most ``ROWS`` rows count. ``BLOCK_SCALED``: the scales are of blocks."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 32])
    cols = pid_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    place = staging.slice(0, ROWS)
    if ring.a_panels.dtype.is_int():
        rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        epilogue = epilogue.beyond(group * N)
        scales = epilogue.load_scales(rows, cols, end, N)
        acc = warpgroup_mma_init(gl.zeros((ROWS, BLOCK_N), gl.int32, layout))
        sums, _ = ring.reduce(step, num_k, (acc,), ROWS)
        values = epilogue.apply(sums[0], scales, cols, N)
        # Waits until the previous tile's store has read the staging memory.
        tma.store_wait(0)
        place.store(values.to(staging.dtype))
    else:
        PARTS: gl.constexpr = ROWS // MMA_ROWS
        gl.static_assert(PARTS == 1 or not BLOCK_SCALED)
        sums = ()
        for _ in gl.static_range(PARTS):
            sums = sums + (gl.zeros((MMA_ROWS, BLOCK_N), gl.float32, layout),)
        if BLOCK_SCALED:
            # A step is a block of K. The scales of each group's columns begin with a new block.
            every = AllBlockScales(epilogue.a_scale, epilogue.b_scale, num_k, 1, num_k, 1, num_k)
            col = group * (gl.cdiv(N, PANEL) * PANEL) + pid_n * BLOCK_N
            scales = every.of_tile(first, col, end, N, BLOCK_N, layout)
            sums, _ = reduce_promoted(ring, step, num_k, sums, 0, scales)
            epilogue = Epilogue(None, None, None if epilogue.bias is None else epilogue.bias + group * N)
        else:
            sums, _ = reduce_promoted(ring, step, num_k, sums, 0, None)
            epilogue = epilogue.beyond(group * N)
        tma.store_wait(0)
        for i in gl.static_range(PARTS):
            part = first + i * MMA_ROWS + gl.arange(0, MMA_ROWS, gl.SliceLayout(1, layout))
            values = epilogue.apply(sums[i], epilogue.load_scales(part, cols, end, N), cols, N)
            place.slice(i * MMA_ROWS, MMA_ROWS).store(values.to(staging.dtype))
    if end - first == ring.block_m:
        fence_async_shared()
        store_block(out_map, [first, pid_n * BLOCK_N], staging)
    else:
        # A thread has 8 columns, 16 bytes.
        across: gl.constexpr = BLOCK_N // 8 if BLOCK_N < 256 else 32
        by_row: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [gl.num_warps(), 1], [1, 0])
        out_rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, by_row))
        out_cols = pid_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, by_row))
        pointers = out + gl.expand_dims(out_rows.to(gl.int64) * N, 1) + gl.expand_dims(out_cols, 0)
        inside = gl.expand_dims(out_rows < end, 1) & gl.expand_dims(out_cols < N, 0)
        gl.store(pointers, place.load(by_row), mask=inside)


@gluon.jit
def _consume(out_map, out, epilogue, tiles, ring, staging, N, K, ctx, BLOCK_SCALED: gl.constexpr):
    gdc_wait()
    sched = tiles.schedule(N, K, ctx)
    num_k = gl.cdiv(K, ctx.block_k)
    BLOCK_M: gl.constexpr = ctx.block_m
    BLOCK_N: gl.constexpr = ctx.block_n
    HALF: gl.constexpr = 64 if BLOCK_M == 128 else BLOCK_M
    step = 0
    start, total, stride = sched.persistent_tile_range()
    for tile_id in range(start, total, stride):
        pid_m, pid_n = sched.get_tile(tile_id)
        group, first, end = tiles.get(pid_m)
        if HALF == BLOCK_M or end - first > HALF:
            _consume_tile(
                out_map, out, epilogue, ring, staging, step, num_k, N, group, first, end, pid_n,
                BLOCK_N, BLOCK_M, BLOCK_SCALED,
            )  # fmt: skip
        else:
            _consume_tile(
                out_map, out, epilogue, ring, staging, step, num_k, N, group, first, end, pid_n,
                BLOCK_N, HALF, BLOCK_SCALED,
            )  # fmt: skip
        step += num_k
    tma.store_wait(0)


@gluon.jit
def _grouped_hopper_kernel(
    A, B, out_map, out, A_scale, B_scale, bias, tiles,
    N, K,
    CONFIG: gl.constexpr, NUM_SMS: gl.constexpr, BLOCK_SCALED: gl.constexpr,
):  # fmt: skip
    """``A``, ``B``, ``out_map``: tensor maps of ``[T, K]``, ``[G * N, K]`` and the output ``[T, N]``, which is ``out``.

    Their blocks: ``PANEL`` columns by a part of ``block_m`` rows; ``PANEL`` columns by ``block_n`` rows; a tile. The
    rest is as in ``_grouped_gemm_kernel``; ``BLOCK_SCALED`` is for fp8 only.
    """
    ring = make_ring(A, B, CONFIG)
    ring.initialize()
    staging = gl.allocate_shared_memory(out_map.dtype, [CONFIG.block_m, CONFIG.block_n], out_map.layout)
    epilogue, table = Epilogue(A_scale, B_scale, bias), GroupTiles(tiles)
    ctx = GemmContext(
        CONFIG.block_m, CONFIG.block_n, CONFIG.block_k, NUM_SMS, 1, CONFIG.group_size_m, quantized=A.dtype.is_int()
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (out_map, out, epilogue, table, ring, staging, N, K, ctx, BLOCK_SCALED)),
            (_produce, (A, B, table, ring, N, K, ctx)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )
