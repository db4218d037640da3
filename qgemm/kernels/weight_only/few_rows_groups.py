"""Products of up to 16 rows whose groups of 16, 32 or 64 values have a scale each: scales of groups' sums. In Gluon.

Four neighbouring threads hold the values of one group, so that each sum of ``mma.sync`` is of a single group, and is
scaled where it is added to others. That takes 2 multiply-adds for each row of x and of the weight, where scaling values
takes as many as there are values, and conversions for scales that are wider than values. A zero point is multiplied by
the sum of a group of x, which a product with ones makes; so is the offset with which int4 is unpacked. Scales and zero
points are copied to shared memory with the blocks of the weight.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.runtime.jit import constexpr_function

from qgemm.kernels.stages.unpack_words import INT4_BIAS, times_of_words, unpack_words
from qgemm.kernels.weight_only.few_rows_products import constant
from qgemm.kernels.weight_only.hopper_factors import columns, rows_layout
from qgemm.kernels.weight_only.kernels import BLOCK, scale_value


@constexpr_function
def words_of_thread(form):
    """How many neighbouring words of a group a thread has."""
    return form.group // 16


@constexpr_function
def factors_layout(tile, count):
    """The layout of ``count`` factors of each row: a thread has all those of the rows whose sums it has."""
    rows = rows_layout(tile.rows, count, tile.warps // tile.splits)
    own, lanes, warps = ([[0, *each] for each in bases] for bases in (rows.reg_bases, rows.lane_bases, rows.warp_bases))
    splits = [[1 << i, 0, 0] for i in range(tile.splits.bit_length() - 1)]
    return gl.DistributedLinearLayout(own, lanes, warps + splits, [], [tile.splits, tile.rows, count])


@constexpr_function
def is_left_to_ones(form, tile, dtype):
    """Whether the offset of low nibbles is left to the product with ones, which is cheaper for few columns."""
    return form.name == "int4" and dtype == gl.bfloat16 and tile.columns == 8 and tile.biased


@gluon.jit
def _by_groups(values, layout: gl.constexpr, AXIS: gl.constexpr, COUNT: gl.constexpr):
    """``values``, of three dimensions, in ``COUNT`` pieces along dimension ``AXIS``, each in ``layout``."""
    if COUNT == 1:
        return (gl.convert_layout(values, layout, assert_trivial=True),)
    else:
        S: gl.constexpr = values.shape[0]
        A: gl.constexpr = values.shape[1]
        B: gl.constexpr = values.shape[2]
        if AXIS == 1:
            first, second = values.reshape([S, 2, A // 2, B]).permute(0, 2, 3, 1).split()
        else:
            first, second = values.reshape([S, A, 2, B // 2]).permute(0, 1, 3, 2).split()
        return _by_groups(first, layout, AXIS, COUNT // 2) + _by_groups(second, layout, AXIS, COUNT // 2)


@gluon.jit
def _vectors(factors, layout: gl.constexpr):
    """``[s, n]`` for each of the factors ``[s, n, count]``."""
    S: gl.constexpr = factors.shape[0]
    ROWS: gl.constexpr = factors.shape[1]
    found = ()
    each = columns(factors.reshape([S * ROWS, factors.shape[2]]))
    for i in gl.static_range(len(each)):
        found = found + (gl.convert_layout(each[i].reshape([S, ROWS]), layout, assert_trivial=True),)
    return found


@gluon.jit
def _operand(parts, layout: gl.constexpr, WORDS: gl.constexpr):
    """The four values of each word ``[s, n, word]``, which are in four tiles, as operand A: ``[s, n, k]``.

    K is permuted inside of groups.
    """
    S: gl.constexpr = parts[0].shape[0]
    ROWS: gl.constexpr = parts[0].shape[1]
    COUNT: gl.constexpr = parts[0].shape[2]
    joined = gl.join(gl.join(parts[0], parts[1]), gl.join(parts[2], parts[3]))
    split = joined.reshape([S, ROWS, COUNT // (4 * WORDS), 4, WORDS, 2, 2]).permute(0, 1, 2, 4, 6, 3, 5)
    return gl.convert_layout(split.reshape([S, ROWS, 4 * COUNT]), layout, assert_trivial=True)


@gluon.jit
def _in_words(values, layout: gl.constexpr, WORDS: gl.constexpr):
    """x, ``[s, k, m]``, in the same order of K."""
    S: gl.constexpr = values.shape[0]
    K: gl.constexpr = values.shape[1]
    COLS: gl.constexpr = values.shape[2]
    split = values.reshape([S, K // (16 * WORDS), 4, WORDS, 2, 2, COLS]).permute(0, 1, 3, 4, 2, 5, 6)
    return gl.convert_layout(split.reshape(values.shape), layout, assert_trivial=True)


@gluon.jit
def ones_of(M, DTYPE: gl.constexpr, FORM: gl.constexpr, TILE: gl.constexpr):
    """Operand A of a product that adds up the values of a group of each row of x."""
    COUNT: gl.constexpr = FORM.group
    return constant(M, 1, COUNT, DTYPE, TILE)


@gluon.jit
def _add_half(
    acc, a, b, scales, zeros, ones, TIMES: gl.constexpr, OFFSET: gl.constexpr, FORM: gl.constexpr
):  # fmt: skip
    """``acc`` plus the products of half a block, group by group.

    ``TIMES``, ``OFFSET``: values of the weight are divided by the former, and the latter is added to them.
    """
    mma: gl.constexpr = acc.type.layout
    nothing = gl.zeros(acc.shape, gl.float32, mma)
    for i in gl.static_range(len(a)):
        scale = scale_value(scales[i])
        factor = scale * TIMES if TIMES != 1 else scale
        acc = gl.fma(mma_v2(a[i], b[i], nothing), gl.broadcast(factor[:, :, None], nothing)[0], acc)
        if FORM.has_zeros or OFFSET != 0:
            added = scale * (-1.0 * OFFSET)
            if FORM.float_zeros:
                added += zeros[i].to(gl.float32)
            elif FORM.has_zeros:
                added -= scale * zeros[i].to(gl.float32)
            acc = gl.fma(mma_v2(ones, b[i], nothing), gl.broadcast(added[:, :, None], nothing)[0], acc)
    return acc


@gluon.jit
def add_groups(acc, blocks, slot, ones, DTYPE: gl.constexpr, FORM: gl.constexpr, TILE: gl.constexpr):
    """``acc`` plus the products of a step, whose operands, scales and zero points ``blocks`` has in ``slot``.

    ``ones``: from ``ones_of``.
    """
    FORMAT: gl.constexpr = FORM.name
    COUNT: gl.constexpr = BLOCK // FORM.group  # groups of half a block
    WORDS: gl.constexpr = words_of_thread(FORM)
    BIASED: gl.constexpr = is_left_to_ones(FORM, TILE, DTYPE)
    mma: gl.constexpr = acc.type.layout
    al: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    bl: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    fl: gl.constexpr = factors_layout(TILE, FORM.block // FORM.group)
    scales = _vectors(blocks.scales.slot(slot).load(fl), gl.SliceLayout(2, mma))
    zeros = scales
    if FORM.has_zeros:
        zeros = _vectors(blocks.zeros.slot(slot).load(fl), gl.SliceLayout(2, mma))
    words = blocks.words(slot, 0, gl.DotOperandLayout(0, mma, WORDS))
    values = unpack_words(words, (), (), FORMAT, DTYPE, BIASED, "", "")
    for half in gl.static_range(2 if FORM.bits == 4 else 1):
        a = _by_groups(_operand(values[half], al, WORDS), al, 2, COUNT)
        x = blocks.x(slot, half, 0, gl.DotOperandLayout(1, mma, 4 * WORDS))
        b = _by_groups(_in_words(x, bl, WORDS), bl, 1, COUNT)
        acc = _add_half(
            acc, a, b, scales[half * COUNT : (half + 1) * COUNT], zeros[half * COUNT : (half + 1) * COUNT], ones,
            times_of_words(FORMAT, DTYPE, half), INT4_BIAS.value if BIASED and half == 0 else 0, FORM,
        )  # fmt: skip
    return acc
