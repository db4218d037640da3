"""The int8 GEMM for Hopper (sm_90): ``C = A @ B.T``, scaled, with the rounding of the other kernels.

``C[m, n] = sum over k of A[m, k] * B[n, k]``, times ``A_scale[m]`` and ``B_scale[n]``, plus ``bias[n]``. Operands are
``[M, K]`` and ``[N, K]`` with K contiguous, addresses and row strides multiples of 16 bytes. TMA fills what lies beyond
the edges with zeros and stores nothing there, so there is no mask.

Programs are persistent. One producer warp has TMA load blocks of A and B into a ring of shared memory; four or eight
consumer warps wait for a block, multiply it with ``wgmma`` and release its slot. Then they scale the sums and have TMA
store them, while the producer loads for the next tile. docs/performance.md: what it reaches, why, and what was tried.
"""

import functools
from typing import Any

import torch
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

from qgemm.kernels.quantize.hopper_kernels import _await_rows, _forget_rows, _quantize_own
from qgemm.kernels.stages import GemmContext, ScheduleContext
from qgemm.kernels.stages.aggregate import aggregate

# Renamed in Triton 3.8.
_load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# Up to Triton 3.7 a view of shared memory may be larger than what it is a view of.
LARGER_VIEWS = gl.constexpr(not hasattr(gl.shared_memory_descriptor, "reinterpret"))

PANEL = gl.constexpr(128)  # bytes: as wide as the copy engine swizzles
MMA_ROWS = gl.constexpr(64)  # the fewest that wgmma multiplies
TURNING_ROWS = gl.constexpr(256)  # of tiles that go through K forwards and backwards in turn
PRODUCER_REGISTERS = gl.constexpr(40)  # a thread
QUANTIZING_REGISTERS = gl.constexpr(64)  # of one that may have to quantize
MORE_QUANTIZING_REGISTERS = gl.constexpr(80)  # beside eight warps, where the assembler keeps more for it


@functools.cache
def block_layout(rows: int, cols: int, dtype: torch.dtype) -> Any:
    """How blocks of a tensor map for this kernel lie in shared memory."""
    element = {torch.int8: gl.int8, torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, cols], element)


