"""The products of ``tiles_hopper_kernels.py``: x times blocks of the stored weight, unpacked in registers. In Gluon.

``wgmma`` reads its operand A, the weight, from registers. There are two orders:

- block by block (``multiply``): all panels of a block are unpacked and their products started before one is waited for.
  For 4 bits with up to 128 rows of x, and for sums that are scaled by groups.
- panel by panel (``multiply_in_turn``): each panel is unpacked while the products of the one before run. For more rows
  of x, whose sums leave fewer registers, for 8-bit values, and where scales and zero points take many registers.

Panels of 160 and 192 rows of x consist of two pieces, each with its own accumulator (``Tiles.widths``).

Registers of the weight are rewritten only after a wait for all products that read them. Assemblers before CUDA 13.3 may
still move such a write too early; ``test_compile.py`` looks for that in the machine code.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.runtime.jit import constexpr_function

from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.ring import load_block
from qgemm.kernels.stages.unpack import (
    SCALED_BY,
    codes_of_pairs,
    factors_of_codes,
    multiply_add,
    of_codes,
    unpack_pairs,
    unpack_times,
    unpack_times_scale,
    widen_pairs,
)
from qgemm.kernels.weight_only.kernels import BLOCK, scale_value
from qgemm.kernels.weight_only.tiles_hopper_factors import (
    PANEL,
    first_group,
    load_factors,
    load_next,
    of_groups,
    parts_of,
    spread,
)


@constexpr_function
def how_scaled(form, tile, scale, dtype):
    """What the scales of groups multiply; "" if a scale belongs to a whole row.

    "sums": the sums of groups. "values": the unpacked values, before the first products are started. "codes": codes
    as they are unpacked, by one product with all that they lack, or a multiply-add that also subtracts their offset.
    """
    if form.group == 0:
        return ""
    by_code = {"int4": gl.bfloat16, "fp4": scale if scale.primitive_bitwidth == 8 else None}.get(form.name)
    if not form.has_zeros and dtype == gl.bfloat16 and scale == by_code:
        return "codes"
    if form.group < BLOCK.value or form.float_zeros:
        return "values"
    return "sums" if tile.sums else "values"


@constexpr_function
def precision_of_scales(form, scale, zero, dtype):
    """``form.precision``. Exponents and e4m3 are exact in bfloat16. ``zero``: the dtype of zero points, or None."""
    exact = scale == dtype or (scale.primitive_bitwidth == 8 and dtype == gl.bfloat16)
    return form.precision(exact and (not form.float_zeros or zero == dtype), dtype == gl.bfloat16)


@constexpr_function
def left_over(form, scaled, dtype):
    """The factor that unpacked values still lack; sums are multiplied by it in the end."""
    if scaled == "codes":
        return 1 / SCALED_BY.value
    return of_codes(form.name, dtype, 0)[2] if form.name in ("int4", "int8") else 1.0


@constexpr_function
def accumulator_layout(columns):
    """The layout of a warp group's sums, ``[64, columns]``."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@constexpr_function
def factors_layout(form, tile, scale, dtype):
    """The layout of a vector of scales: that of values, as zero points have, unless scales multiply sums."""
    mma = accumulator_layout(tile.widths[0])
    return gl.SliceLayout(1, mma if how_scaled(form, tile, scale, dtype) == "sums" else gl.DotOperandLayout(0, mma, 2))


