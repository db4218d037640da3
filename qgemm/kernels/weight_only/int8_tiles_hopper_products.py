"""The products of ``int8_tiles_hopper_kernels.py``: x times blocks of int4, unpacked to int8 in registers. In Gluon.

``wgmma`` reads its operand A, the weight, from registers. Sums of groups are scaled and added in float32. If all of a
row has one scale, sums stay integers to the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.ring import PANEL, load_block

IN_FLIGHT = gl.constexpr(2)  # how many products a group of warps has in flight


@gluon.jit
def load_many(A, barrier, to, slot, row, at, WIDTH: gl.constexpr):
    """Starts loading the block of ``WIDTH`` bytes at ``(row, at)``, in panels as wide as those of ``to``."""
    STEP: gl.constexpr = to.shape[2]
    PANELS: gl.constexpr = WIDTH // STEP
    for i in gl.static_range(PANELS):
        load_block(A, [row, at + i * STEP], barrier, to.index(slot * PANELS + i))


@aggregate
class Share:
    """A consumer's share of every tile: some of the weight's rows, and every ``splits``-th block of K."""

    rows: gl.tensor
    owner: gl.constexpr
    """Which of the ``owners`` has these rows. An owner adds up the sums of all ``splits`` of K for its rows."""
    owners: gl.constexpr
    first_block: gl.constexpr
    """The first block of K; 0 for an owner."""
    splits: gl.constexpr


@aggregate
class Halves:
    """Barriers of slots for halves of a block of x, where these are loaded and released apart from the weight's block.

    Tiles of many columns have room for only two blocks. With halves, the next ones can be loaded before all of a block
    has been read.
    """

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    apart: gl.constexpr

    @gluon.jit
    def slot(self, step, HALF: gl.constexpr):
        """``(slot, phase)`` of half ``HALF`` of a step's block."""
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
    """The bytes of an owner's ``rows`` of the block in a slot, as tensors of as many bytes as a group has values.

    ``rows``: in the layout in which they are multiplied.
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
    """int8 of a part of block ``k``: one of its groups, or a half. ``multiples``: those of its groups, or None."""
    SUBS: gl.constexpr = len(packed)
    multiple = multiples[PART] if multiples is not None else None
    return weights.unpacked(packed[PART % SUBS], rows, k * 2 * SUBS + PART, multiple, PART // SUBS)


@gluon.jit
def _add_scaled(sums, scales, weights, ring, slot, rows, k, OWNER: gl.constexpr):
    """``sums``, one for each piece of the columns, plus the products of a block, each group's times its scale."""
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
            # The next unit's piece comes first.
            sums = sums[1:] + (gl.fma(made.to(gl.float32), scale, sums[0]),)
    return sums


@gluon.jit
def _add_unscaled(sums, multiples, weights, ring, step, rows, k, OWNER: gl.constexpr):
    """As ``_add_scaled``, but all of a row has one scale, which is applied in the end: sums are integers.

    ``multiples``: the factors of each group's values, or None. ``step``: the ring's.
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
        # The products that were started have waited for the loads from the weight's slot.
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
    """Adds the products of a consumer's blocks of an item, which begins at ``step``, to ``sums``: ``(sums, scales)``.

    ``scales``: at first those of the item's first block for this consumer, in the end those of the next item's.
    ``own``: the item's first row of the weight and its blocks of K. ``after``: the first row and block of the next
    item.
    """
    _, _, full, _, _ = ring
    STAGES: gl.constexpr = full.shape[0]
    col, start, end = own
    next_col, next_start = after
    for k in range(start + share.first_block, end, share.splits):
        # The next step's scales: loading them from memory takes as long as a step.
        ends = k + share.splits >= end
        following = gl.where(ends, next_col, col) + share.rows
        next_block = gl.where(ends, next_start + share.first_block, k + share.splits)
        next_scales = weights.scales_of_block(following, next_block, GROUPS)
        multiples = weights.multiples(scales) if weights.step is not None else None
        current = step + k - start
        slot = current % STAGES
        mbarrier.wait(full.index(slot), current // STAGES & 1)
        # Registers of A aren't rewritten before all products have read them: nothing is in flight when the next step
        # begins.
        if weights.whole_sums:
            sums = _add_unscaled(sums, multiples, weights, ring, current, a_rows, k, share.owner)
        else:
            sums = _add_scaled(sums, scales, weights, ring, slot, a_rows, k, share.owner)
        scales = next_scales
    return sums, scales


@gluon.jit
def hand_over(sums, handed, share, turn):
    """The owner's ``sums`` plus those of the other consumers that share its rows; the others hand theirs over.

    The owner calls ``take`` when it has stored them.
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
    """Lets the others hand over again. Called by an owner that has stored its sums, and so has loaded all of theirs."""
    _, _, taken = handed
    for split in gl.static_range(share.splits - 1):
        mbarrier.arrive(taken.index(split * share.owners + share.owner), count=1)
