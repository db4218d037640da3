"""int4 weights by int8 rows for Hopper (sm_90), from 17 rows on.

The product and the operands' places are those of ``int8_few_rows_hopper_kernels``, but with ``wgmma``, and A in
registers: two or four groups of four warps, each with rows of its own, so that one multiplies while another one unpacks
and scales; or two with every second block of K each. Where there are few tiles, K is cut in parts, and who comes last
adds them up in their order. docs/performance.md: what it reaches and why.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.ring import (
    PANEL,
    PRODUCER_REGISTERS,
    barriers,
    initialize,
    load_block,
    store_block,
    thread_barrier,
)
from qgemm.kernels.weight_only.int8_hopper_weights import BLOCK, Weights

IN_FLIGHT = gl.constexpr(2)  # products that a group of warps has in flight


@aggregate
class Items:
    """What programs compute, in turn: tiles, each cut along K in ``parts``.

    Neighbouring programs have the same part, and neighbouring tiles in blocks of ``group_m`` rows: they load the same
    blocks at the same time, and the cache answers them together.
    """

    tiles_m: gl.tensor
    tiles: gl.tensor
    blocks: gl.tensor
    """Of K, of a tile."""
    parts: gl.tensor
    cut: gl.constexpr
    """Whether there are several."""
    group_m: gl.constexpr

    @gluon.jit
    def tile(self, item):
        """``(m, n)`` of the tile, in tiles."""
        index = item % self.tiles
        per_group = self.group_m * (self.tiles // self.tiles_m)
        first = index // per_group * self.group_m
        size = gl.minimum(self.tiles_m - first, self.group_m)
        rest = index % per_group
        return first + rest % size, rest // size

    @gluon.jit
    def range_of(self, item):
        """The first block of K, and that after the last."""
        part = item // self.tiles
        if self.cut:
            return part * self.blocks // self.parts, (part + 1) * self.blocks // self.parts
        else:
            return part * 0, part * 0 + self.blocks


@gluon.jit
def _load_many(A, barrier, to, slot, row, at, WIDTH: gl.constexpr):
    """Starts loading the block of ``WIDTH`` bytes at ``(row, at)``, in panels as wide as those of ``to``."""
    STEP: gl.constexpr = to.shape[2]
    PANELS: gl.constexpr = WIDTH // STEP
    for i in gl.static_range(PANELS):
        load_block(A, [row, at + i * STEP], barrier, to.index(slot * PANELS + i))


@gluon.jit
def _produce_many(A, B, weights, ring, items, ready, handed, READERS: gl.constexpr, NEXT_EARLY: gl.constexpr):
    """``READERS``: how many consumers read each block."""
    w, x, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = w.shape[1]
    COLS: gl.constexpr = x.shape[1]
    SUBS: gl.constexpr = PANEL // B.block_shape[1]
    SIZE: gl.constexpr = SUBS * (B.block_type.nbytes + 2 * A.block_type.nbytes)
    if NEXT_EARLY:
        gdc_launch_dependents()
    initialize(full, STAGES)
    initialize(empty, STAGES, READERS)
    _, given, taken = handed
    initialize(given, given.shape[0])
    initialize(taken, taken.shape[0])
    mbarrier.arrive(ready, count=1)
    rows = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0]))
    start, stride = gl.program_id(0), gl.num_programs(0)
    m, n = items.tile(start)
    k, end = items.range_of(start)
    ahead = gl.minimum(end - k, STAGES)
    for step in range(ahead):
        mbarrier.expect(full.index(step), SIZE)
        _load_many(B, full.index(step), w, step, n * ROWS, (k + step) * PANEL, PANEL)
        weights.fetch_scales(n * ROWS + rows, k + step, 2 * SUBS, step == 0)
    # Nothing else is read before the kernel ahead in the stream has ended; see Launch.
    gdc_wait()
    for step in range(ahead):
        _load_many(A, full.index(step), x, step, m * COLS, (k + step) * BLOCK, BLOCK)
    step = ahead
    k += ahead
    for item in range(start, items.tiles * items.parts, stride):
        if item != start:
            m, n = items.tile(item)
            k, end = items.range_of(item)
        for at in range(k, end):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), (step // STAGES + 1) & 1)
            mbarrier.expect(full.index(slot), SIZE)
            _load_many(B, full.index(slot), w, slot, n * ROWS, at * PANEL, PANEL)
            _load_many(A, full.index(slot), x, slot, m * COLS, at * BLOCK, BLOCK)
            weights.fetch_scales(n * ROWS + rows, at, 2 * SUBS, at == k)
            step += 1
    if not NEXT_EARLY:
        gdc_launch_dependents()


@gluon.jit
def _consume_many(
    out, x_scale, weights, ring, items, M, ready,
    WHO: gl.constexpr, CONSUMERS: gl.constexpr, SPLITS: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """``PIECES``: in how many pieces the columns are multiplied and scaled.

    ``SPLITS``: how many consumers share the blocks of K of the same rows. All but the first one hand their sums over to
    it, in ``handed``.
    """
    C, staging, handed, partial, counts = out
    w, x, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    OWNERS: gl.constexpr = CONSUMERS // SPLITS  # of a tile's sums
    OWNER: gl.constexpr = WHO % OWNERS
    FIRST_BLOCK: gl.constexpr = WHO // OWNERS
    STORES: gl.constexpr = WHO < OWNERS
    ROWS: gl.constexpr = w.shape[1] // OWNERS
    FIRST_ROW: gl.constexpr = OWNER * ROWS
    COLS: gl.constexpr = x.shape[1]
    PIECE: gl.constexpr = COLS // PIECES
    SUBS: gl.constexpr = PANEL // w.shape[2]
    GROUPS: gl.constexpr = weights.group > 0
    UNITS: gl.constexpr = 2 * SUBS * PIECES
    SUMS: gl.constexpr = gl.float32 if GROUPS else gl.int32
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, PIECE, 32])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 4)

    total, stride = items.tiles * items.parts, gl.num_programs(0)
    own_rows = FIRST_ROW + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    _, tile_n = items.tile(gl.program_id(0))
    start, _ = items.range_of(gl.program_id(0))
    scales = ()
    if GROUPS:
        scales = weights.scales_of_block(tile_n * w.shape[1] + own_rows, start + FIRST_BLOCK, 2 * SUBS)
    gdc_wait()
    mbarrier.wait(ready, 0)
    first_step = 0
    turn = 0
    for item in range(gl.program_id(0), total, stride):
        tile_m, tile_n = items.tile(item)
        start, end = items.range_of(item)
        next_item = gl.minimum(item + stride, total - 1)
        _, next_n = items.tile(next_item)
        next_start, _ = items.range_of(next_item)
        first = tile_n * w.shape[1] + FIRST_ROW
        rows = tile_n * w.shape[1] + own_rows
        a_rows = (first + gl.arange(0, ROWS, gl.SliceLayout(1, a_layout)))[:, None]
        of_rows = weights.of_rows(rows)
        zero = gl.zeros([ROWS, PIECE], gl.int32, layout)
        sums = ()
        for _piece in gl.static_range(PIECES):
            sums = sums + (gl.zeros([ROWS, PIECE], SUMS, layout),)
        for k in range(start + FIRST_BLOCK, end, SPLITS):
            if GROUPS:
                # Those of the next step: from memory they take as long as a step.
                ends = k + SPLITS >= end
                following = gl.where(ends, next_n, tile_n) * w.shape[1] + own_rows
                next_block = gl.where(ends, next_start + FIRST_BLOCK, k + SPLITS)
                next_scales = weights.scales_of_block(following, next_block, 2 * SUBS)
            step = first_step + k - start
            slot = step % STAGES
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            # Registers of A aren't written again before all products have read them: nothing is in flight where the
            # next step begins.
            values = ()
            for part in gl.static_range(2 * SUBS):
                packed = w.index(slot * SUBS + part % SUBS).slice(FIRST_ROW, ROWS).load(a_layout)
                values = values + (weights.unpacked(packed, a_rows, k * 2 * SUBS + part, part // SUBS),)
            if GROUPS:
                products = ()
                for unit in gl.static_range(UNITS + IN_FLIGHT):
                    if unit >= IN_FLIGHT:
                        started = (products[unit - IN_FLIGHT],)
                        made = warpgroup_mma_wait(IN_FLIGHT - 1 if unit <= UNITS else 0, deps=started)
                        if unit == UNITS + IN_FLIGHT - 1:
                            mbarrier.arrive(empty.index(slot), count=1)
                    if unit < UNITS:
                        b = x.index(slot * 2 * SUBS + unit // PIECES).slice(unit % PIECES * PIECE, PIECE)
                        b = b.permute((1, 0))
                        product = warpgroup_mma(values[unit // PIECES], b, zero, use_acc=False, is_async=True)
                        products = products + (product,)
                    if unit >= IN_FLIGHT:
                        scale = gl.broadcast(scales[(unit - IN_FLIGHT) // PIECES][:, None], sums[0])[0]
                        # The piece that is next comes first.
                        sums = sums[1:] + (gl.fma(made.to(gl.float32), scale, sums[0]),)
            else:
                for part in gl.static_range(2):
                    new = ()
                    for i in gl.static_range(PIECES):
                        b = x.index(slot * 2 + part).slice(i * PIECE, PIECE).permute((1, 0))
                        new = new + (warpgroup_mma(values[part], b, sums[i], is_async=True),)
                    sums = new
                done = warpgroup_mma_wait(0, deps=sums)
                sums = (done,) if PIECES == 1 else done
                mbarrier.arrive(empty.index(slot), count=1)
            if GROUPS:
                scales = next_scales
        first_step += end - start

        is_last = True
        if SPLITS > 1:
            others, given, taken = handed
            if not STORES:
                at: gl.constexpr = WHO - OWNERS
                mbarrier.wait(taken.index(at), (turn & 1) ^ 1)
                for i in gl.static_range(PIECES):
                    others.index(at * PIECES + i).store(sums[i].to(gl.float32, bitcast=True))
                mbarrier.arrive(given.index(at), count=1)
            else:
                for split in gl.static_range(SPLITS - 1):
                    at: gl.constexpr = split * OWNERS + OWNER
                    mbarrier.wait(given.index(at), turn & 1)
                    both = ()
                    for i in gl.static_range(PIECES):
                        found = others.index(at * PIECES + i).load(layout)
                        both = both + (sums[i] + found.to(SUMS, bitcast=True),)
                    sums = both
                    mbarrier.arrive(taken.index(at), count=1)
            turn += 1
        if items.cut and STORES:
            # Blocks of 8 x 8 values, which a warp writes at a time.
            n_at = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            m_at = gl.arange(0, PIECE, gl.SliceLayout(0, layout))
            where = (n_at // 8 * (PIECE // 8 * 64) + n_at % 8 * 8)[:, None] + (m_at // 8 * 64 + m_at % 8)[None, :]
            own = partial + ((item * OWNERS + OWNER) * PIECES).to(gl.int64) * (ROWS * PIECE)
            for i in gl.static_range(PIECES):
                gl.store(own + i * (ROWS * PIECE) + where, sums[i].to(gl.float32, bitcast=True))
            thread_barrier()
            tile = item % items.tiles
            arrived = gl.atomic_add(counts + (tile * OWNERS + OWNER), 1, sem="acq_rel", scope="gpu")
            is_last = arrived == items.parts - 1
        if is_last and STORES:
            for i in gl.static_range(PIECES):
                sum_of_parts = sums[i]
                if items.cut:
                    sum_of_parts = gl.zeros([ROWS, PIECE], SUMS, layout)
                    for part in range(items.parts):
                        if part == item // items.tiles:
                            sum_of_parts += sums[i]
                        else:
                            other = (tile + part * items.tiles) * OWNERS + OWNER
                            other = partial + (other * PIECES + i).to(gl.int64) * (ROWS * PIECE)
                            sum_of_parts += gl.load(other + where).to(SUMS, bitcast=True)
                cols = tile_m * COLS + i * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, layout))
                own_x_scale = gl.load(x_scale + cols, mask=cols < M, other=0.0)
                scaled = weights.finish(sum_of_parts, own_x_scale, of_rows)
                # The store before has read the staging memory.
                tma.store_wait(0)
                staging.index(OWNER).permute((1, 0)).store(scaled.to(C.dtype))
                fence_async_shared()
                store_block(C, [tile_m * COLS + i * PIECE, first], staging.index(OWNER))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "parts"])
def _int4_int8_many_kernel(
    A, B, C, x_scale, scale, zero_point, bias,
    M, N, K, G, parts, partial_at, counts_at,
    GROUP: gl.constexpr, STAGES: gl.constexpr, CUT: gl.constexpr, PIECES: gl.constexpr, CONSUMERS: gl.constexpr,
    SPLITS: gl.constexpr, GROUP_M: gl.constexpr, REGISTERS: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    """``A``, ``B``, ``C``: tensor maps of x ``[M, K]``, the weight ``[N, K / 2]`` and the output ``[M, N]``.

    Blocks: a tile's rows of x, or of the weight, by the values of a group; a piece's rows of x by a consumer's of the
    weight.
    Behind ``x_scale``, counted in its values, there are at ``partial_at`` float32 for every part of every tile, and at
    ``counts_at`` an int32 zero for the rows of each ``OWNER`` in every tile; neither with one part. ``CUT``: whether
    there are several. ``REGISTERS``: of a thread that multiplies.
    """
    weights = Weights(scale, zero_point, bias, N, G, GROUP, 1.0 / 16 if zero_point is None else 1.0)
    STEP: gl.constexpr = B.block_shape[1]
    SUBS: gl.constexpr = PANEL // STEP
    OWNERS: gl.constexpr = CONSUMERS // SPLITS
    w = gl.allocate_shared_memory(B.dtype, [STAGES * SUBS, B.block_shape[0], STEP], B.layout)
    x = gl.allocate_shared_memory(A.dtype, [STAGES * SUBS * 2, A.block_shape[0], STEP], A.layout)
    ring = (w, x, barriers(STAGES), barriers(STAGES))
    staging = gl.allocate_shared_memory(C.dtype, [OWNERS, C.block_shape[0], C.block_shape[1]], C.layout)
    HANDED: gl.constexpr = OWNERS * (SPLITS - 1)
    if SPLITS > 1:
        plain: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
        shape: gl.constexpr = [HANDED * PIECES, C.block_shape[1], C.block_shape[0]]
        handed = (gl.allocate_shared_memory(gl.float32, shape, plain), barriers(HANDED), barriers(HANDED))
    else:
        handed = (staging, barriers(1), barriers(1))
    ready = barriers(1)
    initialize(ready, 1)
    tiles_m = gl.cdiv(M, A.block_shape[0])
    items = Items(tiles_m, tiles_m * gl.cdiv(N, B.block_shape[0]), gl.cdiv(K, BLOCK), parts, CUT, GROUP_M)
    first = ready.index(0)
    partial = x_scale + partial_at
    counts = (x_scale + counts_at).cast(gl.pointer_type(gl.int32), bitcast=True)
    out = (C, staging, handed, partial, counts)
    # Constants stay constants only in a tuple that is written here.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume_many, (out, x_scale, weights, ring, items, M, first, 0, 2, SPLITS, PIECES)),
                (_consume_many, (out, x_scale, weights, ring, items, M, first, 1, 2, SPLITS, PIECES)),
                (_produce_many, (A, B, weights, ring, items, first, handed, OWNERS, NEXT_EARLY)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume_many, (out, x_scale, weights, ring, items, M, first, 0, 4, SPLITS, PIECES)),
                (_consume_many, (out, x_scale, weights, ring, items, M, first, 1, 4, SPLITS, PIECES)),
                (_consume_many, (out, x_scale, weights, ring, items, M, first, 2, 4, SPLITS, PIECES)),
                (_consume_many, (out, x_scale, weights, ring, items, M, first, 3, 4, SPLITS, PIECES)),
                (_produce_many, (A, B, weights, ring, items, first, handed, OWNERS, NEXT_EARLY)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )
