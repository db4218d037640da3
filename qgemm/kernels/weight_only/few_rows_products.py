"""Products of up to 32 rows with 4- and 8-bit weights on Hopper: the part that both kernels for them share. In Gluon.

The operands are swapped: rows of the weight are the rows of ``mma.sync``'s product, rows of x its columns. For each
set of rows of the weight, ``tile.splits`` warps share K block by block; in the end their sums are added up.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.runtime.jit import constexpr_function

from qgemm.kernels.stages.activations import gate_value
from qgemm.kernels.stages.aggregate import OPTIONAL, aggregate
from qgemm.kernels.stages.epilogue import product, rounded
from qgemm.kernels.stages.unpack_words import INT4_BIAS, times_of_words, unpack_words, zero_of_words
from qgemm.kernels.weight_only.kernels import BLOCK, scale_value

WORDS = gl.constexpr(BLOCK.value // 4)


@constexpr_function
def how_scaled(form, scale, zero, dtype):
    """How ``unpack_words`` scales: by one factor if it is exact in the values' dtype, else by two, or in float32.

    ``scale``, ``zero``: the dtypes of scales and of zero points, or None.
    """
    if not form.scales_values:
        return ""
    if form.float_zeros:
        return " exact" if scale == dtype and zero == dtype else " float"
    if dtype == gl.float16:
        return " float"
    return " exact" if scale in (gl.bfloat16, gl.int8, gl.uint8) else " rest"


@constexpr_function
def how_shifted(form):
    """How ``unpack_words`` applies zero points."""
    return " float zeros" if form.float_zeros else " zeros" if form.has_zeros else ""


@constexpr_function
def sums_layout(tile):
    """The layout of sums: ``[warps that share K, rows of the weight, rows of x]``."""
    return gl.NVMMADistributedLayout([2, 0], [tile.splits, tile.warps // tile.splits, 1], [1, 16, 8])


@constexpr_function
def gathered_layout(tile):
    """A thread has the sums of all warps that share K; neighbouring threads have neighbouring rows of the weight."""
    of_thread = 2 if tile.gated else 1
    rows = min(tile.rows // of_thread, 32)
    return gl.BlockedLayout([tile.splits, of_thread, 1], [1, rows, 32 // rows], [1, 1, tile.warps], [1, 2, 0])


@gluon.jit
def rows_of_tile(row, N, layout: gl.constexpr, TILE: gl.constexpr):
    """The weight's rows from ``row`` on; with gates, those of the first half and of the second half in turn."""
    i = gl.arange(0, TILE.rows, layout)
    if TILE.gated:
        return row // 2 + i // 2 + (i % 2) * (N // 2)
    else:
        return row + i


@aggregate
class Groups:
    """The scales and zero points of a program's rows of the weight: pointers to those of the rows' first groups."""

    scale: gl.tensor
    zero_point: OPTIONAL
    split: gl.tensor
    part: OPTIONAL
    """Where each 16 bytes of half a block begin, or None if half a block has one group."""
    K: gl.tensor
    form: gl.constexpr

    @gluon.jit
    def load(self, step):
        """``(scales, zero points)`` of a step, for each half of its blocks."""
        SPLITS: gl.constexpr = self.split.shape[0]
        GROUP: gl.constexpr = self.form.group
        ZERO_GROUP: gl.constexpr = GROUP if GROUP > 0 else 1 << 30  # one for a row
        block = step * SPLITS + self.split
        scales = _load_groups(self.scale, self.part, block, self.K, GROUP, self.form)
        return scales, _load_groups(self.zero_point, self.part, block, self.K, ZERO_GROUP, self.form)


