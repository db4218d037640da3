"""Attention to a cache in two phases: programs process parts of the keys, then their results are combined.

``_attend_kernel``: a program has a head of keys, all rows that attend to it (positions of new tokens times heads of a
group, row ``s * GROUP + g``), and one part of its keys, which it reads block by block with an online softmax. So every
key and value is read once. The result of a part is normalized and comes with the ``lse`` of its scores, to the base 2.

``_combine_kernel``: each program combines the parts of a row of the output.

``Keys`` says which keys are in use and how they are split into parts. Both kernels use it, so nothing has to be counted
or cleared: parts without keys are neither written nor read.

``PDL``: see ``Launch``. ``NEXT_EARLY``: lets the next kernel start at once, before the preceding one has ended. The
output projection then loads its weights beside the attention.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.cache import FloatKeys, FloatValues, Int8Values, Rows, int8_keys
from qgemm.kernels.stages.epilogue import rounded
from qgemm.kernels.stages.softmax import add_scores, add_up_parts, normalize

LOG2E = tl.constexpr(1.4426950408889634)


@aggregate
class Keys:
    """The keys of a sequence that any new token sees: ``[first, end)``, in parts of ``size``."""

    first: tl.tensor
    end: tl.tensor
    size: tl.tensor

    @triton.jit
    def parts(self):
        """The number of parts that have keys."""
        return tl.cdiv(tl.maximum(self.end - self.first, 0), self.size)


@triton.jit
def _keys_of(batch, length, start, stride_length, stride_start, max_length, parts, S, WINDOW, BLOCK_N):
    """The ``Keys`` of sequence ``batch``, in at most ``parts`` parts of whole blocks."""
    end = tl.minimum(tl.load(length + batch * stride_length), max_length)
    first = tl.zeros((), tl.int32)
    if start is not None:
        first = tl.maximum(first, tl.load(start + batch * stride_start))
    if WINDOW:
        first = tl.maximum(first, end - S - WINDOW + 1)
    size = tl.cdiv(tl.cdiv(tl.maximum(end - first, 1), parts), BLOCK_N) * BLOCK_N
    return Keys(first, end, size)


@triton.jit
def capped(scores, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Scores to the base 2 from the products of q and k."""
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (exp(2 * x) + 1)
        power = tl.exp2(scores * (2.0 * LOG2E * SCALE / SOFTCAP))
        return (SOFTCAP * LOG2E) * (1.0 - 2.0 / (power + 1.0))
    else:
        return scores * (SCALE * LOG2E)


@triton.jit
def beside_sink(out, lse, sinks, heads, mask):
    """``out`` with a score that has no value added to the softmax."""
    sink = tl.load(sinks + heads, mask=mask, other=0.0).to(tl.float32) * LOG2E
    return out * (1.0 / (1.0 + tl.exp2(sink - lse)))[:, None]


