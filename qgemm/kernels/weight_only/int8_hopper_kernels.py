"""int4 weights by int8 rows for Hopper (sm_90).

``C[m, n] = x_scale[m] * sum over g of sums[m, n, g] * w_scale[n, g]``, plus ``bias[n]``, rounded once. ``sums`` are
exact int32 over the values of group ``g``, or of the whole row, with one scale. Weights are packed as
``qgemm.numerics.packing`` says: 128 bytes of a row have in their low nibbles one group of 128, in their high ones the
next. ``K`` is a multiple of 128.

The operands are swapped: rows of the weight are the rows of a tensor core's instruction, rows of ``x`` its columns. So
packed weights go from shared memory to registers and become int8 there, three instructions for eight: 16 times the
value, or with zero points the difference itself. The 16 is taken out of the row's scale, exactly.

There are two kernels. Few rows: programs have 16 or 32 rows of the weight, so that all multiprocessors have as many;
each warp has another part of K, with the smaller instructions. More rows: ``wgmma``, with A in registers; groups of
four warps, each with rows of its own, multiply while the other one scales. Where there are few tiles, K is cut in
parts, and who comes last adds them up in their order. docs/performance.md: what they reach and why.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.quantize.hopper_kernels import SharedRows
from qgemm.kernels.stages.aggregate import OPTIONAL, aggregate
from qgemm.kernels.stages.ring import (
    PANEL,
    PRODUCER_REGISTERS,
    barriers,
    initialize,
    load_block,
    store_block,
    thread_barrier,
)
from qgemm.kernels.stages.rows import RowQuantization, StridedRow, quantize_blocks

BLOCK = gl.constexpr(256)  # values along K of a row that ``PANEL`` bytes hold
MIN_COLS = gl.constexpr(8)  # that tensor cores multiply
IN_FLIGHT = gl.constexpr(2)  # products that a group of warps has in flight
QUANTIZING_REGISTERS = gl.constexpr(80)  # of a producer's thread that may have to quantize


@aggregate
class Weights:
    """What belongs to a weight but its values: scales ``[N, G]``, zero points of that shape or None, and the bias.

    ``group``: how many values share a scale, 128 or a part of it; 0 for all of a row.
    """

    scale: gl.tensor
    zero_point: OPTIONAL
    bias: OPTIONAL
    N: gl.tensor
    G: gl.tensor
    group: gl.constexpr
    excess: gl.constexpr
    """What products are multiplied by: 1, or 1 / 16."""

    @gluon.jit
    def scales(self, rows, g):
        """The scales of group ``g`` of ``rows``, and zeros beyond the weight's."""
        mask = (rows < self.N) & (g < self.G)
        return gl.load(self.scale + (rows * self.G + g), mask=mask, other=0.0).to(gl.float32)

    @gluon.jit
    def scales_of_block(self, rows, block, GROUPS: gl.constexpr):
        """The scales of the ``GROUPS`` groups of a block of K."""
        scales = ()
        for i in gl.static_range(GROUPS):
            scales = scales + (self.scales(rows, block * GROUPS + i),)
        return scales

    @gluon.jit
    def unpacked(self, packed, rows, g, HALF: gl.constexpr):
        """int8 of the low or high nibbles of ``packed``, which are group ``g`` of ``rows``.

        16 times the value; or the value less the zero point.
        """
        if self.zero_point is None:
            return _low(packed) if HALF == 0 else _high(packed)
        else:
            group = g if self.group else g * 0
            mask = (rows < self.N) & (group < self.G)
            zeros = (gl.load(self.zero_point + (rows * self.G + group), mask=mask, other=0) + 8).to(gl.uint8)
            LAYOUT: gl.constexpr = packed.type.layout
            SHAPE: gl.constexpr = packed.type.shape
            zeros = zeros + gl.zeros(SHAPE, gl.uint8, LAYOUT)
            return _low_less(packed, zeros) if HALF == 0 else _high_less(packed, zeros)

    @gluon.jit
    def of_rows(self, rows):
        """What ``finish`` needs of ``rows``: their scale, if each has a single one, and their bias, if there is one."""
        found = ()
        if self.group == 0:
            found = found + (gl.load(self.scale + rows, mask=rows < self.N, other=0.0).to(gl.float32),)
        if self.bias is not None:
            found = found + (gl.load(self.bias + rows, mask=rows < self.N, other=0.0).to(gl.float32),)
        return found

    @gluon.jit
    def finish(self, sums, x_scale, of_rows):
        """The float32 outputs of ``sums [rows, M]``, with M scales; of whole rows they are integers."""
        if self.group == 0:
            sums = sums.to(gl.float32) * of_rows[0][:, None]
        out = sums * (x_scale * self.excess)[None, :]
        if self.bias is not None:
            out += of_rows[-1][:, None]
        return out


