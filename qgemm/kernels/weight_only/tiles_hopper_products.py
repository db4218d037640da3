"""The products of ``tiles_hopper_kernels.py``: x times blocks of the stored weight, unpacked in registers. In Gluon.

``wgmma`` reads its operand A, the weight, from registers. There are two orders:

- block by block (``multiply``): all panels of a block are unpacked and their products started before one is waited for.
  For int4 with up to 128 rows of x, for zero points, and for sums that are scaled by groups.
- panel by panel (``multiply_in_turn``): each panel is unpacked while the products of the one before run. For more rows
  of x, whose sums leave fewer registers, and for 8-bit values.

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
    factors_of_codes,
    multiply_add,
    times_of_pairs,
    unpack_pairs,
    unpack_times_scale,
    widen_pairs,
)
from qgemm.kernels.weight_only.hopper_factors import columns, rows_layout
from qgemm.kernels.weight_only.kernels import BLOCK, scale_value

PANEL = gl.constexpr(64)  # values of x along K


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
def is_exact(scale, dtype):
    """Whether all scales of dtype ``scale`` are values of ``dtype``."""
    return scale == dtype or (scale.primitive_bitwidth == 8 and gl.bfloat16 == dtype)


@constexpr_function
def left_over(form, scaled, dtype):
    """The factor that unpacked values still lack; sums are multiplied by it in the end."""
    if scaled == "codes":
        return 1 / SCALED_BY.value
    return times_of_pairs(form.name, dtype) if form.bits == 8 else 1.0


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


@constexpr_function
def _in_words(form, dtype):
    """Whether scales or zero points are loaded 32 bits at a time: for small groups, or for both halves of a block."""
    return 0 < form.group < BLOCK.value or (form.paired and dtype.primitive_bitwidth == 16)


@constexpr_function
def words_of(form, dtype):
    """How many words hold the scales or zero points of a block's small groups."""
    return form.block // form.group * dtype.primitive_bitwidth // 32


