"""Scales and zero points of blocks of the weight, loaded ahead, for ``tiles_hopper_products.py``. In Gluon.

Those of small groups are loaded together, if rows consist of whole blocks, up to 16 bytes at a time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from qgemm.kernels.weight_only.hopper_factors import columns, rows_layout
from qgemm.kernels.weight_only.kernels import BLOCK

PANEL = gl.constexpr(64)  # values of x along K


@constexpr_function
def in_words(form, dtype):
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
    """Pointers to the scales or zero points of the weight's 64 rows from ``col`` on, for ``load_factors``.

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
def load_factors(
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
        elif in_words(FORM, pointers.dtype.element_ty):
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
def load_next(
    pointers, block, INDEX: gl.constexpr, groups, layout: gl.constexpr, FORM: gl.constexpr, PARTS: gl.constexpr
):  # fmt: skip
    """As ``load_factors``, of the part after that of the block's panel ``INDEX``."""
    NEXT: gl.constexpr = INDEX * PANEL * PARTS // FORM.block + 1
    PART: gl.constexpr = NEXT % PARTS
    return load_factors(pointers, block + NEXT // PARTS, groups, layout, FORM, PART, PARTS)


@constexpr_function
def first_group(form, tile, dtype, index):
    """The first group of a block's panel, among those of a part."""
    return index % (form.block // PANEL.value // parts_of(form, tile, dtype)) * PANEL.value // form.group


@gluon.jit
def of_groups(factors, INDEX: gl.constexpr, DTYPE: gl.constexpr, FORM: gl.constexpr, TILE: gl.constexpr):
    """A vector of ``DTYPE`` for each group of a block's panel, from the result of ``load_factors``."""
    own = ()
    if in_words(FORM, DTYPE):
        COUNT: gl.constexpr = max(PANEL // FORM.group, 1)
        FIRST: gl.constexpr = first_group(FORM, TILE, DTYPE, INDEX)
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
def spread(own, w):
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
