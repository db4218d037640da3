"""``Ring``: a ring buffer of blocks of A and B in shared memory, between producer and consumer warps.

For Hopper (sm_90), in Gluon: TMA fills the slots, ``wgmma`` reads them, and barriers in shared memory count both. Dense
and grouped products share it and decide which blocks are loaded when.
"""

import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from qgemm.kernels.stages.aggregate import aggregate

# Renamed in Triton 3.8.
load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# Renamed in Triton 3.9.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
# Renamed in Triton 3.7.
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

# Up to Triton 3.7, a view of shared memory may extend beyond the memory that it was made from.
LARGER_VIEWS = gl.constexpr(not hasattr(gl.shared_memory_descriptor, "reinterpret"))

PANEL = gl.constexpr(128)  # bytes: the width of TMA's swizzle; of fp8, the number of values that share a scale
MMA_ROWS = gl.constexpr(64)  # the minimum that wgmma multiplies
PRODUCER_REGISTERS = gl.constexpr(40)  # per producer thread


@functools.cache
def block_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The shared-memory layout of a tensor map's blocks."""
    return gl.NVMMASharedLayout.get_default_for(list(block), _ELEMENTS[dtype])


_ELEMENTS = {
    torch.int8: gl.int8,
    torch.uint8: gl.uint8,
    torch.int32: gl.int32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.uint16: gl.uint16,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
}


@aggregate
class Ring:
    """Slots of shared memory, each for a block of A and a block of B, used in turn.

    Step ``i`` uses slot ``i % depth``. Barrier ``full`` completes when a slot's bytes have arrived, ``empty`` when all
    ``consumers`` have read them. A slot keeps each block as ``panels`` panels of ``columns`` columns, ``PANEL`` bytes
    wide, the layout that the tensor cores read.

    Instructions read at least ``MMA_ROWS`` rows of A. If a block has fewer, they read the memory behind it; those
    products aren't stored.

    Sizes must be powers of 2. A block of B whose number of rows is not one is split in two (``widths``): the largest
    power of 2, and the rest, which has its own ``rest_panels`` and accumulator.
    """

    a_panels: gl.shared_memory_descriptor
    b_panels: gl.shared_memory_descriptor
    rest_panels: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    depth: gl.constexpr
    panels: gl.constexpr
    block_m: gl.constexpr
    widths: gl.constexpr
    columns: gl.constexpr
    consumers: gl.constexpr

    @gluon.jit
    def initialize(self):
        """Must be called first."""
        initialize(self.full, self.depth)
        initialize(self.empty, self.depth, self.consumers)

    @gluon.jit
    def claim(self, step):
        """Waits until the step's slot is empty."""
        mbarrier.wait(self.empty.index(step % self.depth), (step // self.depth + 1) & 1)

    @gluon.jit
    def expect(self, step, A, B, PARTS: gl.constexpr, pred):
        """Sets the expected bytes: ``PARTS`` parts of A, each with the rows of its map's block, and all of B."""
        b_parts: gl.constexpr = self.widths[0] // B.block_shape[0] + len(self.widths) - 1
        size: gl.constexpr = self.panels * (PARTS * A.block_type.nbytes + b_parts * B.block_type.nbytes)
        mbarrier.expect(self.full.index(step % self.depth), size, pred=pred)

    @gluon.jit
    def load_a(self, step, A, row, k, parts):
        """Starts loading the first ``parts`` parts of the block at ``(row, k)`` of A.

        The other rows keep their old values, which never reach the output. Filling them would be slow, be it with zeros
        from beyond the edge or with copies of the last row.
        """
        slot = step % self.depth
        PART: gl.constexpr = A.block_shape[0]
        full = self.full.index(slot)
        for i in gl.static_range(self.panels):
            panel = self.a_panels.index(slot * self.panels + i)
            for part in gl.static_range(self.block_m // PART):
                to = panel.slice(part * PART, PART)
                load_block(A, [row + part * PART, k + i * self.columns], full, to, pred=part < parts)

    @gluon.jit
    def load_b(self, step, B, col, k):
        """Starts loading the block at ``(col, k)`` of B."""
        slot = step % self.depth
        PART: gl.constexpr = B.block_shape[0]
        full = self.full.index(slot)
        for i in gl.static_range(self.panels):
            panel = self.b_panels.index(slot * self.panels + i)
            for part in gl.static_range(self.widths[0] // PART):
                load_block(B, [col + part * PART, k + i * self.columns], full, panel.slice(part * PART, PART))
            if len(self.widths) > 1:
                to = self.rest_panels.index(slot * self.panels + i)
                load_block(B, [col + self.widths[0], k + i * self.columns], full, to)

    @gluon.jit
    def reduce(self, step, num_k, accs, ROWS: gl.constexpr, finishes=None):
        """``(sums, step)``: ``acc + a @ b.T`` over ``num_k`` steps for each piece of B, and the next step's number.

        ``ROWS``: the number of rows of A to multiply. ``finishes``: a barrier to arrive at once all blocks have
        arrived.
        """
        accs = self.multiply(step, accs, ROWS)
        for _ in range(1, num_k):
            accs = self.multiply(step + 1, accs, ROWS)
            # The products of one slot stay in flight; all earlier ones have finished reading their slots.
            accs = self.resume(self.settle(accs, 1))
            self.release(step)
            step += 1
        if finishes is not None:
            mbarrier.arrive(finishes, count=1)
        sums = self.settle(accs, 0)
        self.release(step)
        return sums, step + 1

    @gluon.jit
    def multiply(self, step, accs, ROWS: gl.constexpr):
        """Waits for the slot's blocks and starts ``acc += a @ b.T`` for each piece of B."""
        slot = step % self.depth
        mbarrier.wait(self.full.index(slot), step // self.depth & 1)
        for i in gl.static_range(self.panels):
            panel = slot * self.panels + i
            a = self.rows_to_multiply(slot, i, ROWS)
            b = self.b_panels.index(panel).permute((1, 0))
            acc = warpgroup_mma(a, b, accs[0], is_async=True)
            if len(self.widths) == 1:
                accs = (acc,)
            else:
                b = self.rest_panels.index(panel).permute((1, 0))
                accs = (acc, warpgroup_mma(a, b, accs[1], is_async=True))
        return accs

    @gluon.jit
    def rows_to_multiply(self, slot, PART: gl.constexpr, ROWS: gl.constexpr, FIRST: gl.constexpr = 0):
        """``ROWS`` rows of panel ``PART`` of a slot's A, from ``FIRST`` on; reads on behind a panel that has fewer."""
        if self.block_m == ROWS:
            return self.a_panels.index(slot * self.panels + PART)
        elif self.block_m > ROWS:
            return self.a_panels.index(slot * self.panels + PART).slice(FIRST, ROWS)
        elif LARGER_VIEWS:
            a = self.a_panels.index(slot * self.panels + PART)
            return a._reinterpret(a.dtype, [MMA_ROWS, self.columns], a.layout)
        else:
            # A view of ``MMA_ROWS`` rows spans ``MANY`` panels and must be able to begin at any of them. So the ring is
            # cut into such views several times: from its first panel on, from its second, and so on. If a slot has
            # fewer panels than a view, slots take turns among these cuts.
            MANY: gl.constexpr = MMA_ROWS // self.block_m
            TURNS: gl.constexpr = max(MANY // self.panels, 1)
            index = slot // TURNS * max(self.panels // MANY, 1) + PART // MANY
            a = self.a_views_from(PART % MANY).index(index)
            for turn in gl.static_range(1, TURNS):
                if slot % TURNS == turn:
                    a = self.a_views_from(turn * self.panels + PART).index(index)
            return a

    @gluon.jit
    def a_views_from(self, FIRST: gl.constexpr):
        """The panels of A from ``FIRST`` on, as views of ``MMA_ROWS`` rows."""
        MANY: gl.constexpr = MMA_ROWS // self.block_m
        VIEWS: gl.constexpr = (self.depth * self.panels - FIRST + MANY - 1) // MANY
        part = self.a_panels.slice(FIRST, VIEWS * MANY)
        return part.reinterpret(part.dtype, [VIEWS, MMA_ROWS, self.columns], part.layout)

    @gluon.jit
    def settle(self, accs, SLOTS: gl.constexpr):
        """Waits until only products of the last ``SLOTS`` slots are in flight."""
        if len(self.widths) == 1:
            return (warpgroup_mma_wait(SLOTS * self.panels, deps=accs),)
        else:
            return warpgroup_mma_wait(SLOTS * self.panels * 2, deps=accs)

    @gluon.jit
    def resume(self, sums):
        """``sums`` that ``settle`` has waited for, as accumulators of further products."""
        if len(self.widths) == 1:
            return (warpgroup_mma_init(sums[0]),)
        else:
            return (warpgroup_mma_init(sums[0]), warpgroup_mma_init(sums[1]))

    @gluon.jit
    def release(self, step):
        """Marks a slot as read by this consumer."""
        mbarrier.arrive(self.empty.index(step % self.depth), count=1)


@gluon.jit
def make_ring(A, B, CONFIG: gl.constexpr, CONSUMERS: gl.constexpr = 1):
    """A ring for blocks of the tensor maps ``A`` and ``B`` and a ``GemmConfig``. Call ``initialize`` before use.

    ``CONSUMERS``: how many groups of warps read every block.
    """
    BLOCK_M: gl.constexpr = CONFIG.block_m
    WIDTHS: gl.constexpr = CONFIG.widths
    DEPTH: gl.constexpr = CONFIG.num_stages
    panels: gl.constexpr = CONFIG.block_k // PANEL
    # More panels behind the last one of A, for instructions that read on beyond a block.
    more: gl.constexpr = max(MMA_ROWS // BLOCK_M, 1) - 1
    COLUMNS: gl.constexpr = A.block_shape[1]
    a_panels = gl.allocate_shared_memory(A.dtype, [DEPTH * panels + more, BLOCK_M, COLUMNS], A.layout)
    b_panels = gl.allocate_shared_memory(B.dtype, [DEPTH * panels, WIDTHS[0], COLUMNS], B.layout)
    if len(WIDTHS) > 1:
        rest_panels = gl.allocate_shared_memory(B.dtype, [DEPTH * panels, WIDTHS[1], COLUMNS], B.layout)
    else:
        rest_panels = b_panels
    return Ring(
        a_panels, b_panels, rest_panels, barriers(DEPTH), barriers(DEPTH), DEPTH, panels, BLOCK_M, WIDTHS, COLUMNS,
        CONSUMERS,
    )  # fmt: skip


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """Barriers in shared memory. Call ``initialize`` before use."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def load_acquire(pointer):
    """Loads an int32 that other programs change; what they wrote before is visible after. The same in a whole warp."""
    asm: gl.constexpr = "ld.acquire.gpu.global.u32 $0, [$1]; shfl.sync.idx.b32 $0, $0, 0, 31, -1;"
    return gl.inline_asm_elementwise(asm, "=r,l", [pointer.to(gl.uint64)], gl.int32, False, 1)


@gluon.jit
def initialize(barriers, COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """Sets how many arrivals complete each barrier."""
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