@constexpr_function
def parts_of(form, tile, dtype):
    """In how many parts, of at most 16 bytes, the scales or zero points of a block are loaded."""
    in_parts = tile.in_turn and form.by_groups and form.bits == 4
    return max(words_of(form, dtype) // 4, 1) if in_parts else 1


@gluon.jit
def factors_of(factors, col, N, stride, layout: gl.constexpr, FORM: gl.constexpr, TILE: gl.constexpr):
    """Pointers to the scales or zero points of the weight's 64 rows from ``col`` on, for ``_load_factors``.

    To a row's first, or where those of a block's small groups are read together, to each word of the first part.
    """
    if FORM.by_groups:
        DTYPE: gl.constexpr = factors.dtype.element_ty
        OF_BLOCK: gl.constexpr = words_of(FORM, DTYPE)
        WORDS: gl.constexpr = OF_BLOCK // parts_of(FORM, TILE, DTYPE)
        together: gl.constexpr = rows_layout(64, WORDS, 4)
        n = gl.minimum(col + gl.arange(0, 64, gl.SliceLayout(1, together)), N - 1)
        words = factors.cast(gl.pointer_type(gl.int32), bitcast=True)
        words += n.to(gl.int64)[:, None] * (stride // (FORM.block // FORM.group) * OF_BLOCK)
        return words + gl.arange(0, WORDS, gl.SliceLayout(0, together))[None, :]
    else:
        n = gl.minimum(col + gl.arange(0, 64, layout), N - 1)
        return factors + n.to(gl.int64) * stride


@gluon.jit
def _load_factors(
    pointers, block, groups, layout: gl.constexpr, FORM: gl.constexpr, PART: gl.constexpr = 0, PARTS: gl.constexpr = 1
):  # fmt: skip
    """The scales or zero points of a block's groups, as a tensor per half or as words; 0 beyond the last group.

    ``pointers``: from ``factors_of``. ``layout``: that of the words. ``PART``: of those of the block, with ``PARTS``.
    """
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    factors = ()
    if pointers is not None:
        if FORM.by_groups:
            WORDS: gl.constexpr = pointers.shape[1]
            together: gl.constexpr = pointers.type.layout
            part = block * PARTS + PART
            inside = gl.zeros([64, WORDS], gl.int32, together) + part * (FORM.block // FORM.group // PARTS) < groups
            each = columns(gl.load(pointers + part * WORDS, mask=inside, other=0))
            for i in gl.static_range(WORDS):
                factors = factors + (gl.convert_layout(each[i], layout, assert_trivial=True),)
        elif _in_words(FORM, pointers.dtype.element_ty):
            BYTES: gl.constexpr = pointers.dtype.element_ty.primitive_bitwidth // 8
            WORDS: gl.constexpr = BLOCK * HALVES // FORM.group * BYTES // 4
            words = pointers.cast(gl.pointer_type(gl.int32), bitcast=True)
            for i in gl.static_range(WORDS):
                at = block * WORDS + i
                factors = factors + (gl.load(words + at, mask=at < groups * BYTES // 4, other=0),)
        else:
            for half in gl.static_range(HALVES):
                group = (block * HALVES + half) * BLOCK // FORM.group if FORM.group > 0 else 0
                factors = factors + (gl.load(pointers + group, mask=group < groups, other=0),)
    return factors


@gluon.jit
def _load_next(
    pointers, block, INDEX: gl.constexpr, groups, layout: gl.constexpr, FORM: gl.constexpr, PARTS: gl.constexpr
):  # fmt: skip
    """As ``_load_factors``, of the part after that of the block's panel ``INDEX``."""
    NEXT: gl.constexpr = INDEX * PANEL * PARTS // FORM.block + 1
    PART: gl.constexpr = NEXT % PARTS
    return _load_factors(pointers, block + NEXT // PARTS, groups, layout, FORM, PART, PARTS)


@constexpr_function
def _first_group(form, tile, dtype, index):
    """The first group of a block's panel, among those of a part."""
    return index % (form.block // PANEL.value // parts_of(form, tile, dtype)) * PANEL.value // form.group


@gluon.jit
def _of_groups(factors, INDEX: gl.constexpr, DTYPE: gl.constexpr, FORM: gl.constexpr, TILE: gl.constexpr):
    """A vector of ``DTYPE`` for each group of a block's panel, from the result of ``_load_factors``."""
    own = ()
    if _in_words(FORM, DTYPE):
        COUNT: gl.constexpr = max(PANEL // FORM.group, 1)
        FIRST: gl.constexpr = _first_group(FORM, TILE, DTYPE, INDEX)
        BITS: gl.constexpr = DTYPE.primitive_bitwidth
        for i in gl.static_range(COUNT):
            word = factors[(FIRST + i) * BITS // 32]
            if BITS == 32:
                own = own + (word.to(DTYPE, bitcast=True),)
            elif BITS == 16:
                own = own + ((word >> (FIRST + i) * BITS % 32).to(gl.int16).to(DTYPE, bitcast=True),)
            else:
                own = own + ((word >> (FIRST + i) * BITS % 32).to(DTYPE),)
    else:
        own = own + (factors[INDEX // 2],)
    return own


@gluon.jit
def _spread(own, w):
    """The vectors of a panel's groups, ``own``, as a factor for each of the values ``w``."""
    COUNT: gl.constexpr = len(own)
    ROWS: gl.constexpr = w.shape[0]
    if COUNT == 1:
        rows = gl.convert_layout(own[0], gl.SliceLayout(1, w.type.layout), assert_trivial=True)
        return gl.broadcast(rows[:, None], w)[0]
    else:
        if COUNT == 2:
            groups = gl.join(own[0], own[1])
        else:
            groups = gl.join(gl.join(own[0], own[2]), gl.join(own[1], own[3])).reshape([ROWS, COUNT])
        split = w.reshape([ROWS, COUNT, w.shape[1] // COUNT])
        groups = gl.convert_layout(groups, gl.SliceLayout(2, split.type.layout))
        factors = gl.broadcast(groups[:, :, None], split)[0].reshape(w.shape)
        return gl.convert_layout(factors, w.type.layout)


@gluon.jit
def _values(
    packed, INDEX: gl.constexpr, factors, zeros, SCALE: gl.constexpr, ZERO: gl.constexpr, DTYPE: gl.constexpr,
    mma: gl.constexpr, FORM: gl.constexpr, TILE: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """A panel of a block, 64 values of K, in the layout of ``wgmma``'s operand A, divided by ``left_over``.

    ``packed``: the block's bytes, as pairs. Values are scaled if ``SCALED``, from ``how_scaled``, says so. ``SCALE``,
    ``ZERO``: the dtypes of scales and of zero points, if there are any.
    """
    FORMAT: gl.constexpr = FORM.name
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    w = unpack_pairs(packed, FORMAT, DTYPE)[INDEX // 2] if FORM.bits == 4 else widen_pairs(packed, FORMAT, DTYPE)
    w = gl.convert_layout(w, LAYOUT, assert_trivial=True)
    if FORM.has_zeros and not FORM.float_zeros:
        own = ()
        of_groups = _of_groups(zeros, INDEX, ZERO, FORM, TILE)
        for i in gl.static_range(len(of_groups)):
            own = own + ((of_groups[i].to(gl.float32) * (1 / left_over(FORM, SCALED, DTYPE))).to(DTYPE),)
        w = w - _spread(own, w)
    if SCALED == "values":
        # Exponents and e4m3 are exact in bfloat16. Otherwise the product is computed in float32 and rounded once.
        EXACT: gl.constexpr = is_exact(SCALE, DTYPE) and (not FORM.float_zeros or ZERO == DTYPE)
        own = ()
        of_groups = _of_groups(factors, INDEX, SCALE, FORM, TILE)
        for i in gl.static_range(len(of_groups)):
            own = own + ((scale_value(of_groups[i]).to(DTYPE) if EXACT else scale_value(of_groups[i])),)
        scaled = w if EXACT else w.to(gl.float32)
        if FORM.float_zeros:
            added = ()
            of_groups = _of_groups(zeros, INDEX, ZERO, FORM, TILE)
            for i in gl.static_range(len(of_groups)):
                zero = of_groups[i].to(gl.float32) * (1 / left_over(FORM, SCALED, DTYPE))
                added = added + ((zero.to(DTYPE) if EXACT else zero),)
            scaled = multiply_add(scaled, _spread(own, w), _spread(added, w))
        else:
            scaled = scaled * _spread(own, w)
        w = scaled.to(DTYPE)
    return w


@gluon.jit
def _scaled_codes(
    packed, INDEX: gl.constexpr, factors, SCALE: gl.constexpr, mma: gl.constexpr, FORM: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """As ``_values``, for symmetric 4-bit formats: the values times their scales, in bfloat16, and ``SCALED_BY``."""
    FORMAT: gl.constexpr = FORM.name
    HALF: gl.constexpr = INDEX // 2
    COUNT: gl.constexpr = max(PANEL // FORM.group, 1)
    PER_WORD: gl.constexpr = 32 // SCALE.primitive_bitwidth if _in_words(FORM, SCALE) else 1
    FIRST: gl.constexpr = HALF if PER_WORD == 1 else _first_group(FORM, TILE, SCALE, INDEX)
    own, added = (), ()
    for i in gl.static_range(COUNT):
        word = factors[(FIRST + i) // PER_WORD]
        if PER_WORD == 1:
            word = word.to(gl.int16, bitcast=True).to(gl.int32)
        factor, addend = factors_of_codes(word, (FIRST + i) % PER_WORD, SCALE, FORMAT, HALF)
        own, added = own + (factor,), added + (addend,)
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    w = unpack_times_scale(packed, _spread(own, packed), _spread(added, packed), FORMAT, HALF)
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
            factor = scale_value(_of_groups(scales, i, SCALE, FORM, TILE)[0])[:, None]
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
        next_factors = next_factors + (_load_factors(scales, first + i, groups, layout, FORM),)
    next_zeros = _load_factors(zero_points, first, groups, layout, FORM)
    for block in range(first, last):
        factors = next_factors[0]
        next_factors = next_factors[1:] + (_load_factors(scales, block + AHEAD, groups, layout, FORM),)
        zeros = next_zeros
        next_zeros = _load_factors(zero_points, block + 1, groups, layout, FORM)
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
def multiply_in_turn(
    w_step, x_step, accs, scales, zero_points, rings, first, last, groups,
    SCALE: gl.constexpr, ZERO: gl.constexpr, FORM: gl.constexpr, TILE: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """As ``multiply``, panel by panel.

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
    next_factors = _load_factors(scales, first, groups, layout, FORM, 0, PARTS)
    next_zeros = _load_factors(zero_points, first, groups, layout, FORM, 0, ZERO_PARTS)
    for block in range(first, last):
        rings.wait_for_weight(w_step)
        packed = ()
        for i in gl.static_range(COUNT):
            if i < 2:
                packed = packed + (rings.packed(w_step, i, WHO, mma),)
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
                next_factors = _load_next(scales, block, i, groups, layout, FORM, PARTS)
            if i % (COUNT // ZERO_PARTS) == COUNT // ZERO_PARTS // 2:
                next_zeros = _load_next(zero_points, block, i, groups, layout, FORM, ZERO_PARTS)
            step = x_step + i // PANELS
            if i % PANELS == 0:
                rings.wait_for_x(step)
            accs = _multiply(w, rings.panel_of_x(step, i % PANELS, TILE), accs)
            if i == 1:
                # By now both of the block's halves are in registers, or the products have waited for them.
                rings.release_weight(w_step)
            if i > 0:
                accs = _settle(1, accs)
                if i % PANELS == 0:
                    rings.release_x(step - 1)
        accs = _settle(0, accs)
        w_step += 1
        x_step += COUNT // PANELS
        rings.release_x(x_step - 1)
    return w_step, x_step, accs