@gluon.jit
def _groups(scale, zero_point, row, N, K, stride, FORM: gl.constexpr, TILE: gl.constexpr):
    """The ``Groups`` of the weight's rows from ``row`` on."""
    mma: gl.constexpr = sums_layout(TILE)
    # For each 16 bytes of a row if half a block has several groups, else for each row.
    layout: gl.constexpr = gl.DotOperandLayout(0, mma, 1) if FORM.has_small_groups else mma
    rows: gl.constexpr = gl.SliceLayout(2, layout)
    split = gl.arange(0, TILE.splits, gl.SliceLayout(1, rows))
    n = gl.minimum(rows_of_tile(row, N, gl.SliceLayout(0, rows), TILE), N - 1).to(gl.int64)[None, :]
    part = None
    if FORM.has_small_groups:
        part = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :] * 16
        n = n[:, :, None]
    zero_pointers = None
    if FORM.has_zeros:
        zero_pointers = zero_point + n * stride
    if FORM.paired:
        scale_pointers = scale.cast(gl.pointer_type(gl.int32), bitcast=True) + n * (stride // 2)
    else:
        scale_pointers = scale + n * stride
    return Groups(scale_pointers, zero_pointers, split, part, K, FORM)


@gluon.jit
def _load_groups(values, part, block, K, GROUP: gl.constexpr, FORM: gl.constexpr):
    """Loads the scales or zero points of the groups in each half of a block, zeros beyond K; () if ``values`` is None.

    ``part``: where each 16 bytes of half a block begin, or None if half a block has one group.
    """
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    loaded = ()
    if values is not None and GROUP > 0:
        if values.dtype.element_ty == gl.int32:
            loaded = loaded + (gl.load(values + block[:, None], mask=(block * (2 * BLOCK) < K)[:, None], other=0),)
        else:
            for half in gl.static_range(HALVES):
                k = ((block * HALVES + half) * BLOCK)[:, None]
                if part is not None:
                    k = k[:, :, None] + part
                loaded = loaded + (gl.load(values + k // GROUP, mask=k < K, other=0),)
    return loaded


@gluon.jit
def _halves(pair, DTYPE: gl.constexpr):
    """The two 16-bit values of each word."""
    low = (pair & 0xFFFF).to(gl.uint16).to(DTYPE, bitcast=True)
    return low, (pair.to(gl.uint32, bitcast=True) >> 16).to(gl.uint16).to(DTYPE, bitcast=True)


@gluon.jit
def _of_words(values, layout: gl.constexpr):
    """Values ``[s, n, 8]``, one for each 16 bytes, repeated for each of their words."""
    S: gl.constexpr = values.shape[0]
    ROWS: gl.constexpr = values.shape[1]
    values = gl.join(values, values)
    values = gl.join(values, values).reshape([S, ROWS, WORDS])
    return gl.convert_layout(values, layout, assert_trivial=True)


@gluon.jit
def _for_words(values, words, FORM: gl.constexpr):
    """Values for each 16 bytes, or for each row, ``[s, n]``, as one for each of ``words``."""
    layout: gl.constexpr = words.type.layout
    if FORM.has_small_groups:
        return _of_words(values, layout)
    else:
        rows = gl.convert_layout(values, gl.SliceLayout(2, layout), assert_trivial=True)[:, :, None]
        return gl.broadcast(rows, gl.zeros(words.shape, gl.int32, layout))[0]


@gluon.jit
def _twice(values, DTYPE: gl.constexpr):
    """int32 words that hold each of ``values``, as ``DTYPE``, in both halves."""
    return (values.to(DTYPE).to(gl.uint16, bitcast=True).to(gl.uint32) * 0x10001).to(gl.int32, bitcast=True)


@gluon.jit
def _factors(raw, words, FORM: gl.constexpr, DTYPE: gl.constexpr, SCALES: gl.constexpr):
    """The factors of ``unpack_words``, from the stored scales."""
    factors = ()
    for half in gl.static_range(len(raw)):
        scale = scale_value(raw[half])
        if SCALES == " float":
            factors = factors + (_for_words(scale.to(gl.int32, bitcast=True), words, FORM),)
        else:
            factors = factors + (_for_words(_twice(scale, DTYPE), words, FORM),)
            if SCALES == " rest":
                rest = scale - scale.to(DTYPE).to(gl.float32)
                factors = factors + (_for_words(_twice(rest, DTYPE), words, FORM),)
    return factors


@gluon.jit
def _zero_points(raw, words, FORM: gl.constexpr, DTYPE: gl.constexpr, SCALES: gl.constexpr):
    """The zero points of ``unpack_words``, from the stored ones."""
    FORMAT: gl.constexpr = FORM.name
    zeros = ()
    for half in gl.static_range(len(raw)):
        zero = raw[half].to(gl.float32)
        if not FORM.float_zeros:
            word = _twice(zero_of_words(zero, FORMAT, DTYPE, half), DTYPE)
        elif SCALES == " float":
            word = (zero / times_of_words(FORMAT, DTYPE, half)).to(gl.int32, bitcast=True)
        else:
            word = _twice(zero / times_of_words(FORMAT, DTYPE, half), DTYPE)
        zeros = zeros + (_for_words(word, words, FORM),)
    return zeros


@gluon.jit
def _in_words(values, mma: gl.constexpr):
    """x, ``[s, k, m]`` with 16 neighbours along K per thread, in an instruction's layout with four per thread.

    No value moves to another thread: K is permuted, in the same way as in the weight's words.
    """
    layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    S: gl.constexpr = values.shape[0]
    COLS: gl.constexpr = values.shape[2]
    split = values.reshape([S, values.shape[1] // 64, 4, 4, 2, 2, COLS]).permute(0, 1, 3, 4, 2, 5, 6)
    return gl.convert_layout(split.reshape(values.shape), layout, assert_trivial=True)


@gluon.jit
def _operand(parts, mma: gl.constexpr):
    """The four values of each word ``[s, n, word]``, which are in four tiles, as operand A: ``[s, n, k]``."""
    layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    S: gl.constexpr = parts[0].shape[0]
    ROWS: gl.constexpr = parts[0].shape[1]
    joined = gl.join(gl.join(parts[0], parts[1]), gl.join(parts[2], parts[3]))
    COUNT: gl.constexpr = parts[0].shape[2]
    split = joined.reshape([S, ROWS, COUNT // 16, 4, 4, 2, 2]).permute(0, 1, 2, 4, 6, 3, 5)
    return gl.convert_layout(split.reshape([S, ROWS, 4 * COUNT]), layout, assert_trivial=True)


@gluon.jit
def constant(M, VALUE: gl.constexpr, COUNT: gl.constexpr, DTYPE: gl.constexpr, TILE: gl.constexpr):
    """Operand A of a product that adds up ``COUNT`` values of each row of x, times a whole number ``VALUE``."""
    SPLITS: gl.constexpr = TILE.splits
    ROWS: gl.constexpr = TILE.rows
    ml: gl.constexpr = gl.DotOperandLayout(0, sums_layout(TILE), 2)
    # Written so that the assembler doesn't see constants, which it would recompute for each product.
    n = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, ml)))[None, :, None]
    j = gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(1, ml)))[None, None, :]
    same = gl.zeros([SPLITS, ROWS, COUNT], gl.int32, ml) + (1 | (M + (n & 8) + (j & 8)) >> 31)
    return (same * VALUE).to(gl.float32).to(DTYPE)


@gluon.jit
def _unpack(
    words, scales, zeros, DTYPE: gl.constexpr, BIASED: gl.constexpr, SCALES: gl.constexpr, FORM: gl.constexpr
):  # fmt: skip
    """A step's blocks by ``unpack_words``: with zero points, and times scales unless those multiply sums."""
    FORMAT: gl.constexpr = FORM.name
    ADDED: gl.constexpr = how_shifted(FORM)
    factors = ()
    if FORM.scales_values:
        factors = _factors(scales, words, FORM, DTYPE, SCALES)
    zero_points = ()
    if FORM.has_zeros:
        zero_points = _zero_points(zeros, words, FORM, DTYPE, SCALES)
    return unpack_words(words, zero_points, factors, FORMAT, DTYPE, BIASED, SCALES, ADDED)


@constexpr_function
def is_biased(form, tile, dtype):
    """Whether the offset of low nibbles is subtracted by a product with x, which is cheaper for few columns."""
    plain = form.name == "int4" and not form.scales_values and not form.has_zeros
    return plain and dtype == gl.bfloat16 and tile.columns == 8 and tile.biased


@constexpr_function
def scales_sums(form):
    """Whether the sums of groups are multiplied by their scales."""
    return form.group > 0 and (form.by_groups or not form.scales_values)


@aggregate
class Products:
    """The products of a program's rows of the weight with x, from blocks of K to outputs."""

    scale: gl.tensor
    zero_point: OPTIONAL
    stride: gl.tensor
    """The stride of the rows of both."""
    minus_bias: gl.tensor
    """Operand A of a product that subtracts the offset of low nibbles, for a part of half a block."""
    N: gl.tensor
    K: gl.tensor
    dtype: gl.constexpr
    form: gl.constexpr
    tile: gl.constexpr
    parts: gl.constexpr
    """The number of parts in which a step's blocks are unpacked and multiplied."""

    @gluon.jit
    def groups(self, row):
        """The ``Groups`` of the weight's rows from ``row`` on."""
        return _groups(self.scale, self.zero_point, row, self.N, self.K, self.stride, self.form, self.tile)

    @gluon.jit
    def zeros(self):
        """Zero sums ``[splits, rows, columns]``: one tensor, or one for each half of blocks if sums aren't scaled."""
        SPLITS: gl.constexpr = self.tile.splits
        ROWS: gl.constexpr = self.tile.rows
        COLS: gl.constexpr = self.tile.columns
        nothing = gl.zeros([SPLITS, ROWS, COLS], gl.float32, sums_layout(self.tile))
        return (nothing, nothing) if self.form.bits == 4 and not scales_sums(self.form) else (nothing,)

    @gluon.jit
    def add(self, acc, blocks, slot, factors):
        """``acc`` plus the products of a step, whose operands ``blocks.words`` and ``blocks.x`` read from ``slot``.

        ``factors``: the step's scales and zero points, from ``Groups.load``.
        """
        SCALE: gl.constexpr = self.scale.dtype.element_ty
        ZERO: gl.constexpr = self.zero_point.dtype.element_ty if self.form.has_zeros else None
        SCALES: gl.constexpr = how_scaled(self.form, SCALE, ZERO, self.dtype)
        HALVES: gl.constexpr = 2 if self.form.bits == 4 else 1
        BIASED: gl.constexpr = is_biased(self.form, self.tile, self.dtype)
        SCALES_SUMS: gl.constexpr = scales_sums(self.form)
        mma: gl.constexpr = acc[0].type.layout
        wl: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
        xl: gl.constexpr = gl.DotOperandLayout(1, mma, 16)
        scales, zeros = factors
        if self.form.paired:
            scales = _halves(scales[0], SCALE)
        nothing = gl.zeros(acc[0].shape, gl.float32, mma)
        sums = ((nothing, nothing) if HALVES == 2 else (nothing,)) if SCALES_SUMS else acc
        for part in gl.static_range(self.parts):
            values = _unpack(blocks.words(slot, part, wl), scales, zeros, self.dtype, BIASED, SCALES, self.form)
            added = ()
            for half in gl.static_range(HALVES):
                b = _in_words(blocks.x(slot, half, part, xl), mma)
                own = mma_v2(_operand(values[half], mma), b, sums[half])
                if BIASED and half == 0:
                    # Two short chains of products instead of a long one.
                    own = own + mma_v2(self.minus_bias, b, nothing)
                added = added + (own,)
            sums = added
        if SCALES_SUMS:
            total = acc[0]
            for half in gl.static_range(HALVES):
                factor = scale_value(scales[half]) * times_of_words(self.form.name, self.dtype, half)
                total = gl.fma(sums[half], gl.broadcast(factor[:, :, None], nothing)[0], total)
            sums = (total,)
        return sums

    @gluon.jit
    def total(self, acc):
        """The sums over all warps that share K, ``[rows, columns]``."""
        of_splits = acc[0]
        if not scales_sums(self.form):
            of_splits = of_splits * times_of_words(self.form.name, self.dtype, 0)
        if len(acc) == 2:
            of_splits = of_splits + acc[1] * times_of_words(self.form.name, self.dtype, 1)
        return gl.sum(gl.convert_layout(of_splits, gathered_layout(self.tile)), 0)

    @gluon.jit
    def outputs(self, total, row, epilogue, DTYPE: gl.constexpr):
        """The outputs in ``DTYPE`` for the weight's rows from ``row`` on, from their ``total`` sums."""
        rl: gl.constexpr = total.type.layout
        n = rows_of_tile(row, self.N, gl.SliceLayout(1, rl), self.tile)
        m = gl.arange(0, self.tile.columns, gl.SliceLayout(0, rl))
        if self.form.group == 0:
            factor = scale_value(gl.load(self.scale + n.to(gl.int64) * self.stride, mask=n < self.N, other=0))
            total = total * factor[:, None]
        return epilogue.add(epilogue.scale(total), n, m).to(DTYPE)

    @gluon.jit
    def store(self, outputs, row, M, out, stride):
        """Stores ``outputs`` for the weight's rows from ``row`` on."""
        rl: gl.constexpr = outputs.type.layout
        n = row + gl.arange(0, self.tile.rows, gl.SliceLayout(1, rl))
        m = gl.arange(0, self.tile.columns, gl.SliceLayout(0, rl))
        inside = (m < M)[None, :] & (n < self.N)[:, None]
        gl.store(out + m.to(gl.int64)[None, :] * stride + n[:, None], outputs, mask=inside)


@gluon.jit
def store_activated(
    outputs, row, M, N, out, stride,
    FUNCTION: gl.constexpr, ACTIVATION: gl.constexpr, UP_FIRST: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Stores ``round(act(gate)) * up`` of ``outputs``, gates and ups in turn, of the weight's rows from ``row`` on.

    ``FUNCTION``, ``ACTIVATION``, ``UP_FIRST``: as in ``GatedRow``.
    """
    ROWS: gl.constexpr = TILE.rows // 2
    first, second = gl.split(outputs.reshape([ROWS, 2, TILE.columns]).permute((0, 2, 1)))
    gate, up = (second, first) if UP_FIRST else (first, second)
    activated = product(rounded(gate_value(gate.to(gl.float32), FUNCTION, ACTIVATION), up.dtype), up)
    n = row // 2 + gl.arange(0, ROWS, gl.SliceLayout(1, activated.type.layout))
    m = gl.arange(0, TILE.columns, gl.SliceLayout(0, activated.type.layout))
    inside = (m < M)[None, :] & (n < N // 2)[:, None]
    gl.store(out + m.to(gl.int64)[None, :] * stride + n[:, None], activated, mask=inside)


@gluon.jit
def products_of(
    scale, zero_point, stride, M, N, K, DTYPE: gl.constexpr, FORM: gl.constexpr, TILE: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """The ``Products`` of ``M`` rows of x."""
    minus_bias = constant(M, -INT4_BIAS, BLOCK // PARTS, DTYPE, TILE)
    return Products(scale, zero_point, stride, minus_bias, N, K, DTYPE, FORM, TILE, PARTS)