@triton.jit(do_not_specialize=["parts"])
def _attend_kernel(
    q, k, v, k_scale, v_scale, length, start, sinks, out, part_out, part_lse,
    parts, max_length, Hkv,
    stride_qb, stride_qs, stride_qh,
    stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl,
    stride_k_scale_b, stride_k_scale_h, stride_k_scale_l, stride_v_scale_b, stride_v_scale_h, stride_v_scale_l,
    stride_length, stride_start,
    S: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """Attends to a part of a head's keys: ``part_out [B * Hkv, parts, S * GROUP, D]``, or ``out`` unless ``SPLIT``.

    ``BLOCK_R``, ``BLOCK_N``, ``BLOCK_D``: powers of 2; the rows and keys of a block, and at least ``D``.
    """
    if NEXT_EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    ROWS: tl.constexpr = S * GROUP
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)
    part, rest = pid % parts, pid // parts
    row_block, head = rest % ROW_BLOCKS, rest // ROW_BLOCKS  # of all sequences
    batch, kv_head = (head // Hkv).to(tl.int64), (head % Hkv).to(tl.int64)
    keys = _keys_of(batch, length, start, stride_length, stride_start, max_length, parts, S, WINDOW, BLOCK_N)
    first = keys.first + part * keys.size
    last = tl.minimum(first + keys.size, keys.end)
    if SPLIT and first >= last:
        return

    rows = row_block * BLOCK_R + tl.arange(0, BLOCK_R)
    s, heads, d = rows // GROUP, kv_head * GROUP + rows % GROUP, tl.arange(0, BLOCK_D)
    inside = (rows < ROWS)[:, None] & (d < D)[None, :]
    queries = tl.load(
        q + batch * stride_qb + (s * stride_qs + heads * stride_qh)[:, None] + d[None, :], mask=inside, other=0.0
    )
    k += batch * stride_kb + kv_head * stride_kh
    v += batch * stride_vb + kv_head * stride_vh
    if k_scale is None:
        cached_k = FloatKeys(queries, Rows(k, stride_kl), D)
    else:
        k_scale += batch * stride_k_scale_b + kv_head * stride_k_scale_h
        cached_k = int8_keys(queries, Rows(k, stride_kl), Rows(k_scale, stride_k_scale_l), D)
    if v_scale is None:
        cached_v = FloatValues(Rows(v, stride_vl), D, BLOCK_D)
    else:
        v_scale += batch * stride_v_scale_b + kv_head * stride_v_scale_h
        cached_v = Int8Values(Rows(v, stride_vl), Rows(v_scale, stride_v_scale_l), D, BLOCK_D)

    offsets = tl.arange(0, BLOCK_N)
    position = keys.end - S + s
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    sums = cached_v.zeros(BLOCK_R)
    for start_of_block in tl.range(0, last - first, BLOCK_N):
        n = first + start_of_block
        key = (n + offsets)[None, :]
        visible = key < last
        if S > 1:
            visible = visible & (key <= position[:, None])
            if WINDOW:
                visible = visible & (key > position[:, None] - WINDOW)
        scores = capped(cached_k.products(n, offsets, last), SCALE, SOFTCAP)
        scores = tl.where(visible, scores, float("-inf"))
        order = None
        if v_scale is not None:
            order = cached_v.order(n, offsets, last)
        top, total, decay, weights = add_scores(top, total, scores, order)
        sums = cached_v.add(sums, decay, weights, n, offsets, last)

    lse, result = normalize(top, total, cached_v.whole(sums))
    if SPLIT:
        row = (head * parts + part).to(tl.int64) * ROWS + rows
        tl.store(part_lse + row, lse, mask=rows < ROWS)
        tl.store(part_out + row[:, None] * D + d[None, :], result, mask=inside)
    else:
        if sinks is not None:
            result = beside_sink(result, lse, sinks, heads, rows < ROWS)
        row = (batch * S + s) * (Hkv * GROUP) + heads
        tl.store(out + row[:, None] * D + d[None, :], rounded(result, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["parts"])
def _combine_kernel(
    part_out, part_lse, length, start, sinks, out,
    parts, max_length, Hkv, stride_length, stride_start,
    S: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """Each program combines a row of ``out [B, S, Hkv * GROUP, D]``, ``PARTS`` parts at a time."""
    if NEXT_EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    ROWS: tl.constexpr = S * GROUP
    row = tl.program_id(0).to(tl.int64)
    q_head, token = row % (Hkv * GROUP), row // (Hkv * GROUP)
    batch, s = token // S, token % S
    keys = _keys_of(batch, length, start, stride_length, stride_start, max_length, parts, S, WINDOW, BLOCK_N)
    used = keys.parts()
    d = tl.arange(0, BLOCK_D)
    first = (batch * Hkv + q_head // GROUP) * parts * ROWS + s * GROUP + q_head % GROUP
    lse, result = add_up_parts(part_out, part_lse, first, ROWS, used, D, PARTS, BLOCK_D)
    if sinks is not None:
        result = beside_sink(result, lse, sinks, q_head + tl.arange(0, 1), tl.arange(0, 1) < 1)
    place = row * D + d[None, :]
    tl.store(out + place, rounded(result, out.dtype.element_ty), mask=(d < D)[None, :])
