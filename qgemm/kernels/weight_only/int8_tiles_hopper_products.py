"""What the tiles of ``int8_tiles_hopper_kernels.py`` multiply: blocks of int4, unpacked to int8 in registers, in Gluon.

``wgmma`` takes its operand A from those registers. Sums of groups are scaled and added in float32, or, where all of a
row has one scale, are integers to the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.ring import PANEL, load_block

IN_FLIGHT = gl.constexpr(2)  # products that a group of warps has in flight


@gluon.jit
def load_many(A, barrier, to, slot, row, at, WIDTH: gl.constexpr):
    """Starts loading the block of ``WIDTH`` bytes at ``(row, at)``, in panels as wide as those of ``to``."""
    STEP: gl.constexpr = to.shape[2]
    PANELS: gl.constexpr = WIDTH // STEP
    for i in gl.static_range(PANELS):
        load_block(A, [row, at + i * STEP], barrier, to.index(slot * PANELS + i))


@aggregate
class Share:
    """What a consumer has of every tile: some of the weight's rows, and every ``splits``-th block of K."""

    rows: gl.tensor
    owner: gl.constexpr
    """Which of the ``owners``, each of whom has rows of its own, and adds up the sums of all ``splits`` of K."""
    owners: gl.constexpr
    first_block: gl.constexpr
    """0 for an owner."""
    splits: gl.constexpr


@aggregate
class Halves:
    """Barriers of slots for halves of a block of x, where these aren't loaded and given back with the weight's block.

    Tiles of many columns have room for two blocks: so the next ones begin to come before one is read to its end.
    """

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    apart: gl.constexpr

    @gluon.jit
    def slot(self, step, HALF: gl.constexpr):
        """``(slot, phase)`` of a half of a step's block."""
        SLOTS: gl.constexpr = self.full.shape[0]
        at = 2 * step + HALF
        return at % SLOTS, at // SLOTS & 1

    @gluon.jit
    def load(self, A, x, step, row, at, SIZE: gl.constexpr):
        """Starts loading both halves of a step's block, at ``(row, at)``, of ``SIZE`` bytes each."""
        for half in gl.static_range(2):
            slot, phase = self.slot(step, half)
            mbarrier.wait(self.empty.index(slot), phase ^ 1)
            mbarrier.expect(self.full.index(slot), SIZE)
            load_many(A, self.full.index(slot), x, slot, row, at + half * PANEL, PANEL)


@gluon.jit
def _packed_block(ring, slot, rows, OWNER: gl.constexpr):
    """The bytes of an owner's ``rows`` of a block, which are in a slot: as many at a time as a group has values.

    ``rows``: in the layout that they are multiplied in.
    """
    w, _, _, _, _ = ring
    SUBS: gl.constexpr = PANEL // w.shape[2]
    ROWS: gl.constexpr = rows.shape[0]
    packed = ()
    for sub in gl.static_range(SUBS):
        packed = packed + (w.index(slot * SUBS + sub).slice(OWNER * ROWS, ROWS).load(rows.type.layout),)
    return packed


@gluon.jit
def _unpack_part(weights, packed, rows, k, multiples, PART: gl.constexpr):
    """int8 of a part of block ``k``: a group of it, or half of it. ``multiples``: of groups, or None."""
    SUBS: gl.constexpr = len(packed)
    multiple = multiples[PART] if multiples is not None else None
    return weights.unpacked(packed[PART % SUBS], rows, k * 2 * SUBS + PART, multiple, PART // SUBS)


@gluon.jit
def _add_scaled(sums, scales, weights, ring, slot, rows, k, OWNER: gl.constexpr):
    """``sums``, one for each piece of the columns, plus the products of a block: those of a group times its scale."""
    w, x, _, empty, _ = ring
    PIECES: gl.constexpr = len(sums)
    PIECE: gl.constexpr = sums[0].shape[1]
    PARTS: gl.constexpr = 2 * PANEL // w.shape[2]
    UNITS: gl.constexpr = PARTS * PIECES
    packed = _packed_block(ring, slot, rows, OWNER)
    values = ()
    for part in gl.static_range(PARTS):
        values = values + (_unpack_part(weights, packed, rows, k, None, part),)
    zero = gl.zeros_like(sums[0], dtype=gl.int32)
    products = ()
    for unit in gl.static_range(UNITS + IN_FLIGHT):
        if unit >= IN_FLIGHT:
            started = (products[unit - IN_FLIGHT],)
            made = warpgroup_mma_wait(IN_FLIGHT - 1 if unit <= UNITS else 0, deps=started)
            if unit == UNITS + IN_FLIGHT - 1:
                mbarrier.arrive(empty.index(slot), count=1)
        if unit < UNITS:
            b = x.index(slot * PARTS + unit // PIECES).slice(unit % PIECES * PIECE, PIECE).permute((1, 0))
            product = warpgroup_mma(values[unit // PIECES], b, zero, use_acc=False, is_async=True)
            products = products + (product,)
        if unit >= IN_FLIGHT:
            scale = gl.broadcast(scales[(unit - IN_FLIGHT) // PIECES][:, None], sums[0])[0]
            # The piece that is next comes first.
            sums = sums[1:] + (gl.fma(made.to(gl.float32), scale, sums[0]),)
    return sums


@gluon.jit
def _add_unscaled(sums, multiples, weights, ring, step, rows, k, OWNER: gl.constexpr):
    """As ``_add_scaled``, where all of a row has one scale, which comes last: sums are integers.

    ``multiples``: of groups, which their values are multiplied by, or None. ``step``: of the ring.
    """
    w, x, full, empty, halves = ring
    PIECES: gl.constexpr = len(sums)
    PIECE: gl.constexpr = sums[0].shape[1]
    PARTS: gl.constexpr = 2 * PANEL // w.shape[2]
    slot = step % full.shape[0]
    packed = _packed_block(ring, slot, rows, OWNER)
    for part in gl.static_range(PARTS):
        values = _unpack_part(weights, packed, rows, k, multiples, part)
        x_slot = slot * PARTS + part
        if halves.apart:
            x_slot, phase = halves.slot(step, part)
            mbarrier.wait(halves.full.index(x_slot), phase)
        new = ()
        for i in gl.static_range(PIECES):
            b = x.index(x_slot).slice(i * PIECE, PIECE).permute((1, 0))
            new = new + (warpgroup_mma(values, b, sums[i], is_async=True),)
        sums = new
    if halves.apart:
        # Products that were started wait for the loads of the weight's slot.
        mbarrier.arrive(empty.index(slot), count=1)
        sums = warpgroup_mma_wait(PIECES, deps=sums)
        mbarrier.arrive(halves.empty.index(halves.slot(step, 0)[0]), count=1)
        done = warpgroup_mma_wait(0, deps=sums)
        mbarrier.arrive(halves.empty.index(halves.slot(step, 1)[0]), count=1)
    else:
        done = warpgroup_mma_wait(0, deps=sums)
        mbarrier.arrive(empty.index(slot), count=1)
    return (done,) if PIECES == 1 else done


@gluon.jit
def multiply(sums, scales, weights, ring, share, a_rows, own, after, step, GROUPS: gl.constexpr):
    """``(sums, scales)``: ``sums`` plus the products of a consumer's blocks of an item, which begins at ``step``.

    ``scales``: of the first of those blocks; then of that of the next item. ``own``: the item's first row of the
    weight and blocks of K; ``after``: those of the next.
    """
    _, _, full, _, _ = ring
    STAGES: gl.constexpr = full.shape[0]
    col, start, end = own
    next_col, next_start = after
    for k in range(start + share.first_block, end, share.splits):
        # Scales of the next step: from memory they take as long as a step.
        ends = k + share.splits >= end
        following = gl.where(ends, next_col, col) + share.rows
        next_block = gl.where(ends, next_start + share.first_block, k + share.splits)
        next_scales = weights.scales_of_block(following, next_block, GROUPS)
        multiples = weights.multiples(scales) if weights.step is not None else None
        current = step + k - start
        slot = current % STAGES
        mbarrier.wait(full.index(slot), current // STAGES & 1)
        # Registers of A aren't written again before all products have read them: nothing is in flight where the next
        # step begins.
        if weights.whole_sums:
            sums = _add_unscaled(sums, multiples, weights, ring, current, a_rows, k, share.owner)
        else:
            sums = _add_scaled(sums, scales, weights, ring, slot, a_rows, k, share.owner)
        scales = next_scales
    return sums, scales


@gluon.jit
def hand_over(sums, handed, share, turn):
    """The owner's ``sums`` plus those of the other consumers that share its rows, which hand theirs over.

    The owner calls ``_take`` when it has stored them.
    """
    others, given, taken = handed
    PIECES: gl.constexpr = len(sums)
    if share.first_block > 0:
        at: gl.constexpr = (share.first_block - 1) * share.owners + share.owner
        mbarrier.wait(taken.index(at), (turn & 1) ^ 1)
        for i in gl.static_range(PIECES):
            others.index(at * PIECES + i).store(sums[i].to(gl.float32, bitcast=True))
        mbarrier.arrive(given.index(at), count=1)
    else:
        for split in gl.static_range(share.splits - 1):
            at: gl.constexpr = split * share.owners + share.owner
            mbarrier.wait(given.index(at), turn & 1)
            both = ()
            for i in gl.static_range(PIECES):
                found = others.index(at * PIECES + i).load(sums[i].type.layout)
                both = both + (sums[i] + found.to(sums[i].dtype, bitcast=True),)
            sums = both
    return sums


@gluon.jit
def take(handed, share):
    """Lets the others hand over again: an owner whose sums are stored has loaded all of theirs."""
    _, _, taken = handed
    for split in gl.static_range(share.splits - 1):
        mbarrier.arrive(taken.index(split * share.owners + share.owner), count=1)
