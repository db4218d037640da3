"""``Ring``: a circular buffer of blocks of A and B in shared memory, between the loading and the multiplying warps.

For Hopper (sm_90), in Gluon: TMA loads, ``wgmma`` reads, and barriers in shared memory count both. Dense and grouped
products share it: they decide which blocks are loaded when.
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

# Up to Triton 3.7 a view of shared memory may be larger than what it is a view of.
LARGER_VIEWS = gl.constexpr(not hasattr(gl.shared_memory_descriptor, "reinterpret"))

PANEL = gl.constexpr(128)  # bytes: as wide as TMA swizzles; of fp8, as many values as share a scale
MMA_ROWS = gl.constexpr(64)  # the fewest that wgmma multiplies
PRODUCER_REGISTERS = gl.constexpr(40)  # a thread


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

    Step ``i`` uses slot ``i % depth``. Barrier ``full`` completes when a slot's bytes have arrived, ``empty`` when a
    consumer has read them; ``consumers``, if there are several. A slot has its blocks in ``panels`` of ``columns``
    columns, which are ``PANEL`` bytes, as the tensor cores read them.

    Instructions read at least ``MMA_ROWS`` rows of A. If a block has fewer, they read beyond it; those products aren't
    stored.

    Sizes must be powers of 2, so a block of B with another number of rows is split in two (``widths``): the largest
    power of 2, and the rest, with its own ``rest_panels`` and accumulator.
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

        The other rows keep their old values, which never reach the output. Filling them is slow, with zeros from beyond
        the edge as well as with copies of the last row.
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
        """``(sums, step)``: ``acc + a @ b.T`` over ``num_k`` steps for each piece of B, and the next step.

        ``ROWS``: the number of rows of A to multiply. ``finishes``: a barrier to arrive at once all blocks are there.
        """
        accs = self.multiply(step, accs, ROWS)
        for _ in range(1, num_k):
            accs = self.multiply(step + 1, accs, ROWS)
            # One slot's products stay in flight; those before have read theirs.
            accs = self.resume(self.settle(accs, 1))
            self.release(step)
            step += 1
        if finishes is not None:
            mbarrier.arrive(finishes, count=1)
        sums = self.settle(accs, 0)
        self.release(step)
        return sums, step + 1

    @gluon.jit
    def reduce_promoted(self, step, num_k, sums, FIRST: gl.constexpr, scales):
        """As ``reduce``, of fp8, whose sums the tensor cores keep to 14 bits: sums of two panels are added in float32.

        ``sums``: for each ``MMA_ROWS`` rows of A from ``FIRST`` on, for each piece of B. ``scales``: what sums of one
        panel are multiplied by first, of ``BlockScales``; or None.
        """
        if scales is not None and len(self.widths) > 1:
            sums, step = self._reduce_pieces(step, num_k, sums, FIRST, scales)
        elif scales is not None and self.panels == 1 and len(sums) == 2:
            sums, step = self._reduce_parts(step, num_k, sums, FIRST, scales)
        elif scales is not None and self.panels == 1 and len(sums) == 1:
            sums, step = self._reduce_ahead(step, num_k, sums[0], FIRST, scales)
        else:
            sums, step = self._reduce_in_turn(step, num_k, sums, FIRST, scales)
        return sums, step

    @gluon.jit
    def _reduce_ahead(self, step, num_k, total, FIRST: gl.constexpr, scales):
        """As ``reduce_promoted``, for slots of a panel: its sums are added while the next one's products are computed.

        Both have registers of their own: two slots a turn. What is in them before doesn't matter, but were any written
        while products are computed, the assembler would have each product wait for the one before.
        """
        free = self._zeros((total,))[0]
        ahead = self._start(step, self._zeros((total,))[0], FIRST)
        # They take long, so those of a slot are loaded as soon as its products have begun.
        factors = scales.load(0, 1)
        for i in range((num_k - 1) // 2):
            other = self._start(step + 1, free, FIRST)
            others = scales.load(2 * i + 1, 1)
            done, other = warpgroup_mma_wait(1, deps=(ahead, other))
            self.release(step)
            total = _add_scaled(total, done, factors[1] * factors[0])
            ahead = self._start(step + 2, warpgroup_mma_init(done), FIRST)
            factors = scales.load(2 * i + 2, 1)
            done, ahead = warpgroup_mma_wait(1, deps=(warpgroup_mma_init(other), ahead))
            ahead = warpgroup_mma_init(ahead)
            self.release(step + 1)
            total = _add_scaled(total, done, others[1] * others[0])
            free = warpgroup_mma_init(done)
            step += 2
        if num_k % 2 == 0:
            other = self._start(step + 1, free, FIRST)
            others = scales.load(num_k - 1, 1)
            done, other = warpgroup_mma_wait(1, deps=(ahead, other))
            self.release(step)
            total = _add_scaled(total, done, factors[1] * factors[0])
            total = _add_scaled(total, warpgroup_mma_wait(0, deps=(warpgroup_mma_init(other),)), others[1] * others[0])
            step += 1
        else:
            total = _add_scaled(total, warpgroup_mma_wait(0, deps=(ahead,)), factors[1] * factors[0])
        self.release(step)
        return (total,), step + 1

    @gluon.jit
    def _reduce_pieces(self, step, num_k, sums, FIRST: gl.constexpr, scales):
        """As ``_reduce_ahead``, for two pieces of B: a piece's sums are added while the other one's are computed.

        The halves of the first piece may be in different blocks of columns, so there are ``sums`` of each.
        """
        gl.static_assert(self.panels == 1 and len(sums) == 2 and self.widths[0] == 2 * self.widths[1])
        LAYOUT: gl.constexpr = sums[1].type.layout
        left, right = _halves(sums[0], LAYOUT)
        rest = sums[1]
        main, free = self._zeros(sums)
        main = self._start(step, main, FIRST)
        factors = scales.load(0, 1)
        for i in range(1, num_k):
            other = self._start_rest(step, free, FIRST)
            done, other = warpgroup_mma_wait(1, deps=(main, other))
            each = scales.of_halves(factors)
            left, right = _add_halves(left, right, done, each)
            main = self._start(step + 1, warpgroup_mma_init(done), FIRST)
            factors = scales.load(i, 1)
            done, main = warpgroup_mma_wait(1, deps=(warpgroup_mma_init(other), main))
            main = warpgroup_mma_init(main)
            self.release(step)
            rest = _add_scaled(rest, done, each[2])
            free = warpgroup_mma_init(done)
            step += 1
        # Always, which the compiler doesn't know: products that start right behind the loop, ahead of the additions of
        # others that it has started, would have the assembler make each product wait for the one before.
        if step >= 0:
            other = self._start_rest(step, free, FIRST)
            done, other = warpgroup_mma_wait(1, deps=(main, other))
            each = scales.of_halves(factors)
            left, right = _add_halves(left, right, done, each)
            rest = _add_scaled(rest, warpgroup_mma_wait(0, deps=(warpgroup_mma_init(other),)), each[2])
        else:
            warpgroup_mma_wait(0, deps=(main,))
        self.release(step)
        whole = gl.join(left, right).permute(0, 2, 1).reshape(sums[0].shape)
        WHOLE: gl.constexpr = sums[0].type.layout
        return (gl.convert_layout(whole, WHOLE, assert_trivial=True), rest), step + 1

    @gluon.jit
    def _reduce_parts(self, step, num_k, sums, FIRST: gl.constexpr, scales):
        """As ``reduce_promoted``, for two parts of rows in turn: their sums leave registers for one part's products."""
        top, bottom = sums
        part = self._zeros(sums)[0]
        for i in range(num_k):
            part = self._start(step, part, FIRST)
            factors = scales.load(i, 1)
            part = warpgroup_mma_wait(0, deps=(part,))
            top = _add_scaled(top, part, factors[1] * factors[0])
            part = self._multiply_panel(step % self.depth, 0, (warpgroup_mma_init(part),), FIRST + MMA_ROWS, False)[0]
            part = warpgroup_mma_wait(0, deps=(part,))
            self.release(step)
            bottom = _add_scaled(bottom, part, factors[2] * factors[0])
            part = warpgroup_mma_init(part)
            step += 1
        return (top, bottom), step

    @gluon.jit
    def _start(self, step, sums, FIRST: gl.constexpr):
        """Waits for a slot and starts its products of B's first piece, whose sums take the place of ``sums``."""
        slot = step % self.depth
        mbarrier.wait(self.full.index(slot), step // self.depth & 1)
        a = self.rows_to_multiply(slot, 0, MMA_ROWS, FIRST)
        return warpgroup_mma(a, self.b_panels.index(slot).permute((1, 0)), sums, use_acc=False, is_async=True)

    @gluon.jit
    def _start_rest(self, step, sums, FIRST: gl.constexpr):
        """As ``_start``, of the second piece of a slot that was waited for."""
        slot = step % self.depth
        a = self.rows_to_multiply(slot, 0, MMA_ROWS, FIRST)
        return warpgroup_mma(a, self.rest_panels.index(slot).permute((1, 0)), sums, use_acc=False, is_async=True)

    @gluon.jit
    def _reduce_in_turn(self, step, num_k, sums, FIRST: gl.constexpr, scales):
        """As ``reduce_promoted``: nothing is multiplied while sums are added, but what another group does."""
        # Two slots at a time, if two panels' sums are one, and a slot has one.
        SLOTS: gl.constexpr = 2 if self.panels == 1 and scales is None else 1
        COUNT: gl.constexpr = SLOTS * self.panels
        turns = num_k // SLOTS
        if scales is None:
            for _ in range(turns):
                sums = self._add_slots(step, SLOTS, sums, FIRST, ())
                step += SLOTS
            factors = ()
        else:
            # They take long: those of a turn are loaded a turn ahead, into registers that the one between doesn't use.
            factors = scales.load(0, COUNT)
            for i in range(turns // 2):
                others = scales.load((2 * i + 1) * COUNT, COUNT)
                sums = self._add_slots(step, SLOTS, sums, FIRST, factors)
                factors = scales.load((2 * i + 2) * COUNT, COUNT)
                sums = self._add_slots(step + SLOTS, SLOTS, sums, FIRST, others)
                step += 2 * SLOTS
            for _ in range(turns % 2):
                sums = self._add_slots(step, SLOTS, sums, FIRST, factors)
                factors = scales.load(turns * COUNT, COUNT)
                step += SLOTS
        if SLOTS > 1:
            for _ in range(num_k % SLOTS):
                sums = self._add_slots(step, 1, sums, FIRST, factors)
                step += 1
        return sums, step

    @gluon.jit
    def _add_slots(self, step, SLOTS: gl.constexpr, sums, FIRST: gl.constexpr, factors):
        """``sums``, each plus the sums over the panels of so many slots: by twos if they aren't scaled, else by ones.

        ``factors``: of each panel, as ``BlockScales`` loads them; none where they aren't scaled.
        """
        PIECES: gl.constexpr = len(self.widths)
        COUNT: gl.constexpr = len(sums) // PIECES
        PANELS: gl.constexpr = SLOTS * self.panels
        SCALED: gl.constexpr = len(factors) > 0
        CHAIN: gl.constexpr = 1 if SCALED or PANELS == 1 else 2
        CHAINS: gl.constexpr = PANELS // CHAIN
        out = ()
        for i in gl.static_range(COUNT):
            parts = ()
            for chain in gl.static_range(CHAINS):
                own = self._zeros(sums)
                for link in gl.static_range(CHAIN):
                    panel = chain * CHAIN + link
                    number = step + panel // self.panels
                    slot = number % self.depth
                    if i == 0 and panel % self.panels == 0:
                        mbarrier.wait(self.full.index(slot), number // self.depth & 1)
                    # A constant, which ``panel`` isn't: no variable is.
                    own = self._multiply_panel(
                        slot, (chain * CHAIN + link) % self.panels, own, FIRST + i * MMA_ROWS, link > 0
                    )
                parts = parts + own
            total = ()
            for piece in gl.static_range(PIECES):
                total = total + (sums[i * PIECES + piece],)
            for chain in gl.static_range(CHAINS):
                parts = _settle((CHAINS - 1 - chain) * CHAIN * PIECES, parts)
                if i == COUNT - 1:
                    for link in gl.static_range(CHAIN):
                        panel = chain * CHAIN + link
                        if panel % self.panels == self.panels - 1:
                            self.release(step + panel // self.panels)
                added = ()
                for piece in gl.static_range(PIECES):
                    part = parts[chain * PIECES + piece]
                    if SCALED:
                        rows, columns = factors[chain * (COUNT + 1) + i + 1], factors[chain * (COUNT + 1)]
                        factor = gl.expand_dims(rows * columns, 1)
                        added = added + (gl.fma(part, factor.broadcast_to(part.shape), total[piece]),)
                    else:
                        added = added + (total[piece] + part,)
                total = added
                if chain < CHAINS - 1:
                    parts = _resume(parts)
            out = out + total
        return out

    @gluon.jit
    def _zeros(self, sums):
        """For sums of ``MMA_ROWS`` rows, a tensor for each piece of B, whose values don't matter."""
        LAYOUT: gl.constexpr = sums[0].type.layout
        MAIN: gl.constexpr = self.widths[0]
        out = (warpgroup_mma_init(gl.zeros((MMA_ROWS, MAIN), gl.float32, LAYOUT)),)
        if len(self.widths) > 1:
            REST_LAYOUT: gl.constexpr = sums[1].type.layout
            REST: gl.constexpr = self.widths[1]
            out = out + (warpgroup_mma_init(gl.zeros((MMA_ROWS, REST), gl.float32, REST_LAYOUT)),)
        return out

    @gluon.jit
    def _multiply_panel(self, slot, PART: gl.constexpr, parts, ROW: gl.constexpr, ADDS: gl.constexpr):
        """Starts ``a @ b.T`` of a panel, for ``MMA_ROWS`` rows from ``ROW`` on; added to ``parts`` if it ``ADDS``."""
        a = self.rows_to_multiply(slot, PART, MMA_ROWS, ROW)
        b = self.b_panels.index(slot * self.panels + PART).permute((1, 0))
        out = (warpgroup_mma(a, b, parts[0], use_acc=ADDS, is_async=True),)
        if len(self.widths) > 1:
            rest = self.rest_panels.index(slot * self.panels + PART).permute((1, 0))
            out = out + (warpgroup_mma(a, rest, parts[1], use_acc=ADDS, is_async=True),)
        return out

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
        """``ROWS`` rows of panel ``PART`` of a slot's A from ``FIRST`` on, or memory beyond if it has fewer."""
        if self.block_m == ROWS:
            return self.a_panels.index(slot * self.panels + PART)
        elif self.block_m > ROWS:
            return self.a_panels.index(slot * self.panels + PART).slice(FIRST, ROWS)
        elif LARGER_VIEWS:
            a = self.a_panels.index(slot * self.panels + PART)
            return a._reinterpret(a.dtype, [MMA_ROWS, self.columns], a.layout)
        else:
            # A view of so many panels begins at any of them: as the ring is cut into such views, beginning with its
            # first panel, its second, and so on. Slots of fewer panels begin in turn with each of several.
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
        """Waits until at most the last ``SLOTS`` slots have products in flight."""
        if len(self.widths) == 1:
            return (warpgroup_mma_wait(SLOTS * self.panels, deps=accs),)
        else:
            return warpgroup_mma_wait(SLOTS * self.panels * 2, deps=accs)

    @gluon.jit
    def resume(self, sums):
        """The accumulators that ``settle`` has waited for."""
        if len(self.widths) == 1:
            return (warpgroup_mma_init(sums[0]),)
        else:
            return (warpgroup_mma_init(sums[0]), warpgroup_mma_init(sums[1]))

    @gluon.jit
    def release(self, step):
        """Marks a slot as empty."""
        mbarrier.arrive(self.empty.index(step % self.depth), count=1)


@gluon.jit
def _add_halves(left, right, part, factors):
    """``left`` and ``right`` plus the halves of ``part``, as ``_add_scaled`` adds them."""
    LAYOUT: gl.constexpr = left.type.layout
    halves = _halves(part, LAYOUT)
    return _add_scaled(left, halves[0], factors[0]), _add_scaled(right, halves[1], factors[1])


@gluon.jit
def _halves(sums, LAYOUT: gl.constexpr):
    """The left and the right columns of ``sums``, which stay in their registers."""
    halves = sums.reshape([sums.shape[0], 2, sums.shape[1] // 2]).permute(0, 2, 1).split()
    left = gl.convert_layout(halves[0], LAYOUT, assert_trivial=True)
    return left, gl.convert_layout(halves[1], LAYOUT, assert_trivial=True)


@gluon.jit
def _add_scaled(total, part, factor):
    """``total + part * factor``, of each row, rounded once.

    In assembly, which keeps its place: if it came after the next product's start, all of ``part`` would be moved first.
    """
    factor = gl.expand_dims(factor, 1).broadcast_to(part.shape)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [part, factor, total], gl.float32, False, 1
    )


@gluon.jit
def _settle(COUNT: gl.constexpr, accs):
    """``accs`` once at most ``COUNT`` products are in flight, those of the last of them."""
    if len(accs) == 1:
        return (warpgroup_mma_wait(COUNT, deps=accs),)
    else:
        return warpgroup_mma_wait(COUNT, deps=accs)


@gluon.jit
def _resume(accs):
    """``accs`` that have been waited for, some of which products are still added to."""
    out = ()
    for i in gl.static_range(len(accs)):
        out = out + (warpgroup_mma_init(accs[i]),)
    return out


@gluon.jit
def make_ring(A, B, CONFIG: gl.constexpr, CONSUMERS: gl.constexpr = 1):
    """A ring for blocks of the tensor maps ``A`` and ``B`` and a ``GemmConfig``. Call ``initialize`` before use.

    ``CONSUMERS``: groups of warps that each read every block.
    """
    BLOCK_M: gl.constexpr = CONFIG.block_m
    WIDTHS: gl.constexpr = CONFIG.widths
    DEPTH: gl.constexpr = CONFIG.num_stages
    panels: gl.constexpr = CONFIG.block_k // PANEL
    # Some more of A's, to read on in.
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
    """An int32 that other programs change, and what they wrote before they did. The same in all threads of a warp."""
    asm: gl.constexpr = "ld.acquire.gpu.global.u32 $0, [$1]; shfl.sync.idx.b32 $0, $0, 0, 31, -1;"
    return gl.inline_asm_elementwise(asm, "=r,l", [pointer.to(gl.uint64)], gl.int32, False, 1)


@gluon.jit
def initialize(barriers, COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """Sets how many arrivals complete each barrier."""
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
