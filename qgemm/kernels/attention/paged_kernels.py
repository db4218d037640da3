"""Attention of sequences of unlike length, one after the other in one tensor, to keys that may lie anywhere.

How many queries and keys a sequence has is read on the device, so a CUDA graph is good for every batch of the same
bounds, new tokens and prompts mixed. ``_attend_paged_kernel`` is launched once for sequences of up to ``FEW`` queries,
and once for those of more, in larger blocks. A program ends at once if its sequence is of the other kind, or has no
such queries.

It has a head of keys, ``BLOCK_R`` rows that look at it (queries of a sequence times heads of a group, row
``s * GROUP + g``), and one part of the keys that they see: up to those of its last query, and with a window from those
of its first one on, so prompts don't multiply what they mask. Only keys of few queries are in more than one part.

``_combine_paged_kernel``: a row of the output a program, from its parts, as in ``kernels.py``.

``_store_kernel``: the newest key and value of a sequence a program, to their place in its pages.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.attention.kernels import Keys, beside_sink, capped
from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.cache import FloatKeys, FloatValues
from qgemm.kernels.stages.epilogue import rounded
from qgemm.kernels.stages.softmax import add_scores, add_up_parts, normalize


@aggregate
class Sequence:
    """Where the queries and the keys of a sequence begin, and how many there are; the last query sees the last key."""

    first_query: tl.tensor
    queries: tl.tensor
    first_key: tl.tensor
    keys: tl.tensor

    @triton.jit
    def seen(self, first, last, parts, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
        """``Keys`` that the queries from ``first`` to ``last`` see, in ``parts`` at most, of whole blocks."""
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


@triton.jit(do_not_specialize=["parts", "row_blocks"])
def _attend_paged_kernel(
    q, k, v, query_starts, key_starts, pages, sinks, out, part_out, part_lse,
    parts, row_blocks, Hkv,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_pages,
    FEW: tl.constexpr, MANY: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """A part of a head's keys a program, to ``part_out [T, Hkv * GROUP, parts, D]``; to ``out`` unless ``SPLIT``.

    ``MANY``: of sequences that have more than ``FEW`` queries; else of the others. ``PAGE``: how many keys a page has,
    with a row of ``pages`` for each sequence; 0 for a place for each key.
    ``BLOCK_R``, ``BLOCK_N``, ``BLOCK_D``: powers of 2, rows, keys, and at least ``D``.
    """
    if NEXT_EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    pid = tl.program_id(0)
    part, rest = pid % parts, pid // parts
    row_block, head = rest % row_blocks, rest // row_blocks
    batch, kv_head = head // Hkv, (head % Hkv).to(tl.int64)
    own = _sequence(query_starts, key_starts, batch)
    first_row = row_block * BLOCK_R
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
    k += kv_head * stride_kh
    v += kv_head * stride_vh
    if pages is None:
        k += own.first_key.to(tl.int64) * stride_kt
        v += own.first_key.to(tl.int64) * stride_vt
    elif PAGE > 0:
        pages += batch.to(tl.int64) * stride_pages
    else:
        pages += own.first_key
    cached_k = FloatKeys(queries, k, stride_kt, D, pages, PAGE)
    cached_v = FloatValues(v, stride_vt, D, BLOCK_D, pages, PAGE)

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
        scores = capped(cached_k.products(n, offsets, last), SCALE, SOFTCAP)
        top, total, decay, weights = add_scores(top, total, tl.where(visible, scores, float("-inf")))
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
    """A row of ``out [T, Hkv * GROUP, D]`` a program, of sequences of few queries; ``PARTS`` parts at a time."""
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
    key, value, k, v, key_starts, pages,
    stride_key_t, stride_key_h, stride_value_t, stride_value_h, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_pages,
    Hkv: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``BLOCK_H``, ``BLOCK_D``: powers of 2, at least ``Hkv`` and ``D``."""
    if PDL:
        gdc_wait()
    batch = tl.program_id(0).to(tl.int64)
    last = tl.load(key_starts + batch + 1) - tl.load(key_starts + batch) - 1
    if last < 0:
        return
    page = tl.load(pages + batch * stride_pages + last // PAGE).to(tl.int64)
    place = page * PAGE + last % PAGE
    h, d = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (h < Hkv) & (d < D)
    new_key = tl.load(key + batch * stride_key_t + h * stride_key_h + d, mask=inside)
    new_value = tl.load(value + batch * stride_value_t + h * stride_value_h + d, mask=inside)
    tl.store(k + place * stride_kt + h * stride_kh + d, new_key, mask=inside)
    tl.store(v + place * stride_vt + h * stride_vh + d, new_value, mask=inside)
