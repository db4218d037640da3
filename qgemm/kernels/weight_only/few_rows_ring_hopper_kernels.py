"""Products of up to 32 rows with stored 4- and 8-bit weights on Hopper (sm_90): TMA fills a ring. In Gluon.

As ``few_rows_hopper_kernels``, but for rows that consist of whole blocks of 128 bytes, and without small groups.

One warp of each program keeps TMA filling a ring of slots. A slot has a block of the weight for every warp that shares
K, and the values of x that these blocks are multiplied by. Programs are persistent, so that the next tile's blocks
arrive while one tile's sums are added up; where the last wave has few tiles, programs share their K (``items``). With
16 rows, a program reads more of x from shared memory than of the weight, so each warp multiplies what it has read by 32
rows of the weight. int4 is 2.7 times as fast as bfloat16 with 16 rows and 2.0 times with 32, where ``wgmma`` reaches
1.9 times (docs/performance/w4a16_design.md).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages import GemmContext, ScheduleContext
from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.ring import PRODUCER_REGISTERS, barriers, initialize, load_block
from qgemm.kernels.weight_only.few_rows_products import products_of
from qgemm.kernels.weight_only.hopper_epilogue import SwappedEpilogue
from qgemm.kernels.weight_only.items import Items
from qgemm.kernels.weight_only.kernels import BLOCK
from qgemm.kernels.weight_only.partial_sums import add_parts

PANEL = gl.constexpr(64)  # values of x in the width of TMA's swizzle, and in a part of half a block
PARTS = gl.constexpr(BLOCK.value // PANEL.value)


@aggregate
class RowsRing:
    """Slots of shared memory, used in turn, with the barriers that count them, as in ``Ring``."""

    w: gl.shared_memory_descriptor
    x_panels: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    panels: gl.constexpr
    """The number of panels of x in a slot."""

    @gluon.jit
    def load_weight(self, X, W, slot, step, row):
        """Starts loading a step's blocks of the weight's rows from ``row`` on. The slot's barrier expects x, too."""
        full = self.full.index(slot)
        mbarrier.expect(full, PARTS * W.block_type.nbytes + self.panels * X.block_type.nbytes)
        for i in gl.static_range(PARTS):
            at = [step * W.block_shape[0], row, i * W.block_shape[2]]
            load_block(W, at, full, self.w.index(slot * PARTS + i))

    @gluon.jit
    def load_x(self, X, slot, step):
        """Starts loading the values of x that the step's blocks are multiplied by."""
        for i in gl.static_range(self.panels):
            to = self.x_panels.index(slot * self.panels + i)
            load_block(X, [step * X.block_shape[0], 0, i * PANEL], self.full.index(slot), to)

    @gluon.jit
    def words(self, slot, part: gl.constexpr, layout: gl.constexpr):
        """A part of the weight's blocks, as words."""
        return self.w.index(slot * PARTS + part).load(layout)

    @gluon.jit
    def x(self, slot, half: gl.constexpr, part: gl.constexpr, layout: gl.constexpr):
        """The values of x that ``part`` of ``half`` the blocks is multiplied by."""
        return self.x_panels.index(slot * self.panels + half * PARTS + part).permute((0, 2, 1)).load(layout)


