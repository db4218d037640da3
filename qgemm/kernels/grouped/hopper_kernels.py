"""The grouped product for many rows on Hopper: ``hopper_kernels.py``'s ring, producer and consumers, tile by tile of
``GroupTiles``.

To TMA all groups' weights are one matrix ``[G * N, K]``, and a tile's block of it begins at row ``g * N + n``. Its
block of A begins at the tile's first row and may hold rows of the next group, or what the slot held before: rows that
aren't stored, so parts of A without a row of the tile aren't loaded. A tile with 64 rows or fewer in blocks of 128
multiplies half a block.

A full tile is stored by TMA. Others would overwrite the next group's rows, so threads store those, from the same
staging memory, 16 bytes at a time. docs/performance.md: what it reaches, and what was tried.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.gemm.hopper_kernels import (
    PANEL,
    PRODUCER_REGISTERS,
    Ring,
    _barriers,
    _initialize,
    _load_block,
    _store_block,
)
from qgemm.kernels.grouped.kernels import GroupTiles
from qgemm.kernels.stages import GemmContext, ScheduleContext
from qgemm.kernels.stages.aggregate import aggregate


@aggregate
class GroupedProduct:
    """What both kinds of warps know of the product."""

    ring: Ring
    tiles: GroupTiles
    ctx: GemmContext
    N: gl.tensor
    K: gl.tensor

    @gluon.jit
    def schedule(self):
        """The tiles of all groups, numbered. The table must have been written: see ``gdc_wait``."""
        return ScheduleContext(self.tiles.count() * self.ctx.block_m, self.N, self.K, self.ctx)


@gluon.jit
def _fill(ring, step, A, B, row, rows, weight_row, k):
    """Starts loading ``rows`` rows of A from ``row`` on, in parts, and a block of B, once the slot is empty."""
    slot = step % ring.depth
    PART: gl.constexpr = A.block_shape[0]
    PARTS: gl.constexpr = ring.a_panels.shape[1] // PART
    part_bytes: gl.constexpr = ring.panels * A.block_type.nbytes
    b_bytes: gl.constexpr = ring.panels * B.block_type.nbytes
    needed = (rows + PART - 1) // PART
    mbarrier.wait(ring.empty.index(slot), (step // ring.depth + 1) & 1)
    full = ring.full.index(slot)
    for parts in gl.static_range(1, PARTS + 1):
        mbarrier.expect(full, parts * part_bytes + b_bytes, pred=needed == parts)
    for i in gl.static_range(ring.panels):
        a_panel = ring.a_panels.index(slot * ring.panels + i)
        for part in gl.static_range(PARTS):
            _load_block(
                A, [row + part * PART, k + i * PANEL], full, a_panel.slice(part * PART, PART), pred=part < needed
            )
        _load_block(B, [weight_row, k + i * PANEL], full, ring.b_panels.index(slot * ring.panels + i))


@gluon.jit
def _produce(A, B, product):
    # Nothing is read before the kernel ahead in the stream has ended; see Launch.
    gdc_wait()
    sched = product.schedule()
    num_k = gl.cdiv(product.K, sched.ctx.block_k)
    step = 0
    start, total, stride = sched.persistent_tile_range()
    for tile_id in range(start, total, stride):
        pid_m, pid_n = sched.get_tile(tile_id)
        group, first, end = product.tiles.get(pid_m)
        weight_row = group * product.N + pid_n * sched.ctx.block_n
        for k_idx in range(num_k):
            _fill(product.ring, step, A, B, first, end - first, weight_row, k_idx * sched.ctx.block_k)
            step += 1
    # Earlier, programs of the next kernel would crowd onto the multiprocessors that happen to be free.
    gdc_launch_dependents()


@gluon.jit
def _multiply(ring, step, acc, ROWS: gl.constexpr):
    """``Ring.multiply`` of the first ``ROWS`` rows of a slot."""
    slot = step % ring.depth
    mbarrier.wait(ring.full.index(slot), step // ring.depth & 1)
    for i in gl.static_range(ring.panels):
        panel = slot * ring.panels + i
        b = ring.b_panels.index(panel).permute((1, 0))
        acc = warpgroup_mma(ring.a_panels.index(panel).slice(0, ROWS), b, acc, is_async=True)
    return acc


@gluon.jit
def _consume_tile(out_map, out, epilogue, product, staging, step, group, first, end, pid_n, ROWS: gl.constexpr):
    """One tile of the output, of which at most ``ROWS`` rows count."""
    A_scale, B_scale, bias = epilogue
    ring = product.ring
    N = product.N
    BLOCK_N: gl.constexpr = product.ctx.block_n
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 32])
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    cols = pid_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    a_scale = gl.load(A_scale + rows, mask=rows < end, other=0.0)
    b_scale = gl.load(B_scale + group * N + cols, mask=cols < N, other=0.0)

    acc = warpgroup_mma_init(gl.zeros((ROWS, BLOCK_N), gl.int32, layout))
    acc = _multiply(ring, step, acc, ROWS)
    for _ in range(1, gl.cdiv(product.K, product.ctx.block_k)):
        acc = _multiply(ring, step + 1, acc, ROWS)
        # One slot's products stay in flight; those before have read theirs.
        acc = warpgroup_mma_init(warpgroup_mma_wait(ring.panels, deps=(acc,)))
        ring.release(step)
        step += 1
    sums = warpgroup_mma_wait(0, deps=(acc,))
    ring.release(step)

    values = sums.to(gl.float32) * gl.expand_dims(a_scale, 1) * gl.expand_dims(b_scale, 0)
    if bias is not None:
        added = gl.load(bias + group * N + cols, mask=cols < N, other=0.0)
        values = values + gl.expand_dims(added.to(gl.float32), 0)
    # The store of the tile before has read the staging memory.
    tma.store_wait(0)
    place = staging.slice(0, ROWS)
    place.store(values.to(staging.dtype))
    if end - first == product.ctx.block_m:
        fence_async_shared()
        _store_block(out_map, [first, pid_n * BLOCK_N], staging)
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
def _consume(out_map, out, epilogue, product, staging):
    gdc_wait()
    sched = product.schedule()
    num_k = gl.cdiv(product.K, sched.ctx.block_k)
    BLOCK_M: gl.constexpr = sched.ctx.block_m
    step = 0
    start, total, stride = sched.persistent_tile_range()
    for tile_id in range(start, total, stride):
        pid_m, pid_n = sched.get_tile(tile_id)
        group, first, end = product.tiles.get(pid_m)
        if BLOCK_M == 128:
            if end - first > 64:
                _consume_tile(out_map, out, epilogue, product, staging, step, group, first, end, pid_n, 128)
            else:
                _consume_tile(out_map, out, epilogue, product, staging, step, group, first, end, pid_n, 64)
        else:
            _consume_tile(out_map, out, epilogue, product, staging, step, group, first, end, pid_n, BLOCK_M)
        step += num_k
    tma.store_wait(0)


@gluon.jit
def _grouped_hopper_kernel(
    A, B, out_map, out, A_scale, B_scale, bias, tiles,
    N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_SIZE_M: gl.constexpr, NUM_SMS: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """``A``, ``B``, ``out_map``: tensor maps of ``[T, K]``, ``[G * N, K]`` and the output ``[T, N]``, which is ``out``.

    Their blocks: ``PANEL`` columns and a part of ``BLOCK_M`` rows; ``PANEL`` columns and ``BLOCK_N`` rows; a tile. The
    rest is as for ``_grouped_gemm_kernel``.
    """
    panels: gl.constexpr = BLOCK_K // PANEL
    a_panels = gl.allocate_shared_memory(A.dtype, [NUM_STAGES * panels, BLOCK_M, PANEL], A.layout)
    b_panels = gl.allocate_shared_memory(B.dtype, [NUM_STAGES * panels, BLOCK_N, PANEL], B.layout)
    full, empty = _barriers(NUM_STAGES), _barriers(NUM_STAGES)
    _initialize(full, NUM_STAGES)
    _initialize(empty, NUM_STAGES)
    ring = Ring(a_panels, b_panels, b_panels, full, empty, NUM_STAGES, panels, 1, BLOCK_M, (BLOCK_N,))
    staging = gl.allocate_shared_memory(out_map.dtype, [BLOCK_M, BLOCK_N], out_map.layout)
    ctx = GemmContext(BLOCK_M, BLOCK_N, BLOCK_K, NUM_SMS, 1, GROUP_SIZE_M, quantized=True)
    product = GroupedProduct(ring, GroupTiles(tiles), ctx, N, K)
    gl.warp_specialize(
        [
            (_consume, (out_map, out, (A_scale, B_scale, bias), product, staging)),
            (_produce, (A, B, product)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )
