"""What an experts layer does round its two grouped products: routing, row quantization, activation, weighted sum.

A pair is a token and one of its slots, ``p = t * k + j``. Rows of the products are pairs sorted by expert, in the order
of the pairs within an expert: position ``= #pairs of lower experts + #earlier pairs of the same``. That is counted, not
sorted, so no order of programs can change it. Few pairs are counted by every program that quantizes one
(``_quantize_pairs_kernel``); many first in chunks (``_count_pairs_kernel``, ``_place_pairs_kernel``).

``PDL``: see ``Launch``. ``NEXT_EARLY``: let the next kernel start at once, instead of when this one ends.

``_activate_kernel`` reads a row of the first product once, and writes int8. ``_combine_kernel`` adds a token's rows
slot by slot in float32, so the bits are the same every time.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.gated_activation_kernels import gated_activation
from qgemm.kernels.grouped_kernels import GroupTiles, write_tiles
from qgemm.kernels.quantize_kernels import ROUND, _float_of, _magnitude, _multiplier, _quantize, _quantize_row
from qgemm.kernels.stages import INTERPRETING
from qgemm.kernels.stages.views import _round_to_bfloat16


@triton.jit
def _load_ids(ids, pairs, P, E):
    """Experts of ``pairs``, -1 for those outside ``[0, E)`` and beyond ``P``."""
    found = tl.load(ids + pairs, mask=pairs < P, other=-1)
    return tl.where((found >= 0) & (found < E), found, -1).to(tl.int32)


@triton.jit
def _count(ids, first, end, P, E, GROUPS: tl.constexpr, STEP: tl.constexpr):
    """How many of the pairs ``[first, end)`` each expert has: ``[GROUPS]``."""
    groups = tl.arange(0, GROUPS)
    counts = tl.zeros((GROUPS,), dtype=tl.int32)
    for start in range(first, end, STEP):
        found = _load_ids(ids, start + tl.arange(0, STEP), P, E)
        counts += tl.sum((found[None, :] == groups[:, None]).to(tl.int32), axis=1)
    return counts


@triton.jit(do_not_specialize=["P"])
def _quantize_pairs_kernel(
    x, ids, q, q_scale, position, tiles,
    P, E, K, stride_xm, stride_xk,
    TOP_K: tl.constexpr, MIN_SCALE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    ROUTE: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr,
    PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """A pair a program: its token's row of ``x``, quantized into its place among the sorted rows of ``q``.

    ``ROUTE``: the places aren't known yet. Each program counts its own among ``PAIRS`` (a power of 2, at least ``P``);
    one more writes the tiles. Without it ``position`` has the places, and ``ids`` and ``tiles`` aren't read.
    ``BLOCK``, ``BLOCKS``: see ``_quantize_row``.
    """
    if PDL:
        gdc_wait()
    if NEXT_EARLY:
        gdc_launch_dependents()
    pair = tl.program_id(0)
    if ROUTE:
        if pair == P:
            sizes = _count(ids, 0, P, P, E, GROUPS, 32)
            write_tiles(tiles, tl.cumsum(sizes, axis=0) - sizes, sizes, tl.arange(0, GROUPS), BLOCK_M)
            place = tl.full((), -1, tl.int32)
        else:
            expert = _load_ids(ids, pair, P, E)
            pairs = tl.arange(0, PAIRS)
            others = _load_ids(ids, pairs, P, E)
            earlier = (others >= 0) & ((others < expert) | ((others == expert) & (pairs < pair)))
            place = tl.where(expert >= 0, tl.sum(earlier.to(tl.int32), axis=0), -1)
            tl.store(position + pair, place)
    else:
        place = tl.load(position + pair)
    if place >= 0:
        row = place.to(tl.int64)
        token = (pair // TOP_K).to(tl.int64)
        _quantize_row(x + token * stride_xm, q + row * K, q_scale + row, None, K, stride_xk, MIN_SCALE, BLOCK, BLOCKS)


@triton.jit(do_not_specialize=["P"])
def _count_pairs_kernel(
    ids, counts, P, E,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """A chunk of pairs a program: how many each expert has of them, to ``counts [chunks, GROUPS]``."""
    if PDL:
        gdc_wait()
    if NEXT_EARLY:
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    found = _count(ids, chunk * CHUNK, chunk * CHUNK + CHUNK, P, E, GROUPS, 32)
    tl.store(counts + chunk * GROUPS + tl.arange(0, GROUPS), found)


@triton.jit(do_not_specialize=["P"])
def _place_pairs_kernel(
    ids, counts, position, tiles, P, E,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """A chunk of pairs a program: where each goes among the sorted rows, -1 for nowhere. The first writes the tiles."""
    ROWS: tl.constexpr = 16  # of counts at a time
    if PDL:
        gdc_wait()
    if NEXT_EARLY:
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    groups = tl.arange(0, GROUPS)
    sizes = tl.zeros((GROUPS,), dtype=tl.int32)
    before = tl.zeros((GROUPS,), dtype=tl.int32)
    for start in range(0, chunks, ROWS):
        rows = start + tl.arange(0, ROWS)
        part = tl.load(counts + rows[:, None] * GROUPS + groups[None, :], mask=(rows < chunks)[:, None], other=0)
        sizes += tl.sum(part, axis=0)
        before += tl.sum(tl.where((rows < chunk)[:, None], part, 0), axis=0)
    starts = tl.cumsum(sizes, axis=0) - sizes
    if chunk == 0:
        write_tiles(tiles, starts, sizes, groups, BLOCK_M)

    own = chunk * CHUNK + tl.arange(0, CHUNK)
    experts = _load_ids(ids, own, P, E)
    place = tl.gather(starts + before, tl.maximum(experts, 0), 0)
    for start in range(chunk * CHUNK, chunk * CHUNK + CHUNK, 32):
        others = start + tl.arange(0, 32)
        same = _load_ids(ids, others, P, E)[None, :] == experts[:, None]
        place += tl.sum((same & (others[None, :] < own[:, None])).to(tl.int32), axis=1)
    tl.store(position + own, tl.where(experts >= 0, place, -1), mask=own < P)


@triton.jit
def _activated(
    g, k, K,
    GATED: tl.constexpr, FUNCTION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    """The activation of columns ``k`` of the row at ``g``, as its dtype; 0 beyond ``K``. See ``gated_activation``."""
    dtype = g.dtype.element_ty
    gate = tl.load(g + k, mask=k < K, other=0.0).to(tl.float32)
    up = tl.load(g + K + k, mask=k < K, other=0.0).to(tl.float32) if GATED else None
    out = gated_activation(gate, up, FUNCTION, LIMIT, ALPHA, UP_OFFSET)
    if INTERPRETING and dtype == tl.bfloat16:
        out = _round_to_bfloat16(out)
    return out.to(dtype)


@triton.jit
def _quantize_by_division(x, scale):
    quotient = tl.minimum(tl.maximum(tl.math.div_rn(x.to(tl.float32), scale), -127.0), 127.0)
    return tl.where(scale == scale, (quotient + ROUND) - ROUND, 0.0).to(tl.int8)


@triton.jit
def _activate_kernel(
    g, q, q_scale, tiles,
    K,
    GATED: tl.constexpr, FUNCTION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr,
    MIN_SCALE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """A row a program: the activation of ``g``'s, ``[rows, 2K]`` or ``[rows, K]``, quantized: ``q [rows, K]``.

    ``BLOCKS``: how many blocks of ``BLOCK`` values hold a row of ``K``; 0 to compute it twice, a block at a time.
    """
    if PDL:
        gdc_wait()
    if NEXT_EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    if row < GroupTiles(tiles).num_rows():
        dtype: tl.constexpr = g.dtype.element_ty
        ONE_PRODUCT: tl.constexpr = dtype == tl.bfloat16
        g_row = g + row * K * (2 if GATED else 1)
        q_row = q + row * K
        offsets = tl.arange(0, BLOCK)
        blocks = ()
        largest = _magnitude(tl.zeros((BLOCK,), dtype=dtype))
        if BLOCKS:
            for i in tl.static_range(BLOCKS):
                values = _activated(g_row, i * BLOCK + offsets, K, GATED, FUNCTION, LIMIT, ALPHA, UP_OFFSET)
                blocks = blocks + (values,)
                largest = tl.maximum(largest, _magnitude(values))
        else:
            for start in range(0, K, BLOCK):
                values = _activated(g_row, start + offsets, K, GATED, FUNCTION, LIMIT, ALPHA, UP_OFFSET)
                largest = tl.maximum(largest, _magnitude(values))
        amax = _float_of(tl.max(largest, axis=0), dtype)
        scale = tl.where(amax == 0, 1.0, tl.maximum(tl.math.div_rn(amax, 127.0), MIN_SCALE))
        scale = tl.where(amax < float("inf"), scale, float("nan"))
        tl.store(q_scale + row, scale)

        inverse = _multiplier(amax, scale) if ONE_PRODUCT else tl.math.div_rn(1.0, scale)
        # As in _quantize_row.
        usual = (scale > 2.0**-100) & (scale < 2.0**100) & (ONE_PRODUCT or not INTERPRETING)
        if BLOCKS:
            for i in tl.static_range(BLOCKS):
                k = i * BLOCK + offsets
                if usual:
                    tl.store(q_row + k, _quantize(blocks[i], scale, inverse, ONE_PRODUCT, False), mask=k < K)
                else:
                    tl.store(q_row + k, _quantize_by_division(blocks[i], scale), mask=k < K)
        else:
            for start in range(0, K, BLOCK):
                k = start + offsets
                values = _activated(g_row, k, K, GATED, FUNCTION, LIMIT, ALPHA, UP_OFFSET)
                tl.store(q_row + k, _quantize_by_division(values, scale), mask=k < K)


@triton.jit
def _combine_kernel(
    y, position, weights, out,
    N,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """Part of a token's row a program: ``out[t] = sum over j of weights[t, j] * y[position[t, j]]``."""
    if PDL:
        gdc_wait()
    if NEXT_EARLY:
        gdc_launch_dependents()
    parts = tl.cdiv(N, BLOCK)
    token = (tl.program_id(0) // parts).to(tl.int64)
    columns = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        place = tl.load(position + token * TOP_K + j)
        weight = tl.load(weights + token * TOP_K + j).to(tl.float32)
        values = tl.load(y + place.to(tl.int64) * N + columns, mask=(columns < N) & (place >= 0), other=0.0)
        total += tl.where(place >= 0, values.to(tl.float32) * weight, 0.0)
    if INTERPRETING and out.dtype.element_ty == tl.bfloat16:
        total = _round_to_bfloat16(total)
    tl.store(out + token * N + columns, total.to(out.dtype.element_ty), mask=columns < N)
