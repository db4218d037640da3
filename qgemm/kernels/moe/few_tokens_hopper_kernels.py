"""Products of few tokens with their experts' stored weights on Hopper, in Gluon: mainly a read of the weights.

A program has some rows of one expert's weight, and multiplies them as ``_few_rows_kernel`` does, by up to
``TILE.columns`` tokens at a time. Which ones chose the expert, ``_list_pairs_kernel`` has written; no row is copied.
Pairs of a token and an expert stay in their order: row ``p`` of the output is that of pair ``p``. Rows of gates and of
ups are in turn, so the activation is applied where the sums are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.activations import gate_value, up_value
from qgemm.kernels.weight_only.few_rows_blocks import (
    CopiedBlocks,
    begin,
    multiply,
    weight_blocks,
    x_blocks,
    x_rows_layout,
)
from qgemm.kernels.weight_only.few_rows_products import products_of
from qgemm.kernels.weight_only.hopper_epilogue import SwappedEpilogue


@gluon.jit
def _activated(outputs, FUNCTION: gl.constexpr, ACTIVATION: gl.constexpr):
    """``ACTIVATION`` of a tile's sums, in float32; gates and ups are in turn."""
    if ACTIVATION is None:
        return outputs
    elif ACTIVATION.gated:
        ROWS: gl.constexpr = outputs.shape[0] // 2
        gate, up = gl.split(outputs.reshape([ROWS, 2, outputs.shape[1]]).permute((0, 2, 1)))
        return gate_value(gate.to(gl.float32), FUNCTION, ACTIVATION) * up_value(up.to(gl.float32), ACTIVATION)
    else:
        return gate_value(outputs.to(gl.float32), FUNCTION, ACTIVATION)


@gluon.jit
def _store(out, values, pair, start, columns):
    """Stores a tile's outputs, from column ``start`` on, to the rows of its pairs."""
    ol: gl.constexpr = values.type.layout
    column = start + gl.arange(0, values.shape[0], gl.SliceLayout(1, ol))
    row = gl.convert_layout(pair, gl.SliceLayout(0, ol))
    to = out + gl.maximum(row, 0).to(gl.int64)[None, :] * columns + column[:, None]
    gl.store(to, values.to(out.dtype.element_ty), mask=(row >= 0)[None, :] & (column < columns)[:, None])


@gluon.jit(do_not_specialize=["P"])
def _few_tokens_kernel(
    x, ids, lists, weight, scale, zero_point, global_scale, bias, out,
    P, E, N, K, stride_wn, stride_sn,
    FORM: gl.constexpr, TILE: gl.constexpr, FUNCTION: gl.constexpr, ACTIVATION: gl.constexpr,
    PAIRS_OF_ROW: gl.constexpr, BY_PAIR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """``x [P / PAIRS_OF_ROW, K]``, ``ids [P]``, ``weight [E, N, stride_wn]`` in bytes, ``scale``,
    ``zero_point [E, N, stride_sn]``, ``global_scale [E, 2]``, ``bias [E, N]``, ``out [P, N]``. With a gated
    ``ACTIVATION``, ``N`` is gates before ups, and ``out`` has half as many columns.

    ``lists``: of ``_list_pairs_kernel``, by pair or by expert; None if each pair has a program's rows by itself.
    """
    FIRST: gl.constexpr = ACTIVATION is not None
    COLUMNS: gl.constexpr = TILE.columns
    COUNT: gl.constexpr = FORM.block // FORM.group if FORM.by_groups else 1
    pl: gl.constexpr = gl.BlockedLayout([1], [32], [TILE.warps], [0])
    tiles = gl.cdiv(N, TILE.rows)
    item = gl.program_id(0) // tiles
    row = gl.program_id(0) % tiles * TILE.rows
    # For the product after the first, ids and lists are there when this kernel may begin: the kernels that wrote them
    # have ended.
    if PDL and FIRST:
        gdc_wait()
        gdc_launch_dependents()
    expert = item
    if BY_PAIR:
        expert = gl.load(ids + item).to(gl.int32)
    known = (expert >= 0) & (expert < E)
    if lists is None:
        count = known.to(gl.int32)
    else:
        lists += item * (1 + P)
        count = gl.load(lists)

    # Which of all experts' rows are the expert's own.
    own = gl.where(known, expert, 0).to(gl.int64)
    weight += own * N * stride_wn
    scale += own * N * (stride_sn // COUNT * COUNT)
    if FORM.has_zeros:
        zero_point += own * N * (stride_sn // COUNT * COUNT)
    if global_scale is not None:
        global_scale += own * 2
    if bias is not None:
        bias += own * N
    K = K // 8 * 8
    w, scales, zeros = weight_blocks(weight, scale, zero_point, row, N, K, stride_wn, stride_sn, FORM, TILE)
    products = products_of(scale, zero_point, stride_sn, P, N, K, x.dtype.element_ty, FORM, TILE, 1)
    epilogue = SwappedEpilogue(global_scale, bias, None, 0, P, N)
    for first in range(0, count, COLUMNS):
        column = gl.arange(0, COLUMNS, pl)
        if lists is None:
            pair = gl.where(column == 0, item, -1)
            m = item + gl.arange(0, 1, x_rows_layout(TILE, FORM))
        else:
            pair = gl.load(lists + 1 + first + column, mask=first + column < count, other=-1)
            m = gl.convert_layout(gl.maximum(pair, 0), x_rows_layout(TILE, FORM))
        blocks = CopiedBlocks(w, x_blocks(x, m // PAIRS_OF_ROW, K, K, FORM, TILE), scales, zeros, FORM, TILE)
        loaded = begin(blocks, products, row, P)
        if PDL and not FIRST:
            gdc_wait()
            # Not earlier: the kernel after the next relies on what this one has waited for.
            gdc_launch_dependents()
        acc = multiply(blocks, products, row, loaded)
        outputs = products.outputs(products.total(acc), row, epilogue, out.dtype.element_ty)
        if TILE.gated:
            _store(out, _activated(outputs, FUNCTION, ACTIVATION), pair, row // 2, N // 2)
        else:
            _store(out, _activated(outputs, FUNCTION, ACTIVATION), pair, row, N)
    if PDL and not FIRST:
        gdc_wait()
