"""Attention of sequences of different lengths, one after the other in one tensor, to keys that may lie anywhere.

The numbers of queries and keys of a sequence are read on the device, so a CUDA graph works for every batch within the
same bounds, also of new tokens mixed with prompts. ``_attend_paged_kernel`` is launched once for sequences of up to
``FEW`` queries, and once, in larger blocks, for those with more. A program ends at once if its sequence is of the other
kind, or has no such queries. For the longer sequences there are as many programs as this many tokens and sequences can
need at most; each finds its sequence and its rows in ``query_starts``.

A program has a head of keys, in float or int8, ``BLOCK_R`` rows that attend to it (queries of a sequence times heads of
a group, row ``s * GROUP + g``), and one part of the keys that these rows see: up to those of its last query and, with a
window, from those of its first query on. So prompts don't compute products that are masked. Only the keys of few
queries are split into several parts.

``_combine_paged_kernel``: each program combines the parts of a row of the output, as in ``kernels.py``.

``_store_kernel``: each program stores a key and a value of all heads in their place. The newest of a sequence go to its
last page.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.attention.kernels import Keys, beside_sink, capped
from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.cache import FloatKeys, FloatValues, Int8Values, Rows, int8_keys
from qgemm.kernels.stages.epilogue import rounded
from qgemm.kernels.stages.rows import RowQuantization, quantize_rows_of_tile
from qgemm.kernels.stages.softmax import add_scores, add_up_parts, normalize


@aggregate
class Sequence:
    """Where a sequence's queries and keys begin, and how many there are. The last query sees the last key."""

    first_query: tl.tensor
    queries: tl.tensor
    first_key: tl.tensor
    keys: tl.tensor

    @triton.jit
    def seen(self, first, last, parts, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
        """The ``Keys`` that queries ``first`` to ``last`` see, in at most ``parts`` parts of whole blocks."""
        before = self.keys - self.queries
        end = tl.minimum(before + last + 1, self.keys)
        begin = tl.zeros((), tl.int32)
        if WINDOW:
            begin = tl.maximum(begin, before + first - WINDOW + 1)
        size = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 1), parts), BLOCK_N) * BLOCK_N
        return Keys(begin, end, size)


@triton.jit
def _sequence(query_starts, key_starts, batch):
    first_query = tl.load(query_starts + batch)
    first_key = tl.load(key_starts + batch)
    queries = tl.load(query_starts + batch + 1) - first_query
    return Sequence(first_query, queries, first_key, tl.load(key_starts + batch + 1) - first_key)


