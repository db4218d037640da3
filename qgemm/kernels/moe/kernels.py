"""The parts of an experts layer around its two grouped products: routing, row quantization, activation, weighted sum.

A pair is a token and one of its slots, ``p = t * k + j``. Rows of the products are pairs sorted by expert, and within
an expert in the order of the pairs: ``position = #pairs of lower experts + #earlier pairs of the same expert``.
Positions are counted, not sorted, so the order in which programs run can't change them. If there are few pairs, each
program that quantizes one counts its position (``_quantize_pairs_kernel``). If there are many, they are first counted
in chunks (``_count_pairs_kernel``, ``_place_pairs_kernel``), and then a token is quantized once for all of its rows
(``_quantize_tokens_kernel``).

``_activate_kernel`` reads a row of the first product once, and writes int8 or fp8. ``_combine_kernel`` adds a token's
rows slot by slot in float32, so the bits are the same every time.

If only weights are quantized, ``q_scale`` is None: tokens are copied to their places, and rows are activated, in
floats.

``PDL``: see ``Launch``. ``NEXT_EARLY``: lets the next kernel start at once, instead of when this one ends.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.grouped.kernels import GroupTiles, write_tiles
from qgemm.kernels.stages.epilogue import rounded
from qgemm.kernels.stages.rows import (
    GROUP,
    GatedRow,
    StridedRow,
    copy_row,
    load_blocks,
    quantize_blocks,
    quantize_row,
    quantize_row_groups,
    row_quantization,
)


@triton.jit
def _load_ids(ids, pairs, P, E):
    """Experts of ``pairs``, -1 for those outside ``[0, E)`` and beyond ``P``."""
    found = tl.load(ids + pairs, mask=pairs < P, other=-1)
    return tl.where((found >= 0) & (found < E), found, -1).to(tl.int32)


@triton.jit(do_not_specialize=["P"])
def _quantize_pairs_kernel(
    x, ids, q, q_scale, position, tiles,
    P, E, K, stride_xm, stride_xk,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    PAIRS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr,
    PDL: tl.constexpr, NEXT_EARLY: tl.constexpr, E4M3: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Each program quantizes a pair: its token's row of ``x``, into the pair's place among the sorted rows of ``q``.

    A program counts its pair's place among ``PAIRS`` pairs (a power of 2, at least ``P``); one more program writes the
    tiles. ``GROUPS``: a power of 2, at least ``E``. ``BLOCK``, ``BLOCKS``: see ``quantize_row``. ``E4M3``, ``GROUPED``:
    see ``_write_row``.
    """
    if PDL:
        gdc_wait()
    if NEXT_EARLY:
        gdc_launch_dependents()
    pair = tl.program_id(0)
    if pair == P:
        experts = _load_ids(ids, tl.arange(0, PAIRS), P, E)
        sizes = tl.histogram(experts, GROUPS, mask=experts >= 0)
        write_tiles(tiles, tl.cumsum(sizes, axis=0) - sizes, sizes, tl.arange(0, GROUPS), BLOCK_M)
        place = tl.full((), -1, tl.int32)
    else:
        expert = _load_ids(ids, pair, P, E)
        pairs = tl.arange(0, PAIRS)
        others = _load_ids(ids, pairs, P, E)
        earlier = (others >= 0) & ((others < expert) | ((others == expert) & (pairs < pair)))
        place = tl.where(expert >= 0, tl.sum(earlier.to(tl.int32), axis=0), -1)
        tl.store(position + pair, place)
    if place >= 0:
        row = place.to(tl.int64)
        token = (pair // TOP_K).to(tl.int64)
        source = StridedRow(x + token * stride_xm, K, stride_xk)
        _write_row(source, q, q_scale, row, tl.arange(0, BLOCK), BLOCKS, E4M3, GROUPED)


@triton.jit
def _write_row(
    source, q, q_scale, row, offsets,
    BLOCKS: tl.constexpr, E4M3: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Quantizes a row to row ``row`` of ``q``, whose rows have the same length; copies it if ``q_scale`` is None.

    ``E4M3``: see ``row_quantization``. ``GROUPED``: with a scale for each 128 values, contiguous.
    """
    own = q + row * source.length
    if q_scale is None:
        copy_row(source, own, offsets)
    else:
        quantization = row_quantization(None, None, E4M3)
        if own.dtype.element_ty != tl.int8:
            own = own.to(tl.pointer_type(tl.int8), bitcast=True)
        if GROUPED:
            quantize_row_groups(
                source, quantization, own, q_scale + row * tl.cdiv(source.length, GROUP), 1, offsets, BLOCKS
            )
        else:
            quantize_row(source, quantization, own, q_scale + row, offsets, BLOCKS)


@triton.jit(do_not_specialize=["P"])
def _list_pairs_kernel(ids, lists, P, E, BY_PAIR: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr):
    """Each program lists the pairs of an expert, in order: how many there are, then each, in a row of ``lists``.

    ``lists [E, 1 + P]``, or, if ``BY_PAIR``, ``[P, 1 + P]``: then only the first pair of an expert has a list that
    isn't empty. ``PAIRS``: a power of 2, at least ``P``.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    item = tl.program_id(0)
    pairs = tl.arange(0, PAIRS)
    found = _load_ids(ids, pairs, P, E)
    expert = item
    if BY_PAIR:
        expert = _load_ids(ids, item, P, E)
        earlier = tl.max(((found == expert) & (pairs < item)).to(tl.int32), axis=0)
        expert = tl.where((expert < 0) | (earlier > 0), -2, expert)
    chosen = (found == expert).to(tl.int32)
    own = lists + item * (1 + P)
    tl.store(own, tl.sum(chosen, axis=0))
    tl.store(own + tl.cumsum(chosen, axis=0), pairs, mask=chosen > 0)


@triton.jit(do_not_specialize=["P"])
def _count_pairs_kernel(
    ids, counts, P, E,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """Each program counts, for a chunk of pairs, how many each expert has, into ``counts [chunks, GROUPS]``."""
    if PDL:
        gdc_wait()
    if NEXT_EARLY:
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    experts = _load_ids(ids, chunk * CHUNK + tl.arange(0, CHUNK), P, E)
    found = tl.histogram(experts, GROUPS, mask=experts >= 0)
    tl.store(counts + chunk * GROUPS + tl.arange(0, GROUPS), found)


@triton.jit(do_not_specialize=["P", "chunks"])
def _place_pairs_kernel(
    ids, counts, position, tiles, P, E, chunks,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """Each program places a chunk of pairs among the sorted rows, -1 for nowhere. One more program writes the tiles."""
    ROWS: tl.constexpr = 16  # of counts at a time
    if PDL:
        gdc_wait()
    if NEXT_EARLY:
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    # They are summed over the rows only once, at the end: such a sum goes through shared memory.
    every = tl.zeros((ROWS, GROUPS), dtype=tl.int32)
    earlier = tl.zeros((ROWS, GROUPS), dtype=tl.int32)
    for start in tl.range(0, chunks, ROWS, loop_unroll_factor=4):
        rows = start + tl.arange(0, ROWS)
        part = tl.load(counts + rows[:, None] * GROUPS + groups[None, :], mask=(rows < chunks)[:, None], other=0)
        every += part
        earlier += tl.where((rows < chunk)[:, None], part, 0)
    sizes = tl.sum(every, axis=0)
    starts = tl.cumsum(sizes, axis=0) - sizes
    if chunk == chunks:
        write_tiles(tiles, starts, sizes, groups, BLOCK_M)
    else:
        pairs = chunk * CHUNK + tl.arange(0, CHUNK)
        experts = _load_ids(ids, pairs, P, E)
        place = tl.gather(starts + tl.sum(earlier, axis=0), tl.maximum(experts, 0), 0)
        for start in tl.range(0, CHUNK, 32, loop_unroll_factor=2):
            others = chunk * CHUNK + start + tl.arange(0, 32)
            same = _load_ids(ids, others, P, E)[None, :] == experts[:, None]
            place += tl.sum((same & (others[None, :] < pairs[:, None])).to(tl.int32), axis=1)
        tl.store(position + pairs, tl.where(experts >= 0, place, -1), mask=pairs < P)


@triton.jit
def _quantize_tokens_kernel(
    x, q, q_scale, position,
    K, stride_xm, stride_xk,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    PDL: tl.constexpr, NEXT_EARLY: tl.constexpr, E4M3: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Each program quantizes a token: its row of ``x``, to each of the token's places in ``q``.

    ``BLOCKS``: how many blocks of ``BLOCK`` values hold the row. With 0, and with ``GROUPED``, it is quantized anew for
    each place. ``E4M3``, ``GROUPED``: see ``_write_row``.
    """
    if PDL:
        gdc_wait()
    if NEXT_EARLY:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    source, offsets = StridedRow(x + token * stride_xm, K, stride_xk), tl.arange(0, BLOCK)
    if E4M3 is not None and q.dtype.element_ty != tl.int8:
        q = q.to(tl.pointer_type(tl.int8), bitcast=True)
    HELD: tl.constexpr = 0 if GROUPED else BLOCKS
    blocks = load_blocks(source, offsets, HELD)
    values = blocks
    if HELD and q_scale is not None:
        scale, values = quantize_blocks(blocks, row_quantization(None, None, E4M3), HELD)
    for j in tl.static_range(TOP_K):
        row = tl.load(position + token * TOP_K + j).to(tl.int64)
        if row >= 0:
            if not HELD:
                _write_row(source, q, q_scale, row, offsets, BLOCKS, E4M3, GROUPED)
            else:
                if q_scale is not None:
                    tl.store(q_scale + row, scale)
                for i in tl.static_range(HELD):
                    k = i * BLOCK + offsets
                    tl.store(q + row * K + k, values[i], mask=k < K)


@triton.jit
def _activate_kernel(
    g, q, q_scale, tiles,
    K,
    FUNCTION: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    PDL: tl.constexpr, NEXT_EARLY: tl.constexpr, E4M3: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Each program activates a row of ``g``, ``[rows, 2K]`` or ``[rows, K]``, and quantizes it: ``q [rows, K]``.

    ``FUNCTION``, ``ACTIVATION``: as in ``GatedRow``. ``BLOCKS``: how many blocks of ``BLOCK`` values hold a row of
    ``K``; with 0 it is computed twice, a block at a time. ``E4M3``, ``GROUPED``: see ``_write_row``.
    """
    if PDL:
        gdc_wait()
    if NEXT_EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    if row < GroupTiles(tiles).num_rows():
        source = GatedRow(g + row * K * (2 if ACTIVATION.gated else 1), K, FUNCTION, ACTIVATION)
        _write_row(source, q, q_scale, row, tl.arange(0, BLOCK), BLOCKS, E4M3, GROUPED)


@triton.jit
def _combine_kernel(
    y, position, weights, residual, out,
    N, E,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, SORTED: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """Each program adds up a part of a token's row: ``out[t] = sum over j of weights[t, j] * y[position[t, j]]``.

    ``residual[t]`` is added unless it is None; then both the sum and the result are rounded. Without ``SORTED``, rows
    of ``y`` are in the order of pairs, and ``position`` has the pairs' experts: only experts in ``[0, E)`` are added.
    """
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
        if not SORTED:
            place = tl.where((place >= 0) & (place < E), token * TOP_K + j, -1)
        weight = tl.load(weights + token * TOP_K + j).to(tl.float32)
        # A single comparison: Triton 3.9's interpreter doesn't accept a mask made of a vector and a scalar.
        values = tl.load(y + place.to(tl.int64) * N + columns, mask=columns < tl.where(place >= 0, N, 0), other=0.0)
        total += tl.where(place >= 0, values.to(tl.float32) * weight, 0.0)
    added = rounded(total, out.dtype.element_ty)
    if residual is not None:
        other = tl.load(residual + token * N + columns, mask=columns < N, other=0.0).to(tl.float32)
        added = rounded(other + added.to(tl.float32), out.dtype.element_ty)
    tl.store(out + token * N + columns, added, mask=columns < N)