@gluon.jit
def _low(packed):
    asm: gl.constexpr = "{.reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0xF0F0F0F0;}"
    return gl.inline_asm_elementwise(asm, "=r,r", [packed], gl.int8, True, 4)


@gluon.jit
def _high(packed):
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0xF0F0F0F0;", "=r,r", [packed], gl.int8, True, 4)


@gluon.jit
def _low_less(packed, zeros):
    # ``zeros``: 8 more than they are. The eighth bit keeps a borrow from the next byte.
    asm: gl.constexpr = (
        "{.reg .b32 t; and.b32 t, $1, 0x0F0F0F0F; xor.b32 t, t, 0x88888888; sub.u32 t, t, $2; "
        "xor.b32 $0, t, 0x80808080;}"
    )
    return gl.inline_asm_elementwise(asm, "=r,r,r", [packed, zeros], gl.int8, True, 4)


@gluon.jit
def _high_less(packed, zeros):
    asm: gl.constexpr = (
        "{.reg .b32 t; shr.u32 t, $1, 4; and.b32 t, t, 0x0F0F0F0F; xor.b32 t, t, 0x88888888; "
        "sub.u32 t, t, $2; xor.b32 $0, t, 0x80808080;}"
    )
    return gl.inline_asm_elementwise(asm, "=r,r,r", [packed, zeros], gl.int8, True, 4)


@gluon.jit
def _floats(sums):
    """float32 of int32 below 2^22, exactly.

    Conversions run at an eighth of the rate of additions, so three of four values become the last bits of 1.5 * 2^23,
    which is then subtracted.
    """
    asm: gl.constexpr = (
        "{.reg .b32 t; .reg .f32 f; cvt.rn.f32.s32 $0, $4; "
        "add.s32 t, $5, 0x4B400000; mov.b32 f, t; add.rn.f32 $1, f, 0fCB400000; "
        "add.s32 t, $6, 0x4B400000; mov.b32 f, t; add.rn.f32 $2, f, 0fCB400000; "
        "add.s32 t, $7, 0x4B400000; mov.b32 f, t; add.rn.f32 $3, f, 0fCB400000;}"
    )
    return gl.inline_asm_elementwise(asm, "=f,=f,=f,=f,r,r,r,r", [sums], gl.float32, True, 4)


# Few rows.