@gluon.jit
def _produce(X, W, ring, items, ROWS: gl.constexpr):
    DEPTH: gl.constexpr = ring.full.shape[0]
    gdc_launch_dependents()
    turns = items.turns()
    # Weights don't change, so the first blocks are loaded while the preceding kernel in the stream ends.
    ahead = 0
    for turn in range(gl.minimum(turns, DEPTH)):
        index, first, last = items.part(turn)
        for step in range(first, gl.minimum(last, first + DEPTH - ahead)):
            ring.load_weight(X, W, ahead, step, index * ROWS)
            ahead += 1
    gdc_wait()
    i = 0
    for turn in range(turns):
        index, first, last = items.part(turn)
        for step in range(first, last):
            slot = i % DEPTH
            if i >= ahead:
                mbarrier.wait(ring.empty.index(slot), (i // DEPTH + 1) & 1)
                ring.load_weight(X, W, slot, step, index * ROWS)
            ring.load_x(X, slot, step)
            i += 1


@gluon.jit
def _consume(
    scale, zero_point, global_scale, bias, residual, out, partial, counts, ring, items, stride_sn, stride_residual,
    stride_out, FORM: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    DEPTH: gl.constexpr = ring.full.shape[0]
    M, N, K = items.sched.M, items.sched.N, items.sched.K
    products = products_of(scale, zero_point, stride_sn, M, N, K, ring.x_panels.dtype, FORM, TILE, PARTS)
    epilogue = SwappedEpilogue(global_scale, bias, residual, stride_residual, M, N)
    turns = items.turns()
    index, first, _ = items.part(turns * 0)
    groups = products.groups(index * TILE.rows)
    loaded = groups.load(first)
    gdc_wait()
    i = 0
    # The previous step's slot. It is released in the next step, or after the last one: only then have the instructions
    # been issued that wait for the loads from the slot. TMA doesn't wait for those loads.
    slot = i
    for turn in range(turns):
        index, first, last = items.part(turn)
        acc = products.zeros()
        for step in range(first, last):
            mbarrier.arrive(ring.empty.index(slot), count=1, pred=step > first)
            slot = i % DEPTH
            factors = loaded
            loaded = groups.load(step + 1)
            mbarrier.wait(ring.full.index(slot), i // DEPTH & 1)
            acc = products.add(acc, ring, slot, factors)
            i += 1
        mbarrier.arrive(ring.empty.index(slot), count=1)
        next_index, next_first, _ = items.part(gl.minimum(turn + 1, turns - 1))
        groups = products.groups(next_index * TILE.rows)
        loaded = groups.load(next_first)
        sums = products.total(acc)
        finishes = turn >= 0
        if items.shares:
            if index >= items.alone:
                at = (_places(sums),)
                added, finishes = add_parts((sums,), at, partial, counts, items, index - items.alone, 0, 1)
                sums = added[0]
        if finishes:
            outputs = products.outputs(sums, index * TILE.rows, epilogue, out.dtype.element_ty)
            products.store(outputs, index * TILE.rows, M, out, stride_out)


@gluon.jit
def _places(sums):
    """The place of each sum among those of a part: neighbouring threads have neighbouring rows of the weight."""
    i = gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))[:, None]
    return i + gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))[None, :] * sums.shape[0]


@gluon.jit(do_not_specialize=["M", "alone", "sharers"])
def _few_rows_ring_kernel(
    X, W, scale, zero_point, global_scale, bias, residual, out, partial, counts,
    M, N, K, alone, sharers, stride_sn, stride_residual, stride_out,
    FORM: gl.constexpr, TILE: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """``X``, ``W``: tensor maps of x as ``[blocks, M, values of a block]``, the weight as ``[blocks, N, 32 words]``.

    ``partial``, ``counts``, ``alone``, ``sharers``: as in ``_tiles_kernel``.
    """
    DEPTH: gl.constexpr = TILE.depth
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    ROWS: gl.constexpr = TILE.rows
    SPLITS: gl.constexpr = TILE.splits
    COLS: gl.constexpr = TILE.columns
    PANELS: gl.constexpr = HALVES * PARTS
    w = gl.allocate_shared_memory(W.dtype, [DEPTH * PARTS, SPLITS, ROWS, W.block_shape[2]], W.layout)
    x = gl.allocate_shared_memory(X.dtype, [DEPTH * PANELS, SPLITS, COLS, PANEL], X.layout)
    ring = RowsRing(w, x, barriers(DEPTH), barriers(DEPTH), PANELS)
    initialize(ring.full, DEPTH)
    initialize(ring.empty, DEPTH)
    if SHARES:
        counts = counts.cast(gl.pointer_type(gl.int32), bitcast=True)
    sched = ScheduleContext(M, N, K, GemmContext(COLS, ROWS, 64, 1, 1, 1))
    items = Items(sched, alone, gl.cdiv(K, BLOCK * HALVES * SPLITS), sharers, SHARES)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    scale, zero_point, global_scale, bias, residual, out, partial, counts, ring, items, stride_sn,
                    stride_residual, stride_out, FORM, TILE,
                ),
            ),
            (_produce, (X, W, ring, items, ROWS)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