@triton.jit
def _find_block(query_starts, number, B, GROUP: tl.constexpr, BLOCK_R: tl.constexpr):
    """``(sequence, first row)`` of a block of rows; for a block beyond the last, a first row that doesn't exist.

    The blocks of sequence ``i`` are numbered from ``query_starts[i] * GROUP // BLOCK_R + i`` on: the sequences before
    it need at most that many, since each may end in a block that isn't full.
    """
    low = tl.zeros((), tl.int32)
    high = low + B - 1
    while low < high:
        middle = (low + high + 1) // 2
        isnt_before = tl.load(query_starts + middle) * GROUP // BLOCK_R + middle <= number
        low = tl.where(isnt_before, middle, low)
        high = tl.where(isnt_before, high, middle - 1)
    return low, (number - tl.load(query_starts + low) * GROUP // BLOCK_R - low) * BLOCK_R


@triton.jit(do_not_specialize=["parts", "B"])
def _attend_paged_kernel(
    q, k, v, k_scale, v_scale, query_starts, key_starts, pages, sinks, out, part_out, part_lse,
    parts, B, Hkv,
    stride_qt, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh,
    stride_k_scale_p, stride_k_scale_t, stride_k_scale_h, stride_v_scale_p, stride_v_scale_t, stride_v_scale_h,
    stride_pages,
    FEW: tl.constexpr, MANY: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """Attends to a part of a head's keys: ``part_out [T, Hkv * GROUP, parts, D]``, or ``out`` unless ``SPLIT``.

    ``MANY``: for sequences with more than ``FEW`` queries, else for the others. ``pages``, ``PAGE``: see ``Rows``; each
    sequence has a row of a table. ``BLOCK_R``, ``BLOCK_N``, ``BLOCK_D``: powers of 2; the rows and keys of a block, and
    at least ``D``.
    """
    if NEXT_EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    pid = tl.program_id(0)
    part, rest = pid % parts, pid // parts
    block, kv_head = rest // Hkv, (rest % Hkv).to(tl.int64)
    if MANY:
        batch, first_row = _find_block(query_starts, block, B, GROUP, BLOCK_R)
    else:
        ROW_BLOCKS: tl.constexpr = (FEW * GROUP + BLOCK_R - 1) // BLOCK_R
        batch, first_row = block // ROW_BLOCKS, block % ROW_BLOCKS * BLOCK_R
    own = _sequence(query_starts, key_starts, batch)
    if (own.queries > FEW) != MANY or first_row >= own.queries * GROUP:
        return
    keys = own.seen(first_row // GROUP, (first_row + BLOCK_R - 1) // GROUP, parts, WINDOW, BLOCK_N)
    first = keys.first + part * keys.size
    last = tl.minimum(first + keys.size, keys.end)
    if SPLIT and first >= last:
        return

    rows = first_row + tl.arange(0, BLOCK_R)
    s, heads, d = rows // GROUP, kv_head * GROUP + rows % GROUP, tl.arange(0, BLOCK_D)
    token = (own.first_query + s).to(tl.int64)
    inside = (s < own.queries)[:, None] & (d < D)[None, :]
    queries = tl.load(q + (token * stride_qt + heads * stride_qh)[:, None] + d[None, :], mask=inside, other=0.0)
    first_key = own.first_key.to(tl.int64)
    skipped = tl.zeros((), tl.int64)  # the keys of other sequences that come before this one's
    TABLES: tl.constexpr = pages is not None and pages.dtype.element_ty == tl.int32
    if pages is None:
        skipped = first_key
    elif TABLES:
        pages += batch.to(tl.int64) * stride_pages
    else:
        pages += first_key
    WHOLE: tl.constexpr = TABLES and WINDOW == 0 and PAGE % BLOCK_N == 0  # blocks begin at multiples of their size
    all_k = Rows(k + skipped * stride_kt + kv_head * stride_kh, stride_kt, stride_kp, pages, PAGE, WHOLE)
    all_v = Rows(v + skipped * stride_vt + kv_head * stride_vh, stride_vt, stride_vp, pages, PAGE, WHOLE)
    if k_scale is None:
        cached_k, cached_v = FloatKeys(queries, all_k, D), FloatValues(all_v, D, BLOCK_D)
    else:
        k_scale += skipped * stride_k_scale_t + kv_head * stride_k_scale_h
        v_scale += skipped * stride_v_scale_t + kv_head * stride_v_scale_h
        all_k_scales = Rows(k_scale, stride_k_scale_t, stride_k_scale_p, pages, PAGE, WHOLE)
        all_v_scales = Rows(v_scale, stride_v_scale_t, stride_v_scale_p, pages, PAGE, WHOLE)
        cached_k, cached_v = int8_keys(queries, all_k, all_k_scales, D), Int8Values(all_v, all_v_scales, D, BLOCK_D)

    offsets = tl.arange(0, BLOCK_N)
    position = own.keys - own.queries + s
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    sums = cached_v.zeros(BLOCK_R)
    for start_of_block in tl.range(0, last - first, BLOCK_N):
        n = first + start_of_block
        key = (n + offsets)[None, :]
        visible = (key < last) & (key <= position[:, None])
        if WINDOW:
            visible = visible & (key > position[:, None] - WINDOW)
        scores = tl.where(visible, capped(cached_k.products(n, offsets, last), SCALE, SOFTCAP), float("-inf"))
        order = None
        if v_scale is not None:
            order = cached_v.order(n, offsets, last)
        top, total, decay, weights = add_scores(top, total, scores, order)
        sums = cached_v.add(sums, decay, weights, n, offsets, last)

    lse, result = normalize(top, total, cached_v.whole(sums))
    row = token * (Hkv * GROUP) + heads
    if SPLIT:
        place = row * parts + part
        tl.store(part_lse + place, lse, mask=s < own.queries)
        tl.store(part_out + place[:, None] * D + d[None, :], result, mask=inside)
    else:
        if sinks is not None:
            result = beside_sink(result, lse, sinks, heads, s < own.queries)
        tl.store(out + row[:, None] * D + d[None, :], rounded(result, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["parts"])
def _combine_paged_kernel(
    part_out, part_lse, query_starts, key_starts, sinks, out,
    parts, Hkv,
    FEW: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """Each program combines a row of ``out [T, Hkv * GROUP, D]`` of few queries, ``PARTS`` parts at a time."""
    if NEXT_EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    pid = tl.program_id(0)
    q_head, rest = pid % (Hkv * GROUP), pid // (Hkv * GROUP)
    s, batch = rest % FEW, rest // FEW
    own = _sequence(query_starts, key_starts, batch)
    if own.queries > FEW or s >= own.queries:
        return
    first_row = (s * GROUP + q_head % GROUP) // BLOCK_R * BLOCK_R
    keys = own.seen(first_row // GROUP, (first_row + BLOCK_R - 1) // GROUP, parts, WINDOW, BLOCK_N)
    row = (own.first_query + s).to(tl.int64) * (Hkv * GROUP) + q_head
    lse, result = add_up_parts(part_out, part_lse, row * parts, 1, keys.parts(), D, PARTS, BLOCK_D)
    if sinks is not None:
        result = beside_sink(result, lse, sinks, q_head + tl.arange(0, 1), tl.arange(0, 1) < 1)
    d = tl.arange(0, BLOCK_D)
    tl.store(out + row * D + d[None, :], rounded(result, out.dtype.element_ty), mask=(d < D)[None, :])


@triton.jit
def _store_kernel(
    key, value, k, v, k_scale, v_scale, key_starts, pages,
    stride_key_t, stride_key_h, stride_value_t, stride_value_h,
    stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh,
    stride_k_scale_p, stride_k_scale_t, stride_k_scale_h, stride_v_scale_p, stride_v_scale_t, stride_v_scale_h,
    stride_pages,
    Hkv: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``BLOCK_H``, ``BLOCK_D``: powers of 2, at least ``Hkv`` and ``D``."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    page = tl.zeros((), tl.int64)
    if key_starts is None:
        place = tl.load(pages + row)
        if PAGE > 0:
            page, place = place // PAGE, place % PAGE
    else:
        last = tl.load(key_starts + row + 1) - tl.load(key_starts + row) - 1
        if last < 0:
            return
        page = tl.load(pages + row * stride_pages + last // PAGE).to(tl.int64)
        place = (last % PAGE).to(tl.int64)
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    inside = (h < Hkv)[:, None] & (d < D)[None, :]
    new_key = tl.load(key + row * stride_key_t + (h * stride_key_h)[:, None] + d[None, :], mask=inside, other=0.0)
    new_value = tl.load(
        value + row * stride_value_t + (h * stride_value_h)[:, None] + d[None, :], mask=inside, other=0.0
    )
    k += page * stride_kp + place * stride_kt + (h * stride_kh)[:, None] + d[None, :]
    v += page * stride_vp + place * stride_vt + (h * stride_vh)[:, None] + d[None, :]
    if k_scale is None:
        tl.store(k, new_key, mask=inside)
        tl.store(v, new_value, mask=inside)
    else:
        scale, numbers = quantize_rows_of_tile(new_key, RowQuantization(None))
        tl.store(k, numbers, mask=inside)
        k_scale += page * stride_k_scale_p + place * stride_k_scale_t + h * stride_k_scale_h
        tl.store(k_scale, scale, mask=h < Hkv)
        scale, numbers = quantize_rows_of_tile(new_value, RowQuantization(None))
        tl.store(v, numbers, mask=inside)
        v_scale += page * stride_v_scale_p + place * stride_v_scale_t + h * stride_v_scale_h
        tl.store(v_scale, scale, mask=h < Hkv)