@aggregate
class Rings:
    """Slots of shared memory for panels of x and blocks of the weight, used in turn, with the barriers that count them.

    As in ``Ring``, but x and the weight have separate steps. ``x_rest``: the second piece of x, if a tile has two.
    """

    x: gl.shared_memory_descriptor
    x_rest: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    x_full: gl.shared_memory_descriptor
    x_empty: gl.shared_memory_descriptor
    w_full: gl.shared_memory_descriptor
    w_empty: gl.shared_memory_descriptor

    @gluon.jit
    def load_weight(self, W, slot, col, block):
        """Starts loading a block of the weight; each of the two warp groups gets half of its rows."""
        mbarrier.expect(self.w_full.index(slot), 2 * W.block_type.nbytes)
        for i in gl.static_range(2):
            load_block(W, [col + i * 64, block * (BLOCK // 2)], self.w_full.index(slot), self.w.index(slot * 2 + i))

    @gluon.jit
    def wait_for_weight(self, step):
        """Waits for a block."""
        DEPTH: gl.constexpr = self.w_full.shape[0]
        mbarrier.wait(self.w_full.index(step % DEPTH), step // DEPTH & 1)

    @gluon.jit
    def packed(self, step, half: gl.constexpr, WHO: gl.constexpr, mma: gl.constexpr):
        """Half a block's bytes, as pairs, for the rows of warp group ``WHO``."""
        slot = self.w.index(step % self.w_full.shape[0] * 2 + WHO)
        return slot.slice(half * 32, 32, 1).load(gl.DotOperandLayout(0, mma, 1))

    @gluon.jit
    def release_weight(self, step):
        """Marks the slot of a block as read."""
        mbarrier.arrive(self.w_empty.index(step % self.w_full.shape[0]), count=1)

    @gluon.jit
    def wait_for_x(self, step):
        """Waits for the panels of a slot."""
        DEPTH: gl.constexpr = self.x_full.shape[0]
        mbarrier.wait(self.x_full.index(step % DEPTH), step // DEPTH & 1)

    @gluon.jit
    def load_x(self, X, row, k, full, panel, TILE: gl.constexpr):
        """Starts loading a panel of x, as many rows at a time as the map's blocks have."""
        WIDTHS: gl.constexpr = TILE.widths
        PART: gl.constexpr = X.block_shape[0]
        for part in gl.static_range(WIDTHS[0] // PART):
            load_block(X, [row + part * PART, k], full, self.x.index(panel).slice(part * PART, PART))
        if len(WIDTHS) > 1:
            load_block(X, [row + WIDTHS[0], k], full, self.x_rest.index(panel))

    @gluon.jit
    def panel_of_x(self, step, PART: gl.constexpr, TILE: gl.constexpr):
        """Panel ``PART`` of a slot, a piece for each accumulator, as ``wgmma`` reads its operand B."""
        panel = step % TILE.x_depth * TILE.panels + PART
        x = (self.x.index(panel).permute((1, 0)),)
        if len(TILE.widths) > 1:
            x = x + (self.x_rest.index(panel).permute((1, 0)),)
        return x

    @gluon.jit
    def release_x(self, step):
        """Marks the slot of panels of x as read."""
        mbarrier.arrive(self.x_empty.index(step % self.x_full.shape[0]), count=1)


@gluon.jit
def _multiply(w, x, accs, ADDS: gl.constexpr = True):
    """Starts the products of a panel of the weight with one of x; they are added to ``accs`` if ``ADDS``."""
    sums = ()
    for i in gl.static_range(len(x)):
        a = gl.convert_layout(w, gl.DotOperandLayout(0, accumulator_layout(x[i].shape[1]), 2), assert_trivial=True)
        sums = sums + (warpgroup_mma(a, x[i], accs[i], use_acc=ADDS, is_async=True),)
    return sums


@gluon.jit
def _settle(PANELS: gl.constexpr, accs):
    """``accs``, once only products of the last ``PANELS`` panels are in flight."""
    if len(accs) == 1:
        return (warpgroup_mma_wait(PANELS, deps=accs),)
    else:
        return warpgroup_mma_wait(PANELS * 2, deps=accs)


@gluon.jit
def _unpacked(
    packed, INDEX: gl.constexpr, zeros, ZERO: gl.constexpr, DTYPE: gl.constexpr, FORM: gl.constexpr, TILE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """A panel of a block without scales, divided by ``left_over``; integer zero points are subtracted."""
    FORMAT: gl.constexpr = FORM.name
    HALF: gl.constexpr = INDEX // 2 if FORM.bits == 4 else 0
    if FORMAT == "int4" or FORMAT == "int8":
        # One multiply-add for two values.
        OF_CODES: gl.constexpr = of_codes(FORMAT, DTYPE, HALF)
        FACTOR: gl.constexpr = OF_CODES[0]
        STEP: gl.constexpr = -1 / OF_CODES[2]
        MINUS: gl.constexpr = OF_CODES[1] * STEP
        w = gl.convert_layout(codes_of_pairs(packed, HALF, FORMAT, DTYPE), LAYOUT, assert_trivial=True)
        if FORM.has_zeros and not FORM.float_zeros:
            own = ()
            each = of_groups(zeros, INDEX, ZERO, FORM, TILE)
            for i in gl.static_range(len(each)):
                own = own + ((each[i].to(gl.float32) * STEP + MINUS).to(DTYPE),)
            minus = spread(own, w)
        else:
            minus = gl.full(w.shape, MINUS, DTYPE, LAYOUT)
        return multiply_add(w, gl.full(w.shape, FACTOR, DTYPE, LAYOUT), minus)
    else:
        w = unpack_pairs(packed, FORMAT, DTYPE)[HALF] if FORM.bits == 4 else widen_pairs(packed, DTYPE)
        return gl.convert_layout(w, LAYOUT, assert_trivial=True)


@gluon.jit
def _values(
    packed, INDEX: gl.constexpr, factors, zeros, SCALE: gl.constexpr, ZERO: gl.constexpr, DTYPE: gl.constexpr,
    mma: gl.constexpr, FORM: gl.constexpr, TILE: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """A panel of a block, 64 values of K, in the layout of ``wgmma``'s operand A, divided by ``left_over``.

    ``packed``: the block's bytes, as pairs. Values are scaled if ``SCALED``, from ``how_scaled``, says so. ``SCALE``,
    ``ZERO``: the dtypes of scales and of zero points, if there are any.
    """
    w = _unpacked(packed, INDEX, zeros, ZERO, DTYPE, FORM, TILE, gl.DotOperandLayout(0, mma, 2))
    if SCALED == "values":
        PRECISION: gl.constexpr = precision_of_scales(FORM, SCALE, ZERO, DTYPE)
        INSIDE: gl.constexpr = gl.float32 if PRECISION == "float" else DTYPE
        own, rest = (), ()
        each = of_groups(factors, INDEX, SCALE, FORM, TILE)
        for i in gl.static_range(len(each)):
            scale = scale_value(each[i])
            own = own + (scale.to(INSIDE),)
            if PRECISION == "two":
                rest = rest + ((scale - own[i].to(gl.float32)).to(DTYPE),)
        w = w.to(INSIDE)
        if FORM.float_zeros:
            added = ()
            each = of_groups(zeros, INDEX, ZERO, FORM, TILE)
            for i in gl.static_range(len(each)):
                added = added + ((each[i].to(gl.float32) * (1 / left_over(FORM, SCALED, DTYPE))).to(INSIDE),)
            w = multiply_add(w, spread(own, w), spread(added, w))
        elif PRECISION == "two":
            w = multiply_add(w, spread(own, w), w * spread(rest, w))
        else:
            w = w * spread(own, w)
        w = w.to(DTYPE)
    return w


@gluon.jit
def _scaled_codes(
    packed, INDEX: gl.constexpr, factors, SCALE: gl.constexpr, mma: gl.constexpr, FORM: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """As ``_values``, for symmetric 4-bit formats: the values times their scales, in bfloat16, and ``SCALED_BY``."""
    FORMAT: gl.constexpr = FORM.name
    HALF: gl.constexpr = INDEX // 2
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    if FORM.group >= BLOCK:
        scale = scale_value(of_groups(factors, INDEX, SCALE, FORM, TILE)[0])
        own = gl.convert_layout(scale, gl.SliceLayout(1, packed.type.layout), assert_trivial=True)
        w = unpack_times_scale(packed, own, HALF)
    else:
        PER_WORD: gl.constexpr = 32 // SCALE.primitive_bitwidth
        FIRST: gl.constexpr = first_group(FORM, TILE, SCALE, INDEX)
        own, added = (), ()
        for i in gl.static_range(PANEL // FORM.group):
            word = factors[(FIRST + i) // PER_WORD]
            factor, addend = factors_of_codes(word, (FIRST + i) % PER_WORD, SCALE, FORMAT, HALF)
            own, added = own + (factor,), added + (addend,)
        w = unpack_times(packed, spread(own, packed), spread(added, packed), FORMAT, HALF)
    return gl.convert_layout(w, LAYOUT, assert_trivial=True)


@gluon.jit
def _start(
    values, packed, factors, accs, rings, x_step, COUNT: gl.constexpr, SCALED: gl.constexpr,
    SCALE: gl.constexpr, FORM: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Starts the products of a block's ``COUNT`` panels with the next panels of x, whose first slot has arrived.

    ``values``: the unpacked panels. With "codes" they are unpacked here, each while the products of those before it
    run. Returns, if ``SCALED`` is "sums", the sums of every two panels, which are half a block, else ``accs`` plus all.
    """
    PANELS: gl.constexpr = TILE.panels
    SUMS: gl.constexpr = SCALED == "sums"
    gl.static_assert(not SUMS or len(accs) == 1)
    mma: gl.constexpr = accs[0].type.layout
    sums = accs
    of_halves = ()
    for i in gl.static_range(COUNT):
        step = x_step + i // PANELS
        if i % PANELS == 0 and i > 0:
            rings.wait_for_x(step)
        x = rings.panel_of_x(step, i % PANELS, TILE)
        if SUMS and i % 2 == 0:
            sums = (gl.zeros(accs[0].shape, gl.float32, mma),)
        w = _scaled_codes(packed[i % 2], i, factors, SCALE, mma, FORM, TILE) if SCALED == "codes" else values[i]
        sums = _multiply(w, x, sums, not SUMS or i % 2 > 0)
        if i % 2 == 1:
            of_halves = of_halves + sums
    return of_halves if SUMS else sums


@gluon.jit
def _finish(
    started, accs, scales, rings, x_step, COUNT: gl.constexpr, SUMS: gl.constexpr, SCALE: gl.constexpr,
    FORM: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """``accs`` with the products of ``COUNT`` panels that ``_start`` has started; releases their slots of x.

    ``scales``: the scales of the block's halves, of dtype ``SCALE``, used if ``SUMS`` are to be scaled.
    """
    PANELS: gl.constexpr = TILE.panels
    sums = started
    for i in gl.static_range(COUNT):
        if SUMS:
            if i % 2 == 1:
                sums = _settle(COUNT - 1 - i, (started[i // 2],))
        elif i % PANELS == PANELS - 1:
            sums = _settle(COUNT - 1 - i, sums)
        if i % PANELS == PANELS - 1:
            rings.release_x(x_step + i // PANELS)
        if SUMS and i % 2 == 1:
            factor = scale_value(of_groups(scales, i, SCALE, FORM, TILE)[0])[:, None]
            accs = (gl.fma(sums[0], gl.broadcast(factor, sums[0])[0], accs[0]),)
    return accs if SUMS else sums


@gluon.jit
def multiply(
    w_step, x_step, accs, scales, zero_points, rings, first, last, groups,
    SCALE: gl.constexpr, ZERO: gl.constexpr, FORM: gl.constexpr, TILE: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """``accs`` plus the products of blocks ``first`` to ``last`` of K, and the next steps: ``(w_step, x_step, accs)``.

    ``scales``, ``zero_points``: what ``factors_of`` makes, or None; of the dtypes ``SCALE`` and ``ZERO``.
    """
    COUNT: gl.constexpr = 4 if FORM.bits == 4 else 2  # panels of a block
    # Two blocks ahead: with few rows, a block takes less time than a load from memory.
    AHEAD: gl.constexpr = 2 if FORM.group >= BLOCK else 1
    mma: gl.constexpr = accs[0].type.layout
    DTYPE: gl.constexpr = rings.x.dtype
    SCALED: gl.constexpr = how_scaled(FORM, TILE, SCALE, DTYPE)
    layout: gl.constexpr = factors_layout(FORM, TILE, SCALE, DTYPE)
    next_factors = ()
    for i in gl.static_range(AHEAD):
        next_factors = next_factors + (load_factors(scales, first + i, groups, layout, FORM),)
    next_zeros = load_factors(zero_points, first, groups, layout, FORM)
    for block in range(first, last):
        factors = next_factors[0]
        next_factors = next_factors[1:] + (load_factors(scales, block + AHEAD, groups, layout, FORM),)
        zeros = next_zeros
        next_zeros = load_factors(zero_points, block + 1, groups, layout, FORM)
        rings.wait_for_weight(w_step)
        # Before the loads of the block's bytes: a wait behind them would wait for all of those, too.
        rings.wait_for_x(x_step)
        packed = (rings.packed(w_step, 0, WHO, mma), rings.packed(w_step, 1, WHO, mma))
        values = ()
        if SCALED != "codes":
            for i in gl.static_range(COUNT):
                w = _values(packed[i % 2], i, factors, zeros, SCALE, ZERO, DTYPE, mma, FORM, TILE, SCALED)
                values = values + (w,)
        started = _start(values, packed, factors, accs, rings, x_step, COUNT, SCALED, SCALE, FORM, TILE)
        # Only here: the products have waited for the loads from the slot, which TMA, its next writer, doesn't.
        rings.release_weight(w_step)
        accs = _finish(started, accs, factors, rings, x_step, COUNT, SCALED == "sums", SCALE, FORM, TILE)
        w_step += 1
        x_step += COUNT // TILE.panels
    return w_step, x_step, accs


@gluon.jit
def _blocks_in_turn(
    w_step, x_step, accs, next_factors, next_zeros, scales, zero_points, rings, block, groups,
    BLOCKS: gl.constexpr, SCALE: gl.constexpr, ZERO: gl.constexpr, FORM: gl.constexpr, TILE: gl.constexpr,
    WHO: gl.constexpr,
):  # fmt: skip
    """``accs`` plus the products of ``BLOCKS`` blocks, and the first factors and zero points of the block after them.

    At most two panels' products are in flight: the registers of the panel before the last may be rewritten.
    """
    COUNT: gl.constexpr = 4 if FORM.bits == 4 else 2
    PANELS: gl.constexpr = TILE.panels
    mma: gl.constexpr = accs[0].type.layout
    DTYPE: gl.constexpr = rings.x.dtype
    SCALED: gl.constexpr = how_scaled(FORM, TILE, SCALE, DTYPE)
    layout: gl.constexpr = factors_layout(FORM, TILE, SCALE, DTYPE)
    PARTS: gl.constexpr = parts_of(FORM, TILE, SCALE)
    ZERO_PARTS: gl.constexpr = 1 if ZERO is None else parts_of(FORM, TILE, ZERO)
    for b in gl.static_range(BLOCKS):
        rings.wait_for_weight(w_step + b)
        packed = ()
        for i in gl.static_range(COUNT):
            if i < 2:
                packed = packed + (rings.packed(w_step + b, i, WHO, mma),)
            if i % (COUNT // PARTS) == 0:
                factors = next_factors
            if i % (COUNT // ZERO_PARTS) == 0:
                zeros = next_zeros
            if SCALED == "codes":
                w = _scaled_codes(packed[i % 2], i, factors, SCALE, mma, FORM, TILE)
            else:
                w = _values(packed[i % 2], i, factors, zeros, SCALE, ZERO, DTYPE, mma, FORM, TILE, SCALED)
            # The next ones, halfway through these.
            if i % (COUNT // PARTS) == COUNT // PARTS // 2:
                next_factors = load_next(scales, block + b, i, groups, layout, FORM, PARTS)
            if i % (COUNT // ZERO_PARTS) == COUNT // ZERO_PARTS // 2:
                next_zeros = load_next(zero_points, block + b, i, groups, layout, FORM, ZERO_PARTS)
            step = x_step + (b * COUNT + i) // PANELS
            if i % PANELS == 0:
                rings.wait_for_x(step)
            accs = _multiply(w, rings.panel_of_x(step, i % PANELS, TILE), accs)
            if i == 1:
                # By now both of the block's halves are in registers, or the products have waited for them.
                rings.release_weight(w_step + b)
            if b + i > 0:
                accs = _settle(1, accs)
                if i % PANELS == 0:
                    rings.release_x(step - 1)
    accs = _settle(0, accs)
    rings.release_x(x_step + BLOCKS * COUNT // PANELS - 1)
    return accs, next_factors, next_zeros


@gluon.jit
def multiply_in_turn(
    w_step, x_step, accs, scales, zero_points, rings, first, last, groups,
    SCALE: gl.constexpr, ZERO: gl.constexpr, FORM: gl.constexpr, TILE: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """As ``multiply``, panel by panel: of ``TILE.in_turn`` blocks without a pause, as long as there are as many."""
    BLOCKS: gl.constexpr = TILE.in_turn
    SLOTS: gl.constexpr = (4 if FORM.bits == 4 else 2) // TILE.panels
    layout: gl.constexpr = factors_layout(FORM, TILE, SCALE, rings.x.dtype)
    PARTS: gl.constexpr = parts_of(FORM, TILE, SCALE)
    ZERO_PARTS: gl.constexpr = 1 if ZERO is None else parts_of(FORM, TILE, ZERO)
    factors = load_factors(scales, first, groups, layout, FORM, 0, PARTS)
    zeros = load_factors(zero_points, first, groups, layout, FORM, 0, ZERO_PARTS)
    whole = first + (last - first) // BLOCKS * BLOCKS
    for block in range(first, whole, BLOCKS):
        accs, factors, zeros = _blocks_in_turn(
            w_step, x_step, accs, factors, zeros, scales, zero_points, rings, block, groups,
            BLOCKS, SCALE, ZERO, FORM, TILE, WHO,
        )  # fmt: skip
        w_step += BLOCKS
        x_step += BLOCKS * SLOTS
    if BLOCKS > 1:
        for block in range(whole, last):
            accs, factors, zeros = _blocks_in_turn(
                w_step, x_step, accs, factors, zeros, scales, zero_points, rings, block, groups,
                1, SCALE, ZERO, FORM, TILE, WHO,
            )  # fmt: skip
            w_step += 1
            x_step += SLOTS
    return w_step, x_step, accs