@aggregate
class OwnRow:
    """A single row of x, which each program quantizes for itself: of ``steps`` times what all warps multiply."""

    x: gl.tensor
    K: gl.tensor
    stride: gl.tensor
    steps: gl.constexpr

    @gluon.jit
    def quantize(self, q):
        """Quantizes the row to ``q`` in shared memory, with zeros behind it, and returns its scale.

        ``q``: of every step the parts of each warp's block of K.
        """
        WARPS: gl.constexpr = q.shape[1]
        STEP: gl.constexpr = q.shape[2]
        PARTS: gl.constexpr = BLOCK // STEP
        LENGTH: gl.constexpr = WARPS * STEP
        layout: gl.constexpr = gl.BlockedLayout([STEP // 32], [32], [WARPS], [0])
        source = StridedRow(self.x, self.K, self.stride)
        index = gl.arange(0, LENGTH, layout)
        index = index // STEP * BLOCK + index % STEP
        parts = ()
        for i in gl.static_range(self.steps * PARTS):
            parts = parts + (source.load(i // PARTS * (WARPS * BLOCK) + i % PARTS * STEP + index),)
        scale, values = quantize_blocks(parts, RowQuantization(None), self.steps * PARTS)
        for i in gl.static_range(self.steps * PARTS):
            q.index(i).store(values[i].reshape([WARPS, STEP]))
        thread_barrier()
        return scale


@gluon.jit
def _load_x(A, barrier, lows, highs, slot, k):
    """Starts loading the halves of the blocks of K from ``k`` on."""
    STEP: gl.constexpr = lows.shape[3]
    SUBS: gl.constexpr = PANEL // STEP
    for i in gl.static_range(SUBS):
        load_block(A, [k, 0, i * STEP], barrier, lows.index(slot * SUBS + i))
        load_block(A, [k, 0, PANEL + i * STEP], barrier, highs.index(slot * SUBS + i))


@gluon.jit
def _produce_few(A, B, rows, ring, N, steps, ready, x_ready, RESIDENT: gl.constexpr, NEXT_EARLY: gl.constexpr):
    """``A``: None where nothing is to be loaded of x."""
    w, lows, highs, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    WARPS: gl.constexpr = w.shape[1]
    ROWS: gl.constexpr = w.shape[2]
    STEP: gl.constexpr = w.shape[3]
    SUBS: gl.constexpr = PANEL // STEP
    STREAMS: gl.constexpr = A is not None and not RESIDENT
    SIZE: gl.constexpr = SUBS * (B.block_type.nbytes + (2 * A.block_type.nbytes if STREAMS else 0))
    if NEXT_EARLY:
        gdc_launch_dependents()
    initialize(full, STAGES)
    initialize(empty, STAGES)
    if RESIDENT:
        initialize(x_ready, 1)
    if rows is None:
        mbarrier.arrive(ready, count=1)
    start, stride = gl.program_id(0), gl.num_programs(0)
    total = gl.cdiv(gl.cdiv(N, ROWS) - start, stride) * steps
    ahead = gl.minimum(total, STAGES)
    for step in range(ahead):
        mbarrier.expect(full.index(step), SIZE)
        tile = start + step // steps * stride
        for i in gl.static_range(SUBS):
            load_block(B, [step % steps * WARPS, tile * ROWS, i * STEP], full.index(step), w.index(step * SUBS + i))
    # Nothing else is read before the kernel ahead in the stream has ended; see Launch.
    gdc_wait()
    if rows is not None:
        rows.wait_for_all(ready)
    if RESIDENT:
        mbarrier.expect(x_ready.index(0), lows.shape[0] * 2 * A.block_type.nbytes)
        for k in range(lows.shape[0] // SUBS):
            _load_x(A, x_ready.index(0), lows, highs, k, k * WARPS)
    step = 0
    for tile in range(start, gl.cdiv(N, ROWS), stride):
        for k in range(steps):
            slot = step % STAGES
            if step >= ahead:
                mbarrier.wait(empty.index(slot), (step // STAGES + 1) & 1)
                mbarrier.expect(full.index(slot), SIZE)
                for i in gl.static_range(SUBS):
                    load_block(B, [k * WARPS, tile * ROWS, i * STEP], full.index(slot), w.index(slot * SUBS + i))
            if STREAMS:
                _load_x(A, full.index(slot), lows, highs, slot, k * WARPS)
            step += 1
    if not NEXT_EARLY:
        gdc_launch_dependents()
    if rows is not None:
        rows.forget(ready)


@gluon.jit
def _consume_few(C, x_scale, weights, rows, row, ring, M, stride_cm, steps, ready, x_ready, RESIDENT: gl.constexpr):
    """``rows``: the ``SharedRows`` that x is to hold; ``row``: its ``OwnRow``; None where it is quantized already."""
    w, lows, highs, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    WARPS: gl.constexpr = w.shape[1]
    ROWS: gl.constexpr = w.shape[2]
    STEP: gl.constexpr = w.shape[3]
    SUBS: gl.constexpr = PANEL // STEP
    COLS: gl.constexpr = MIN_COLS if row is not None else lows.shape[2]
    GROUPS: gl.constexpr = weights.group > 0
    SUMS: gl.constexpr = gl.float32 if GROUPS else gl.int32
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, layout, 4)
    # A thread has the sums of all warps of its outputs; threads side by side have rows side by side.
    LANES: gl.constexpr = min(ROWS, 32)
    gathered: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, LANES, 32 // LANES], [1, 1, WARPS], [1, 2, 0])
    out_layout: gl.constexpr = gl.SliceLayout(0, gathered)

    own_rows = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :]
    block = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None]
    a_rows = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, a_layout)))[None, :, None]
    a_block = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, a_layout)))[:, None, None]
    out_rows = gl.arange(0, ROWS, gl.SliceLayout(1, out_layout))
    m = gl.arange(0, COLS, gl.SliceLayout(0, out_layout))
    start, stride = gl.program_id(0), gl.num_programs(0)
    scales = ()
    if GROUPS:
        scales = weights.scales_of_block(start * ROWS + own_rows, block, 2 * SUBS)
    of_rows = weights.of_rows(start * ROWS + out_rows)
    gdc_wait()
    if rows is not None:
        rows.quantize_own(ready)
    mbarrier.wait(ready, 0)
    if RESIDENT:
        mbarrier.wait(x_ready.index(0), 0)
    if row is not None:
        own_x_scale = row.quantize(lows) + gl.zeros([COLS], gl.float32, gl.SliceLayout(0, out_layout))
    else:
        own_x_scale = gl.load(x_scale + m, mask=m < M, other=0.0)
    step = 0
    for tile in range(start, gl.cdiv(weights.N, ROWS), stride):
        sums = gl.zeros([WARPS, ROWS, COLS], SUMS, layout)
        for k in range(steps):
            slot = step % STAGES
            if GROUPS:
                # Those of the next step: from memory they take as long as a step.
                ends = k + 1 == steps
                following = gl.where(ends, tile + stride, tile) * ROWS + own_rows
                next_scales = weights.scales_of_block(following, gl.where(ends, 0, k + 1) * WARPS + block, 2 * SUBS)
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            for part in gl.static_range(2 * SUBS):
                packed = w.index(slot * SUBS + part % SUBS).load(a_layout)
                if row is not None:
                    values = lows.index(k * 2 * SUBS + part).load(gl.SliceLayout(2, b_layout))[:, :, None]
                    b = gl.broadcast(values, gl.zeros([WARPS, STEP, COLS], gl.int8, b_layout))[0]
                else:
                    halves = lows if part < SUBS else highs
                    x = halves.index((k if RESIDENT else slot) * SUBS + part % SUBS)
                    b = x.permute((0, 2, 1)).load(b_layout)
                group = (k * WARPS + a_block) * 2 * SUBS + part
                a = weights.unpacked(packed, tile * ROWS + a_rows, group, part // SUBS)
                if GROUPS:
                    made = mma_v2(a, b, gl.zeros([WARPS, ROWS, COLS], gl.int32, layout))
                    sums = gl.fma(_floats(made), gl.broadcast(scales[part][:, :, None], sums)[0], sums)
                else:
                    sums = mma_v2(a, b, sums)
            mbarrier.arrive(empty.index(slot), count=1)
            if GROUPS:
                scales = next_scales
            step += 1
        total = gl.sum(gl.convert_layout(sums, gathered), 0)
        n = tile * ROWS + out_rows
        out = weights.finish(total, own_x_scale, of_rows)
        of_rows = weights.of_rows(n + stride * ROWS)
        at = C + m[None, :] * stride_cm + n[:, None]
        gl.store(at, out.to(C.dtype.element_ty), mask=(n < weights.N)[:, None] & (m < M)[None, :])


@gluon.jit
def _few(
    A, B, C, x_scale, weights, rows, row, M, K, stride_cm,
    STAGES: gl.constexpr, RESIDENT_STEPS: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = B.block_shape[0]
    RESIDENT: gl.constexpr = RESIDENT_STEPS > 0
    STEP: gl.constexpr = B.block_shape[2]
    SUBS: gl.constexpr = PANEL // STEP
    w = gl.allocate_shared_memory(B.dtype, [STAGES * SUBS, WARPS, B.block_shape[1], STEP], B.layout)
    if row is not None:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        lows = gl.allocate_shared_memory(gl.int8, [row.steps * 2 * SUBS, WARPS, STEP], plain)
        highs = lows
    else:
        X_SLOTS: gl.constexpr = (RESIDENT_STEPS if RESIDENT else STAGES) * SUBS
        lows = gl.allocate_shared_memory(A.dtype, [X_SLOTS, WARPS, A.block_shape[1], STEP], A.layout)
        highs = gl.allocate_shared_memory(A.dtype, [X_SLOTS, WARPS, A.block_shape[1], STEP], A.layout)
    ring = (w, lows, highs, barriers(STAGES), barriers(STAGES))
    # Completes when the ring's are initialized and all rows quantized.
    ready = barriers(1)
    initialize(ready, 1, 2 if rows is not None else 1)
    x_ready = barriers(1) if RESIDENT else ready
    steps = gl.cdiv(K, WARPS * BLOCK)
    first = ready.index(0)
    if rows is None:
        REGISTERS: gl.constexpr = PRODUCER_REGISTERS
    else:
        REGISTERS: gl.constexpr = QUANTIZING_REGISTERS
    gl.warp_specialize(
        [
            (_consume_few, (C, x_scale, weights, rows, row, ring, M, stride_cm, steps, first, x_ready, RESIDENT)),
            (_produce_few, (A, B, rows, ring, weights.N, steps, first, x_ready, RESIDENT, NEXT_EARLY)),
        ],
        [1],
        [REGISTERS],
    )


@gluon.jit(do_not_specialize=["M"])
def _int4_int8_few_kernel(
    A, B, C, x_scale, scale, zero_point, bias,
    M, N, K, G, stride_cm,
    GROUP: gl.constexpr, STAGES: gl.constexpr, RESIDENT_STEPS: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    """``A``, ``B``: tensor maps of x as ``[K / 256, M, 256]`` and of the weight as ``[K / 256, N, 128]``.

    Their blocks: a block of K for each warp, by 8 or 16 rows of x, or the rows of a tile, and as many bytes as a group
    has values, at most ``PANEL``. ``C [M, N]``: with contiguous columns. ``RESIDENT_STEPS``: as many steps as K takes,
    if all of x is to stay in shared memory; else 0.
    """
    weights = Weights(scale, zero_point, bias, N, G, GROUP, 1.0 / 16 if zero_point is None else 1.0)
    _few(A, B, C, x_scale, weights, None, None, M, K, stride_cm, STAGES, RESIDENT_STEPS, NEXT_EARLY)


@gluon.jit(do_not_specialize=["M"])
def _int4_int8_layer_kernel(
    x, q, q_scale, B, C, scale, zero_point, bias, A, counts,
    M, N, K, G, stride_xm, stride_xk, stride_cm,
    ROW: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, RESIDENT_STEPS: gl.constexpr,
    NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    """The layer in one launch: the programs quantize the rows of ``x`` together, as ``SharedRows`` says."""
    weights = Weights(scale, zero_point, bias, N, G, GROUP, 1.0 / 16 if zero_point is None else 1.0)
    rows = SharedRows(x, q, q_scale, RowQuantization(None), counts, M, K, stride_xm, stride_xk, ROW)
    _few(A, B, C, q_scale, weights, rows, None, M, K, stride_cm, STAGES, RESIDENT_STEPS, NEXT_EARLY)


@gluon.jit
def _int4_int8_row_kernel(
    x, B, C, scale, zero_point, bias,
    N, K, G, stride_xk,
    STEPS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    """The layer of a single row in one launch: every program quantizes it for itself.

    ``STEPS``: how often a warp multiplies 256 values of it.
    """
    weights = Weights(scale, zero_point, bias, N, G, GROUP, 1.0 / 16 if zero_point is None else 1.0)
    row = OwnRow(x, K, stride_xk, STEPS)
    _few(None, B, C, None, weights, None, row, 1, K, N, STAGES, 0, NEXT_EARLY)


# More rows.


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
    parts: gl.constexpr
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
        return part * self.blocks // self.parts, (part + 1) * self.blocks // self.parts


@gluon.jit
def _load_many(A, barrier, to, slot, row, at, WIDTH: gl.constexpr):
    """Starts loading the block of ``WIDTH`` bytes at ``(row, at)``, in panels as wide as those of ``to``."""
    STEP: gl.constexpr = to.shape[2]
    PANELS: gl.constexpr = WIDTH // STEP
    for i in gl.static_range(PANELS):
        load_block(A, [row, at + i * STEP], barrier, to.index(slot * PANELS + i))


@gluon.jit
def _produce_many(A, B, ring, items, ready, handed, READERS: gl.constexpr, NEXT_EARLY: gl.constexpr):
    """``READERS``: how many consumers read each block."""
    w, x, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = w.shape[1]
    COLS: gl.constexpr = x.shape[1]
    SIZE: gl.constexpr = PANEL // B.block_shape[1] * (B.block_type.nbytes + 2 * A.block_type.nbytes)
    if NEXT_EARLY:
        gdc_launch_dependents()
    initialize(full, STAGES)
    initialize(empty, STAGES, READERS)
    if READERS == 1:
        initialize(handed[1], 1)
        initialize(handed[2], 1)
    mbarrier.arrive(ready, count=1)
    start, stride = gl.program_id(0), gl.num_programs(0)
    m, n = items.tile(start)
    k, end = items.range_of(start)
    ahead = gl.minimum(end - k, STAGES)
    for step in range(ahead):
        mbarrier.expect(full.index(step), SIZE)
        _load_many(B, full.index(step), w, step, n * ROWS, (k + step) * PANEL, PANEL)
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
            step += 1
    if not NEXT_EARLY:
        gdc_launch_dependents()


@gluon.jit
def _consume_many(
    out, x_scale, weights, ring, items, M, ready,
    WHO: gl.constexpr, CONSUMERS: gl.constexpr, PIECES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """``PIECES``: in how many pieces the columns are multiplied and scaled.

    ``SPLIT``: whether consumers have every second block of K, and not each half of the rows. The second one hands its
    sums over, in ``handed``, to the first.
    """
    C, staging, handed, partial, counts = out
    w, x, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = w.shape[1] if SPLIT else w.shape[1] // CONSUMERS
    FIRST_ROW: gl.constexpr = 0 if SPLIT else WHO * ROWS
    FIRST_BLOCK: gl.constexpr = WHO if SPLIT else 0
    STORES: gl.constexpr = WHO == 0 or not SPLIT
    OWNERS: gl.constexpr = 1 if SPLIT else CONSUMERS  # of a tile's sums
    BLOCKS: gl.constexpr = CONSUMERS if SPLIT else 1  # from one to the next
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
        sums = ()
        for _piece in gl.static_range(PIECES):
            sums = sums + (gl.zeros([ROWS, PIECE], SUMS, layout),)
        for k in range(start + FIRST_BLOCK, end, BLOCKS):
            if GROUPS:
                # Those of the next step: from memory they take as long as a step.
                ends = k + BLOCKS >= end
                following = gl.where(ends, next_n, tile_n) * w.shape[1] + own_rows
                next_block = gl.where(ends, next_start + FIRST_BLOCK, k + BLOCKS)
                next_scales = weights.scales_of_block(following, next_block, 2 * SUBS)
            step = first_step + k - start
            slot = step % STAGES
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            values = ()
            for part in gl.static_range(2 * SUBS):
                packed = w.index(slot * SUBS + part % SUBS).slice(FIRST_ROW, ROWS).load(a_layout)
                values = values + (weights.unpacked(packed, a_rows, k * 2 * SUBS + part, part // SUBS),)
            if GROUPS:
                # Registers of A aren't written again before all products have read them: nothing is in flight where
                # the next step begins.
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
                        zero = gl.zeros([ROWS, PIECE], gl.int32, layout)
                        product = warpgroup_mma(values[unit // PIECES], b, zero, use_acc=False, is_async=True)
                        products = products + (product,)
                    if unit >= IN_FLIGHT:
                        scale = gl.broadcast(scales[(unit - IN_FLIGHT) // PIECES][:, None], sums[0])[0]
                        # The piece that is next comes first.
                        sums = sums[1:] + (gl.fma(_floats(made), scale, sums[0]),)
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
        if SPLIT:
            others, given, taken = handed
            if WHO == 1:
                mbarrier.wait(taken.index(0), (turn & 1) ^ 1)
                for i in gl.static_range(PIECES):
                    others.index(i).store(sums[i].to(gl.float32, bitcast=True))
                mbarrier.arrive(given.index(0), count=1)
            else:
                mbarrier.wait(given.index(0), turn & 1)
                both = ()
                for i in gl.static_range(PIECES):
                    both = both + (sums[i] + others.index(i).load(layout).to(SUMS, bitcast=True),)
                sums = both
                mbarrier.arrive(taken.index(0), count=1)
            turn += 1
        if items.parts > 1 and STORES:
            # Blocks of 8 x 8 values, which a warp writes at a time.
            N_AT = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            M_AT = gl.arange(0, PIECE, gl.SliceLayout(0, layout))
            at = (N_AT // 8 * (PIECE // 8 * 64) + N_AT % 8 * 8)[:, None] + (M_AT // 8 * 64 + M_AT % 8)[None, :]
            own = partial + ((item * OWNERS + WHO) * PIECES).to(gl.int64) * (ROWS * PIECE)
            for i in gl.static_range(PIECES):
                gl.store(own + i * (ROWS * PIECE) + at, sums[i].to(gl.float32, bitcast=True))
            thread_barrier()
            tile = item % items.tiles
            arrived = gl.atomic_add(counts + (tile * OWNERS + WHO), 1, sem="acq_rel", scope="gpu")
            is_last = arrived == items.parts - 1
        if is_last and STORES:
            for i in gl.static_range(PIECES):
                sum_of_parts = sums[i]
                if items.parts > 1:
                    sum_of_parts = gl.zeros([ROWS, PIECE], SUMS, layout)
                    for part in gl.static_range(items.parts):
                        other = (tile + part * items.tiles) * OWNERS + WHO
                        other = partial + (other * PIECES + i).to(gl.int64) * (ROWS * PIECE)
                        sum_of_parts += gl.load(other + at).to(SUMS, bitcast=True)
                cols = tile_m * COLS + i * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, layout))
                own_x_scale = gl.load(x_scale + cols, mask=cols < M, other=0.0)
                scaled = weights.finish(sum_of_parts, own_x_scale, of_rows)
                # The store before has read the staging memory.
                tma.store_wait(0)
                staging.permute((1, 0)).store(scaled.to(C.dtype))
                fence_async_shared()
                store_block(C, [tile_m * COLS + i * PIECE, first], staging)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def _int4_int8_many_kernel(
    A, B, C, x_scale, scale, zero_point, bias,
    M, N, K, G, partial_at, counts_at,
    GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, PIECES: gl.constexpr, SPLIT: gl.constexpr,
    GROUP_M: gl.constexpr, REGISTERS: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    """``A``, ``B``, ``C``: tensor maps of x ``[M, K]``, the weight ``[N, K / 2]`` and the output ``[M, N]``.

    Blocks: a tile's rows of x, or of the weight, by the values of a group; a piece's rows of x by a consumer's of the
    weight.
    Behind ``x_scale``, counted in its values, there are at ``partial_at`` float32 for every part of every tile, and at
    ``counts_at`` an int32 zero for each consumer's rows of every tile; neither with one part. ``REGISTERS``: of a
    thread that multiplies.
    """
    CONSUMERS: gl.constexpr = 2
    weights = Weights(scale, zero_point, bias, N, G, GROUP, 1.0 / 16 if zero_point is None else 1.0)
    STEP: gl.constexpr = B.block_shape[1]
    SUBS: gl.constexpr = PANEL // STEP
    w = gl.allocate_shared_memory(B.dtype, [STAGES * SUBS, B.block_shape[0], STEP], B.layout)
    x = gl.allocate_shared_memory(A.dtype, [STAGES * SUBS * 2, A.block_shape[0], STEP], A.layout)
    ring = (w, x, barriers(STAGES), barriers(STAGES))
    staging = gl.allocate_shared_memory(C.dtype, C.block_shape, C.layout)
    if SPLIT:
        PIECE: gl.constexpr = C.block_shape[0]
        plain: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
        others = gl.allocate_shared_memory(gl.float32, [PIECES, B.block_shape[0], PIECE], plain)
        handed = (others, barriers(1), barriers(1))
        other_staging = staging
    else:
        handed = ()
        other_staging = gl.allocate_shared_memory(C.dtype, C.block_shape, C.layout)
    READERS: gl.constexpr = 1 if SPLIT else CONSUMERS
    ready = barriers(1)
    initialize(ready, 1)
    tiles_m = gl.cdiv(M, A.block_shape[0])
    items = Items(tiles_m, tiles_m * gl.cdiv(N, B.block_shape[0]), gl.cdiv(K, BLOCK), PARTS, GROUP_M)
    first = ready.index(0)
    partial = x_scale + partial_at
    counts = (x_scale + counts_at).cast(gl.pointer_type(gl.int32), bitcast=True)
    out = (C, staging, handed, partial, counts)
    other_out = (C, other_staging, handed, partial, counts)
    # Constants stay constants only in a tuple that is written here.
    gl.warp_specialize(
        [
            (_consume_many, (out, x_scale, weights, ring, items, M, first, 0, 2, PIECES, SPLIT)),
            (_consume_many, (other_out, x_scale, weights, ring, items, M, first, 1, 2, PIECES, SPLIT)),
            (_produce_many, (A, B, ring, items, first, handed, READERS, NEXT_EARLY)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )
