"""Sums of fp8 products over the slots of a ``Ring``, added in float32: the tensor cores' own sums keep only 14 bits.

For Hopper (sm_90), in Gluon. ``reduce_promoted`` replaces ``Ring.reduce``. The tensor cores sum over two panels of K,
or over one panel where blocks have scales; that sum, scaled, is added to the total in float32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from qgemm.kernels.stages.ring import MMA_ROWS


@gluon.jit
def reduce_promoted(ring, step, num_k, sums, FIRST: gl.constexpr, scales):
    """``Ring.reduce`` for fp8: the tensor cores' sums over two panels, or one with ``scales``, are added in float32.

    ``sums``: a tensor for each piece of B, for each ``MMA_ROWS`` rows of A from ``FIRST`` on. ``scales``: the
    ``BlockScales`` of as many rows, which a panel's sums are multiplied by before they are added; or None.
    """
    if scales is not None and len(ring.widths) > 1:
        sums, step = _reduce_pieces(ring, step, num_k, sums, FIRST, scales)
    elif scales is not None and ring.panels == 1:
        sums, step = _reduce_ahead(ring, step, num_k, sums[0], FIRST, scales)
    else:
        sums, step = _reduce_in_turn(ring, step, num_k, sums, FIRST, scales)
    return sums, step


@gluon.jit
def _reduce_ahead(ring, step, num_k, total, FIRST: gl.constexpr, scales):
    """``reduce_promoted`` for slots of one panel: its sums are added while the next panel's products are computed.

    The two panels have separate registers, so a turn of the loop handles two slots. The registers' old values don't
    matter, but nothing may be written to them while products are computed: the assembler would make each product wait
    for the one before.
    """
    free = _zeros(ring, (total,))[0]
    ahead = _start(ring, step, _zeros(ring, (total,))[0], FIRST)
    # Loading scales takes long, so a slot's scales are loaded as soon as its products have started.
    factors = scales.load(0, 1)
    for i in range((num_k - 1) // 2):
        other = _start(ring, step + 1, free, FIRST)
        others = scales.load(2 * i + 1, 1)
        done, other = warpgroup_mma_wait(1, deps=(ahead, other))
        ring.release(step)
        total = _add_scaled(total, done, factors[1] * factors[0])
        ahead = _start(ring, step + 2, warpgroup_mma_init(done), FIRST)
        factors = scales.load(2 * i + 2, 1)
        done, ahead = warpgroup_mma_wait(1, deps=(warpgroup_mma_init(other), ahead))
        ahead = warpgroup_mma_init(ahead)
        ring.release(step + 1)
        total = _add_scaled(total, done, others[1] * others[0])
        free = warpgroup_mma_init(done)
        step += 2
    if num_k % 2 == 0:
        other = _start(ring, step + 1, free, FIRST)
        others = scales.load(num_k - 1, 1)
        done, other = warpgroup_mma_wait(1, deps=(ahead, other))
        ring.release(step)
        total = _add_scaled(total, done, factors[1] * factors[0])
        total = _add_scaled(total, warpgroup_mma_wait(0, deps=(warpgroup_mma_init(other),)), others[1] * others[0])
        step += 1
    else:
        total = _add_scaled(total, warpgroup_mma_wait(0, deps=(ahead,)), factors[1] * factors[0])
    ring.release(step)
    return (total,), step + 1


@gluon.jit
def _reduce_pieces(ring, step, num_k, sums, FIRST: gl.constexpr, scales):
    """``_reduce_ahead`` for two pieces of B: one piece's sums are added while the other's products are computed.

    The two halves of the first piece may lie in different blocks of columns, so each half has its own sums.
    """
    gl.static_assert(ring.panels == 1 and len(sums) == 2 and ring.widths[0] == 2 * ring.widths[1])
    LAYOUT: gl.constexpr = sums[1].type.layout
    left, right = _halves(sums[0], LAYOUT)
    rest = sums[1]
    main, free = _zeros(ring, sums)
    main = _start(ring, step, main, FIRST)
    factors = scales.load(0, 1)
    for i in range(1, num_k):
        other = _start_rest(ring, step, free, FIRST)
        done, other = warpgroup_mma_wait(1, deps=(main, other))
        each = scales.of_halves(factors)
        left, right = _add_halves(left, right, done, each)
        main = _start(ring, step + 1, warpgroup_mma_init(done), FIRST)
        factors = scales.load(i, 1)
        done, main = warpgroup_mma_wait(1, deps=(warpgroup_mma_init(other), main))
        main = warpgroup_mma_init(main)
        ring.release(step)
        rest = _add_scaled(rest, done, each[2])
        free = warpgroup_mma_init(done)
        step += 1
    # Always true, which the compiler doesn't know. Without the branch, these products would start right behind the
    # loop, ahead of the additions of products that the loop has started, and the assembler would make each product
    # wait for the one before.
    if step >= 0:
        other = _start_rest(ring, step, free, FIRST)
        done, other = warpgroup_mma_wait(1, deps=(main, other))
        each = scales.of_halves(factors)
        left, right = _add_halves(left, right, done, each)
        rest = _add_scaled(rest, warpgroup_mma_wait(0, deps=(warpgroup_mma_init(other),)), each[2])
    else:
        warpgroup_mma_wait(0, deps=(main,))
    ring.release(step)
    whole = gl.join(left, right).permute(0, 2, 1).reshape(sums[0].shape)
    WHOLE: gl.constexpr = sums[0].type.layout
    return (gl.convert_layout(whole, WHOLE, assert_trivial=True), rest), step + 1


@gluon.jit
def _start(ring, step, sums, FIRST: gl.constexpr):
    """Waits for a slot and starts its products with B's first piece; they overwrite ``sums``."""
    slot = step % ring.depth
    mbarrier.wait(ring.full.index(slot), step // ring.depth & 1)
    a = ring.rows_to_multiply(slot, 0, MMA_ROWS, FIRST)
    return warpgroup_mma(a, ring.b_panels.index(slot).permute((1, 0)), sums, use_acc=False, is_async=True)


@gluon.jit
def _start_rest(ring, step, sums, FIRST: gl.constexpr):
    """As ``_start``, with B's second piece, for a slot that has already been waited for."""
    slot = step % ring.depth
    a = ring.rows_to_multiply(slot, 0, MMA_ROWS, FIRST)
    return warpgroup_mma(a, ring.rest_panels.index(slot).permute((1, 0)), sums, use_acc=False, is_async=True)


@gluon.jit
def _reduce_in_turn(ring, step, num_k, sums, FIRST: gl.constexpr, scales):
    """``reduce_promoted`` that adds sums while nothing is multiplied, except by another group of warps."""
    # Two slots a turn if sums span two panels and a slot has only one.
    SLOTS: gl.constexpr = 2 if ring.panels == 1 and scales is None else 1
    COUNT: gl.constexpr = SLOTS * ring.panels
    turns = num_k // SLOTS
    if scales is None:
        for _ in range(turns):
            sums = _add_slots(ring, step, SLOTS, sums, FIRST, ())
            step += SLOTS
        factors = ()
    else:
        # Loading scales takes long. A turn's scales are loaded one turn ahead, into registers that the turn between
        # doesn't use.
        factors = scales.load(0, COUNT)
        for i in range(turns // 2):
            others = scales.load((2 * i + 1) * COUNT, COUNT)
            sums = _add_slots(ring, step, SLOTS, sums, FIRST, factors)
            factors = scales.load((2 * i + 2) * COUNT, COUNT)
            sums = _add_slots(ring, step + SLOTS, SLOTS, sums, FIRST, others)
            step += 2 * SLOTS
        for _ in range(turns % 2):
            sums = _add_slots(ring, step, SLOTS, sums, FIRST, factors)
            factors = scales.load(turns * COUNT, COUNT)
            step += SLOTS
    if SLOTS > 1:
        for _ in range(num_k % SLOTS):
            sums = _add_slots(ring, step, 1, sums, FIRST, factors)
            step += 1
    return sums, step


@gluon.jit
def _add_slots(ring, step, SLOTS: gl.constexpr, sums, FIRST: gl.constexpr, factors):
    """Adds the products of ``SLOTS`` slots to ``sums``, two panels at a time, or one panel at a time if it is scaled.

    ``factors``: the scales of each panel, as ``BlockScales`` loads them; empty without scales.
    """
    PIECES: gl.constexpr = len(ring.widths)
    COUNT: gl.constexpr = len(sums) // PIECES
    PANELS: gl.constexpr = SLOTS * ring.panels
    SCALED: gl.constexpr = len(factors) > 0
    CHAIN: gl.constexpr = 1 if SCALED or PANELS == 1 else 2
    CHAINS: gl.constexpr = PANELS // CHAIN
    out = ()
    for i in gl.static_range(COUNT):
        parts = ()
        for chain in gl.static_range(CHAINS):
            own = _zeros(ring, sums)
            for link in gl.static_range(CHAIN):
                panel = chain * CHAIN + link
                number = step + panel // ring.panels
                slot = number % ring.depth
                if i == 0 and panel % ring.panels == 0:
                    mbarrier.wait(ring.full.index(slot), number // ring.depth & 1)
                # A constant expression. ``panel`` isn't one, as no variable is.
                own = _multiply_panel(
                    ring, slot, (chain * CHAIN + link) % ring.panels, own, FIRST + i * MMA_ROWS, link > 0
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
                    if panel % ring.panels == ring.panels - 1:
                        ring.release(step + panel // ring.panels)
            added = ()
            for piece in gl.static_range(PIECES):
                part = parts[chain * PIECES + piece]
                if SCALED:
                    columns, rows = factors[2 * chain], factors[2 * chain + 1]
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
def _zeros(ring, sums):
    """A tensor of ``MMA_ROWS`` rows for each piece of B. Its values don't matter."""
    LAYOUT: gl.constexpr = sums[0].type.layout
    MAIN: gl.constexpr = ring.widths[0]
    out = (warpgroup_mma_init(gl.zeros((MMA_ROWS, MAIN), gl.float32, LAYOUT)),)
    if len(ring.widths) > 1:
        REST_LAYOUT: gl.constexpr = sums[1].type.layout
        REST: gl.constexpr = ring.widths[1]
        out = out + (warpgroup_mma_init(gl.zeros((MMA_ROWS, REST), gl.float32, REST_LAYOUT)),)
    return out


@gluon.jit
def _multiply_panel(ring, slot, PART: gl.constexpr, parts, ROW: gl.constexpr, ADDS: gl.constexpr):
    """Starts ``a @ b.T`` of a panel, for ``MMA_ROWS`` rows from ``ROW`` on; adds it to ``parts`` if ``ADDS``."""
    a = ring.rows_to_multiply(slot, PART, MMA_ROWS, ROW)
    b = ring.b_panels.index(slot * ring.panels + PART).permute((1, 0))
    out = (warpgroup_mma(a, b, parts[0], use_acc=ADDS, is_async=True),)
    if len(ring.widths) > 1:
        rest = ring.rest_panels.index(slot * ring.panels + PART).permute((1, 0))
        out = out + (warpgroup_mma(a, rest, parts[1], use_acc=ADDS, is_async=True),)
    return out


@gluon.jit
def _add_halves(left, right, part, factors):
    """``left`` and ``right`` plus the halves of ``part``, each scaled as in ``_add_scaled``."""
    LAYOUT: gl.constexpr = left.type.layout
    halves = _halves(part, LAYOUT)
    return _add_scaled(left, halves[0], factors[0]), _add_scaled(right, halves[1], factors[1])


@gluon.jit
def _halves(sums, LAYOUT: gl.constexpr):
    """The left and the right half of the columns of ``sums``. The values stay in their registers."""
    halves = sums.reshape([sums.shape[0], 2, sums.shape[1] // 2]).permute(0, 2, 1).split()
    left = gl.convert_layout(halves[0], LAYOUT, assert_trivial=True)
    return left, gl.convert_layout(halves[1], LAYOUT, assert_trivial=True)


@gluon.jit
def _add_scaled(total, part, factor):
    """``total + part * factor`` with a factor for each row, rounded once.

    It is written in assembly so that it stays in place: if the compiler moved it behind the next product's start, all
    of ``part`` would be copied first.
    """
    factor = gl.expand_dims(factor, 1).broadcast_to(part.shape)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [part, factor, total], gl.float32, False, 1
    )


@gluon.jit
def _settle(COUNT: gl.constexpr, accs):
    """``accs``, once at most ``COUNT`` products, those of the last of them, are in flight."""
    if len(accs) == 1:
        return (warpgroup_mma_wait(COUNT, deps=accs),)
    else:
        return warpgroup_mma_wait(COUNT, deps=accs)


@gluon.jit
def _resume(accs):
    """``accs`` that have been waited for, as accumulators: products are still added to some of them."""
    out = ()
    for i in gl.static_range(len(accs)):
        out = out + (warpgroup_mma_init(accs[i]),)
    return out