@aggregate
class Ring:
    """Slots of shared memory, each for a block of A and one of B, used round and round.

    Step ``i`` uses slot ``i % depth``. Barrier ``full`` completes when a slot's bytes have arrived, ``empty`` when a
    consumer has read them. A slot has its blocks in ``panels`` of ``PANEL`` columns, as the tensor cores read them.

    Instructions read ``MMA_ROWS`` rows of A at least. Where a block has fewer, they read on in what follows; what they
    multiply there isn't stored.

    Sizes are powers of 2 here, so B's block of another number of rows is in two pieces (``widths``), the largest power
    of 2 and the rest, which has ``rest_panels`` and sums of its own.
    """

    a_panels: gl.shared_memory_descriptor
    b_panels: gl.shared_memory_descriptor
    rest_panels: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    depth: gl.constexpr
    panels: gl.constexpr
    last_parts: gl.constexpr
    block_m: gl.constexpr
    widths: gl.constexpr

    @gluon.jit
    def fill_b(self, step, A, B, row, col, k):
        """Waits until the slot is empty, then starts loading the block at ``(col, k)`` of B."""
        slot = step % self.depth
        PARTS: gl.constexpr = self.block_m // A.block_shape[0]
        ends = row + self.block_m > A.shape[0]
        mbarrier.wait(self.empty.index(slot), (step // self.depth + 1) & 1)
        full = self.full.index(slot)
        B_PART: gl.constexpr = B.block_shape[0]
        B_PARTS: gl.constexpr = self.widths[0] // B_PART
        part_bytes: gl.constexpr = self.panels * A.block_type.nbytes
        b_bytes: gl.constexpr = self.panels * (B_PARTS + len(self.widths) - 1) * B.block_type.nbytes
        mbarrier.expect(full, PARTS * part_bytes + b_bytes, pred=not ends)
        mbarrier.expect(full, self.last_parts * part_bytes + b_bytes, pred=ends)
        for i in gl.static_range(self.panels):
            panel = self.b_panels.index(slot * self.panels + i)
            for part in gl.static_range(B_PARTS):
                _load_block(B, [col + part * B_PART, k + i * PANEL], full, panel.slice(part * B_PART, B_PART))
            if len(self.widths) > 1:
                to = self.rest_panels.index(slot * self.panels + i)
                _load_block(B, [col + self.widths[0], k + i * PANEL], full, to)

    @gluon.jit
    def fill_a(self, step, A, row, k):
        """Starts loading the block at ``(row, k)`` of A, after ``fill_b``.

        It comes in parts of the rows that A's map has. Where A ends within the block, ``last_parts`` of them are loaded
        and the other rows hold whatever they held, which isn't stored. Loading there what isn't needed is slow: zeros
        from beyond the edge as much as the same last rows over and over.
        """
        slot = step % self.depth
        PART: gl.constexpr = A.block_shape[0]
        ends = row + self.block_m > A.shape[0]
        full = self.full.index(slot)
        for i in gl.static_range(self.panels):
            panel = self.a_panels.index(slot * self.panels + i)
            for part in gl.static_range(self.block_m // PART):
                needed = (part < self.last_parts) | (not ends)
                _load_block(A, [row + part * PART, k + i * PANEL], full, panel.slice(part * PART, PART), pred=needed)

    @gluon.jit
    def rows_to_multiply(self, slot, PART: gl.constexpr):
        """A slot's panel ``PART`` of A, as many rows as instructions read."""
        if self.block_m >= MMA_ROWS:
            return self.a_panels.index(slot * self.panels + PART)
        elif LARGER_VIEWS:
            a = self.a_panels.index(slot * self.panels + PART)
            return a._reinterpret(a.dtype, [MMA_ROWS, PANEL], a.layout)
        else:
            # A view of so many panels begins at any of them: as the ring is cut into such views, beginning with its
            # first panel, its second, and so on. Slots of fewer panels begin in turn with each of several.
            MANY: gl.constexpr = MMA_ROWS // self.block_m
            TURNS: gl.constexpr = max(MANY // self.panels, 1)
            slot = slot.to(gl.uint32)  # so that division is a shift
            index = (slot // TURNS * max(self.panels // MANY, 1) + PART // MANY).to(gl.int32)
            a = self.a_views_from(PART % MANY).index(index)
            for turn in gl.static_range(1, TURNS):
                if slot % TURNS == turn:
                    a = self.a_views_from(turn * self.panels + PART).index(index)
            return a

    @gluon.jit
    def a_views_from(self, FIRST: gl.constexpr):
        """A's panels from ``FIRST`` on, cut into views of ``MMA_ROWS`` rows."""
        MANY: gl.constexpr = MMA_ROWS // self.block_m
        VIEWS: gl.constexpr = (self.depth * self.panels - FIRST + MANY - 1) // MANY
        part = self.a_panels.slice(FIRST, VIEWS * MANY)
        return part.reinterpret(part.dtype, [VIEWS, MMA_ROWS, PANEL], part.layout)

    @gluon.jit
    def multiply(self, step, accs):
        """Starts ``acc += a @ b.T`` of the slot's blocks, once they have arrived: for each piece of B its ``acc``."""
        slot = step % self.depth
        mbarrier.wait(self.full.index(slot), step // self.depth & 1)
        for i in gl.static_range(self.panels):
            panel = slot * self.panels + i
            a = self.rows_to_multiply(slot, i)
            b = self.b_panels.index(panel).permute((1, 0))
            acc = warpgroup_mma(a, b, accs[0], is_async=True)
            if len(self.widths) == 1:
                accs = (acc,)
            else:
                b = self.rest_panels.index(panel).permute((1, 0))
                accs = (acc, warpgroup_mma(a, b, accs[1], is_async=True))
        return accs

    @gluon.jit
    def settle(self, accs, SLOTS: gl.constexpr):
        """Waits until no more than the last ``SLOTS`` slots' products are in flight."""
        if len(self.widths) == 1:
            return (warpgroup_mma_wait(SLOTS * self.panels, deps=accs),)
        else:
            return warpgroup_mma_wait(SLOTS * self.panels * 2, deps=accs)

    @gluon.jit
    def resume(self, sums):
        """What ``settle`` has waited for, to go on with."""
        if len(self.widths) == 1:
            return (warpgroup_mma_init(sums[0]),)
        else:
            return (warpgroup_mma_init(sums[0]), warpgroup_mma_init(sums[1]))

    @gluon.jit
    def release(self, step):
        """Hands a slot back that has been read."""
        mbarrier.arrive(self.empty.index(step % self.depth), count=1)


@gluon.jit
def _barriers(count: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())


@gluon.jit
def _initialize(barriers, COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)


@gluon.jit
def _produce(
    A, B, row_scale, ring, sched, num_k, quantization, ready,
    ROW: gl.constexpr, CONSTANT_B: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    QUANTIZES: gl.constexpr = len(ROW) > 0
    # Not in layers of one launch: they are small, and the producer has no register left for it.
    TURNS: gl.constexpr = sched.ctx.block_m == TURNING_ROWS and not QUANTIZES
    BLOCK_K: gl.constexpr = sched.ctx.block_k
    start, total, stride = sched.persistent_tile_range()
    tile = sched.get_tile_from_idx(start)
    row, col = tile.pid_m * tile.block_m, tile.pid_n * tile.block_n
    if NEXT_EARLY:
        gdc_launch_dependents()
    # By one warp: several would meet after each.
    _initialize(ring.full, ring.depth)
    _initialize(ring.empty, ring.depth)
    if not QUANTIZES:
        mbarrier.arrive(ready, count=1)
    ahead = 0
    if CONSTANT_B:
        ahead = gl.minimum(num_k, ring.depth)
        for k_idx in range(ahead):
            ring.fill_b(k_idx, A, B, row, col, k_idx * BLOCK_K)
    # Nothing else is read before the kernel ahead in the stream has ended; see Launch.
    gdc_wait()
    if QUANTIZES:
        _await_rows(quantization, row_scale, sched.M, sched.K, ready, ROW)
    if CONSTANT_B:
        for k_idx in range(ahead):
            ring.fill_a(k_idx, A, row, k_idx * BLOCK_K)

    step = ahead
    backwards = False
    for tile_id in range(start, total, stride):
        tile = sched.get_tile_from_idx(tile_id)
        row, col = tile.pid_m * tile.block_m, tile.pid_n * tile.block_n
        for k_idx in range(gl.where(tile_id == start, ahead, 0), num_k):
            # A tile that follows starts where the one before has ended: the cache still has what others loaded there.
            k = gl.where(backwards, num_k - 1 - k_idx, k_idx) * BLOCK_K
            ring.fill_b(step, A, B, row, col, k)
            ring.fill_a(step, A, row, k)
            step += 1
        if TURNS:
            backwards = not backwards
    if not NEXT_EARLY:
        # Earlier, programs of the next kernel would crowd onto the multiprocessors that happen to be free.
        gdc_launch_dependents()
    if QUANTIZES:
        _forget_rows(quantization, ready)


@gluon.jit
def _store(C, staging, row, col, out, ROWS: gl.constexpr):
    """Has the copy engine store the first ``ROWS`` rows of ``out`` at ``(row, col)``."""
    # The store before has read the staging memory.
    tma.store_wait(0)
    staging.store(out)
    fence_async_shared()
    _store_block(C, [row, col], staging.slice(0, ROWS))


@gluon.jit
def _store_pieces(C, staging, row, col, out, ROWS: gl.constexpr):
    """As ``_store``, by as many columns at a time as ``staging`` has."""
    if out.shape[1] == staging.shape[1]:
        _store(C, staging, row, col, out, ROWS)
    else:
        HALF: gl.constexpr = out.shape[1] // 2
        halves = out.reshape([out.shape[0], 2, HALF]).permute(0, 2, 1).split()
        for i in gl.static_range(2):
            _store_pieces(C, staging, row, col + i * HALF, halves[i], ROWS)


@gluon.jit
def _load_scales(epilogue, sched, rows, cols):
    A_scale, B_scale, _, stride_a_scale, stride_b_scale, _ = epilogue
    a_scale = gl.load(A_scale + rows * stride_a_scale, mask=rows < sched.M, other=0.0)
    b_scale = gl.load(B_scale + cols * stride_b_scale, mask=cols < sched.N, other=0.0)
    return a_scale, b_scale


@gluon.jit
def _apply_epilogue(sums, scales, epilogue, sched, cols):
    a_scale, b_scale = scales
    _, _, bias, _, _, stride_bias = epilogue
    out = sums.to(gl.float32) * gl.expand_dims(a_scale, 1) * gl.expand_dims(b_scale, 0)
    if bias is not None:
        values = gl.load(bias + cols * stride_bias, mask=cols < sched.N, other=0.0)
        out = out + gl.expand_dims(values.to(gl.float32), 0)
    return out


@gluon.jit
def _consume(C, epilogue, ring, staging, sched, num_k, quantization, ready, ROW: gl.constexpr):
    gdc_wait()
    if len(ROW) > 0:
        _quantize_own(quantization, epilogue[0], sched.M, sched.K, ready, ROW)
    mbarrier.wait(ready, 0)
    BLOCK_M: gl.constexpr = sched.ctx.block_m
    BLOCK_N: gl.constexpr = sched.ctx.block_n
    ROWS: gl.constexpr = staging.shape[0]
    MAIN: gl.constexpr = ring.widths[0]
    REST: gl.constexpr = ring.widths[-1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, MAIN, 32])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, REST, 32])

    start, total, stride = sched.persistent_tile_range()
    step = 0
    for tile_id in range(start, total, stride):
        tile = sched.get_tile_from_idx(tile_id)
        row, col = tile.pid_m * BLOCK_M, tile.pid_n * BLOCK_N
        cols = col + gl.arange(0, MAIN, gl.SliceLayout(0, layout))
        scales = _load_scales(epilogue, sched, row + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), cols)
        accs = (warpgroup_mma_init(gl.zeros((ROWS, MAIN), gl.int32, layout)),)
        if MAIN < BLOCK_N:
            rest_cols = col + MAIN + gl.arange(0, REST, gl.SliceLayout(0, rest_layout))
            rest_rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, rest_layout))
            rest_scales = _load_scales(epilogue, sched, rest_rows, rest_cols)
            accs = accs + (warpgroup_mma_init(gl.zeros((ROWS, REST), gl.int32, rest_layout)),)

        accs = ring.multiply(step, accs)
        for _ in range(1, num_k):
            accs = ring.multiply(step + 1, accs)
            # One slot's products stay in flight; those before have read theirs.
            accs = ring.resume(ring.settle(accs, 1))
            ring.release(step)
            step += 1
        sums = ring.settle(accs, 0)
        ring.release(step)
        step += 1

        out = _apply_epilogue(sums[0], scales, epilogue, sched, cols)
        _store_pieces(C, staging, row, col, out.to(C.dtype), BLOCK_M)
        if MAIN < BLOCK_N:
            out = _apply_epilogue(sums[1], rest_scales, epilogue, sched, rest_cols)
            _store_pieces(C, staging, row, col + MAIN, out.to(C.dtype), BLOCK_M)
    tma.store_wait(0)


@gluon.jit
def _run(
    A, B, C, A_scale, B_scale, bias, quantization,
    M, N, K,
    stride_a_scale, stride_b_scale, stride_bias,
    ROW: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, WIDTHS: gl.constexpr,
    GROUP_SIZE_M: gl.constexpr, GROUP_SIZE_N: gl.constexpr,
    NUM_SMS: gl.constexpr, NUM_STAGES: gl.constexpr, LAST_PARTS: gl.constexpr,
    CONSTANT_B: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    """``quantization``, ``ROW``: of ``_quantize_own``; empty if A holds the quantized rows already."""
    ctx = GemmContext(BLOCK_M, BLOCK_N, BLOCK_K, NUM_SMS, 1, GROUP_SIZE_M, quantized=True, group_size_n=GROUP_SIZE_N)
    sched = ScheduleContext(M, N, K, ctx)
    num_k = gl.cdiv(K, BLOCK_K)

    panels: gl.constexpr = BLOCK_K // PANEL
    ROWS: gl.constexpr = max(BLOCK_M, MMA_ROWS)
    # Some more of A's, to read on in.
    a_panels = gl.allocate_shared_memory(A.dtype, [NUM_STAGES * panels + ROWS // BLOCK_M - 1, BLOCK_M, PANEL], A.layout)
    b_panels = gl.allocate_shared_memory(B.dtype, [NUM_STAGES * panels, WIDTHS[0], PANEL], B.layout)
    if len(WIDTHS) > 1:
        rest_panels = gl.allocate_shared_memory(B.dtype, [NUM_STAGES * panels, WIDTHS[1], PANEL], B.layout)
    else:
        rest_panels = b_panels
    full, empty = _barriers(NUM_STAGES), _barriers(NUM_STAGES)
    # Completes when the ring's are initialized and all rows of A quantized.
    ready = _barriers(1)
    _initialize(ready, 1, 2 if len(ROW) > 0 else 1)
    ring = Ring(a_panels, b_panels, rest_panels, full, empty, NUM_STAGES, panels, LAST_PARTS, BLOCK_M, WIDTHS)
    staging = gl.allocate_shared_memory(C.dtype, [ROWS, C.block_shape[1]], C.layout)
    epilogue = (A_scale, B_scale, bias, stride_a_scale, stride_b_scale, stride_bias)
    if len(ROW) == 0:
        REGISTERS: gl.constexpr = PRODUCER_REGISTERS
    else:
        REGISTERS: gl.constexpr = QUANTIZING_REGISTERS if gl.num_warps() == 4 else MORE_QUANTIZING_REGISTERS
    gl.warp_specialize(
        [
            (_consume, (C, epilogue, ring, staging, sched, num_k, quantization, ready.index(0), ROW)),
            (_produce, (A, B, A_scale, ring, sched, num_k, quantization, ready.index(0), ROW, CONSTANT_B, NEXT_EARLY)),
        ],
        [1],
        [REGISTERS],
    )


@gluon.jit(do_not_specialize=["M"])
def _gemm_hopper_kernel(
    A, B, C, A_scale, B_scale, bias,
    M, N, K,
    stride_a_scale, stride_b_scale, stride_bias,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, WIDTHS: gl.constexpr,
    GROUP_SIZE_M: gl.constexpr, GROUP_SIZE_N: gl.constexpr,
    NUM_SMS: gl.constexpr, NUM_STAGES: gl.constexpr, LAST_PARTS: gl.constexpr,
    CONSTANT_B: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    """``A``, ``B``, ``C``: tensor maps of ``[M, K]``, ``[N, K]`` and ``[M, N]``.

    Their blocks: ``PANEL`` columns and a part of ``BLOCK_M`` rows; ``PANEL`` columns and as many rows as the last of
    ``WIDTHS``, which make ``BLOCK_N``; a tile, or some of its columns.
    ``LAST_PARTS``: parts with rows of A in the last row of tiles. ``CONSTANT_B``: no kernel that may still run writes
    B, so loading it needn't wait. ``NEXT_EARLY``: let the next kernel start once all of this one's programs have, not
    only when they have loaded all.
    """
    _run(
        A, B, C, A_scale, B_scale, bias, (), M, N, K, stride_a_scale, stride_b_scale, stride_bias, (),
        BLOCK_M, BLOCK_N, BLOCK_K, WIDTHS, GROUP_SIZE_M, GROUP_SIZE_N, NUM_SMS, NUM_STAGES, LAST_PARTS,
        CONSTANT_B, NEXT_EARLY,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M"])
def _quant_linear_hopper_kernel(
    x, q, q_scale, x_scale, B, C, b_scale, bias, A, counts,
    M, N, K,
    stride_xm, stride_xk, stride_b_scale, stride_bias,
    ROW: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, WIDTHS: gl.constexpr,
    GROUP_SIZE_M: gl.constexpr, GROUP_SIZE_N: gl.constexpr,
    NUM_SMS: gl.constexpr, NUM_STAGES: gl.constexpr, LAST_PARTS: gl.constexpr,
    NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    """A quantized linear layer in one launch: the programs quantize the rows of ``x`` together, then compute tiles.

    ``x``: ``[M, K]``. ``q``, ``q_scale``: where its quantized rows go, ``[M, K]`` and ``[M]``, contiguous. ``A``: the
    tensor map of ``q``. ``x_scale``, ``counts``, ``ROW``: see ``_quantize_own``. B is constant; the rest is as in
    ``_gemm_hopper_kernel``.
    """
    _run(
        A, B, C, q_scale, b_scale, bias, (x, q, x_scale, counts, stride_xm, stride_xk),
        M, N, K, 1, stride_b_scale, stride_bias, ROW,
        BLOCK_M, BLOCK_N, BLOCK_K, WIDTHS, GROUP_SIZE_M, GROUP_SIZE_N, NUM_SMS, NUM_STAGES, LAST_PARTS,
        True, NEXT_EARLY,
    )  # fmt: skip
