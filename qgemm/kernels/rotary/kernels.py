"""Norms of queries and keys, rotary embedding, and writing keys and values where attention reads them, in one launch.

Another kernel computes the cosines and sines of the rotary embedding.

A program has some heads of one token: of its queries, its keys, or its values. Where the two values of a pair aren't
adjacent, it reads each value twice, first from memory and then from the SM's cache: once as itself, and once as the
partner of the other. The results are those of ``reference.py``, except for the order of the sums in a norm.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.epilogue import rounded
from qgemm.kernels.stages.rows import RowQuantization, quantize_rows_of_tile


@triton.jit(do_not_specialize=["length_stride"])
def _rotate_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, positions_ptr,
    q_out_ptr, k_out_ptr, v_out_ptr, k_scale_ptr, v_scale_ptr, length_ptr,
    S, Q_HEADS, KV_HEADS, D, HALF, L, k_offset, v_offset,
    stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_cb, stride_cs, stride_cd, stride_pb, stride_ps,
    stride_okb, stride_okh, stride_okl, stride_ovb, stride_ovh, stride_ovl,
    stride_skb, stride_skh, stride_skl, stride_svb, stride_svh, stride_svl,
    length_stride,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    Q_WEIGHT: tl.constexpr, K_WEIGHT: tl.constexpr, V_WEIGHT: tl.constexpr, INTERLEAVED: tl.constexpr,
    SCALE: tl.constexpr, PERIOD: tl.constexpr, GROWTH: tl.constexpr, IN_FLOAT: tl.constexpr,
    PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """Each program has some heads of one token: of its queries, keys or values.

    ``q``, ``k``, ``v``: heads of ``[B, S, heads, D]``. In a merged product, keys and values begin at ``k_offset`` and
    ``v_offset``, and all have k's strides, except between the heads of queries. ``q_out``: ``[B, S, Q_HEADS, D]``,
    contiguous. ``k_out``, ``v_out``: ``[B, KV_HEADS, L, D]``; if they have scales ``[B, KV_HEADS, L]``, int8.
    ``length_ptr``: see ``dispatch.store_key_value``; None to begin with the first place. ``Q_WEIGHT``, ``K_WEIGHT``,
    ``V_WEIGHT``: see ``_normalized``. ``SCALE``, ``PERIOD``, ``GROWTH``, ``IN_FLOAT``: see ``RotaryCall``. ``PDL``,
    ``NEXT_EARLY``: see ``_quantize_rows_kernel``.
    """
    if NEXT_EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    q_blocks, kv_blocks = tl.cdiv(Q_HEADS, BLOCK_H), tl.cdiv(KV_HEADS, BLOCK_H)
    blocks = q_blocks + 2 * kv_blocks
    token, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, s = (token // S).to(tl.int64), (token % S).to(tl.int64)
    first = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    angle = b * stride_cb + s * stride_cs
    place = s
    if length_ptr is not None:
        place += tl.load(length_ptr + b * length_stride).to(tl.int64) - S
    # The branches share no variables: a variable would need the same type in all of them.
    if block < q_blocks:
        _store(
            _scaled(
                _rotated(
                    q_ptr + b * stride_kb + s * stride_ks, block * BLOCK_H + first, d, stride_qh, Q_HEADS, D, HALF,
                    cos_ptr, sin_ptr, angle, stride_cd, q_weight_ptr, NORM, EPS, Q_WEIGHT, INTERLEAVED, IN_FLOAT,
                ),
                positions_ptr, b * stride_pb + s * stride_ps, SCALE, PERIOD, GROWTH,
            ),
            q_out_ptr + token.to(tl.int64) * Q_HEADS * D, None, 0, block * BLOCK_H + first, d, Q_HEADS, D, D, 0,
        )  # fmt: skip
    elif (place >= 0) & (place < L):
        if block < q_blocks + kv_blocks:
            _store(
                _rotated(
                    k_ptr + k_offset + b * stride_kb + s * stride_ks, (block - q_blocks) * BLOCK_H + first, d,
                    stride_kh, KV_HEADS, D, HALF, cos_ptr, sin_ptr, angle, stride_cd, k_weight_ptr,
                    NORM, EPS, K_WEIGHT, INTERLEAVED, IN_FLOAT,
                ),
                k_out_ptr + b * stride_okb + place * stride_okl,
                k_scale_ptr, b * stride_skb + place * stride_skl,
                (block - q_blocks) * BLOCK_H + first, d, KV_HEADS, D, stride_okh, stride_skh,
            )  # fmt: skip
        else:
            _store(
                _rotated(
                    v_ptr + v_offset + b * stride_vb + s * stride_vs,
                    (block - q_blocks - kv_blocks) * BLOCK_H + first, d, stride_vh, KV_HEADS, D, HALF,
                    None, None, angle, stride_cd, None, NORM, EPS, V_WEIGHT, INTERLEAVED, IN_FLOAT,
                ),
                v_out_ptr + b * stride_ovb + place * stride_ovl,
                v_scale_ptr, b * stride_svb + place * stride_svl,
                (block - q_blocks - kv_blocks) * BLOCK_H + first, d, KV_HEADS, D, stride_ovh, stride_svh,
            )  # fmt: skip


@triton.jit
def _angles_kernel(
    positions, frequencies, axes, cos, sin,
    S, HALF, stride_a, stride_b, stride_s, stride_f,
    SCALE: tl.constexpr, COPIES: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """Each program has a token. ``COPIES`` of a pair's cosine are adjacent, or ``HALF`` columns apart if ``APART``.

    ``axes``: see ``dispatch.rotary_angles``.
    """
    if NEXT_EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    place = positions + token // S * stride_b + token % S * stride_s
    if axes is None:
        position = tl.load(place).to(tl.float32)
    else:
        axis = tl.load(axes + pair, mask=inside, other=0).to(tl.int64)
        position = tl.load(place + axis * stride_a, mask=inside, other=0).to(tl.float32)
    angle = position * tl.load(frequencies + pair * stride_f, mask=inside, other=0.0).to(tl.float32)
    c, z = tl.cos(angle) * SCALE, tl.sin(angle) * SCALE
    for copy in tl.static_range(COPIES):
        column = pair + copy * HALF if APART else pair * COPIES + copy
        to = token * COPIES * HALF + column
        tl.store(cos + to, rounded(c, cos.dtype.element_ty), mask=inside)
        tl.store(sin + to, rounded(z, sin.dtype.element_ty), mask=inside)


@triton.jit
def _load(row, heads, d, stride_h, count, D):
    """Loads values ``d`` of ``heads``, 0 beyond them."""
    inside = (heads < count)[:, None] & ((d < D) & (d >= 0))[None, :]
    return tl.load(row + heads.to(tl.int64)[:, None] * stride_h + d[None, :], mask=inside, other=0.0)


@triton.jit
def _rotated(
    row, heads, d, stride_h, count, D, HALF, cos, sin, angle, stride_cd, weight,
    NORM: tl.constexpr, EPS: tl.constexpr, WEIGHT: tl.constexpr, INTERLEAVED: tl.constexpr, IN_FLOAT: tl.constexpr,
):  # fmt: skip
    """Values ``d`` of ``heads`` of a token after their norm and rotation, in their dtype."""
    dtype: tl.constexpr = row.dtype.element_ty
    APART: tl.constexpr = cos is not None and not INTERLEAVED
    x = _load(row, heads, d, stride_h, count, D)
    if APART:
        is_first, turns = d < HALF, d < 2 * HALF
        other = tl.where(turns, tl.where(is_first, d + HALF, d - HALF), d)
        y = _load(row, heads, other, stride_h, count, D)
    if WEIGHT is not None:
        inside = (heads < count)[:, None] & (d < D)[None, :]
        mean, rstd = _statistics(x, inside, count, D, NORM, EPS, WEIGHT)
        x = _normalized(x, mean, rstd, weight, heads, d, count, D, NORM, WEIGHT)
        if APART:
            y = _normalized(y, mean, rstd, weight, heads, other, count, D, NORM, WEIGHT)
    if APART:
        y = y.to(tl.float32)
        pair = tl.where(is_first, d, d - HALF)
        x = _turned(x, tl.where(is_first[None, :], -y, y), pair, turns, cos, sin, angle, stride_cd, dtype, IN_FLOAT)
    elif cos is not None:
        PAIRS: tl.constexpr = x.shape[1] // 2
        first, second = tl.split(tl.reshape(x, (x.shape[0], PAIRS, 2)))
        pair = tl.arange(0, PAIRS)
        turns = pair < HALF
        new_first = _turned(first, -second.to(tl.float32), pair, turns, cos, sin, angle, stride_cd, dtype, IN_FLOAT)
        new_second = _turned(second, first, pair, turns, cos, sin, angle, stride_cd, dtype, IN_FLOAT)
        x = tl.reshape(tl.join(new_first, new_second), (x.shape[0], 2 * PAIRS))
    return x


@triton.jit
def _scaled(x, positions, at, SCALE: tl.constexpr, PERIOD: tl.constexpr, GROWTH: tl.constexpr):
    """Queries times their factors, each rounded; the position is ``positions[at]``."""
    dtype: tl.constexpr = x.dtype
    if positions is not None:
        position = tl.load(positions + at).to(tl.float32)
        factor = 1.0 + GROWTH * tl.log(1.0 + tl.floor(tl.math.div_rn(position, position * 0.0 + PERIOD)))
        x = rounded(x.to(tl.float32) * rounded(factor, dtype).to(tl.float32), dtype)
    if SCALE != 1.0:
        x = rounded(x.to(tl.float32) * SCALE, dtype)
    return x


@triton.jit
def _turned(x, y, pair, turns, cos, sin, angle, stride_cd, dtype: tl.constexpr, IN_FLOAT: tl.constexpr):
    """``x * cos + y * sin`` of each ``pair`` that ``turns``, rounded to ``dtype`` as ``RotaryCall.cos`` says."""
    at = angle + pair.to(tl.int64) * stride_cd
    c = tl.load(cos + at, mask=turns, other=0.0)[None, :].to(tl.float32)
    z = tl.load(sin + at, mask=turns, other=0.0)[None, :].to(tl.float32)
    own, others = x.to(tl.float32) * c, y.to(tl.float32) * z
    if cos.dtype.element_ty == dtype and not IN_FLOAT:
        own, others = rounded(own, dtype).to(tl.float32), rounded(others, dtype).to(tl.float32)
    return tl.where(turns[None, :], rounded(own + others, dtype), x)


@triton.jit
def _statistics(x, inside, count, D, NORM: tl.constexpr, EPS: tl.constexpr, WEIGHT: tl.constexpr):
    """``(mean, 1 / deviation)`` of a norm, for each head, or once for all heads if ``WEIGHT`` is "all"."""
    x = x.to(tl.float32)
    number = D.to(tl.float32) if WEIGHT != "all" else (D * count).to(tl.float32)
    mean = tl.zeros([x.shape[0]], dtype=tl.float32)
    if NORM == "layer":
        mean = tl.math.div_rn(_sum(x, WEIGHT), mean + number)
        x = tl.where(inside, x - mean[:, None], 0.0)
    variance = tl.math.div_rn(_sum(x * x, WEIGHT), tl.zeros([x.shape[0]], dtype=tl.float32) + number)
    return mean, tl.math.rsqrt(variance + EPS)


@triton.jit
def _sum(x, WEIGHT: tl.constexpr):
    total = tl.sum(x, axis=1)
    return total if WEIGHT != "all" else tl.zeros([x.shape[0]], dtype=tl.float32) + tl.sum(total, axis=0)


@triton.jit
def _normalized(x, mean, rstd, weight, heads, d, count, D, NORM: tl.constexpr, WEIGHT: tl.constexpr):
    """Values ``d`` of ``heads`` after their norm.

    ``WEIGHT``: "head": the same for every head; "own": one per head; "all": one norm over all heads; "none": no weight.
    """
    dtype: tl.constexpr = x.dtype
    value = x.to(tl.float32)
    if NORM == "layer":
        value -= mean[:, None]
    value *= rstd[:, None]
    if WEIGHT != "none":
        if WEIGHT == "head":
            w = tl.load(weight + d, mask=d < D, other=0.0)[None, :].to(tl.float32)
        else:
            inside = (heads < count)[:, None] & (d < D)[None, :]
            w = tl.load(weight + heads[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        if NORM == "rms":
            value = rounded(value, dtype).to(tl.float32)
        elif NORM == "rms_plus_one":
            w += 1.0
        value *= w
    return rounded(value, dtype)


@triton.jit
def _store(x, to, scales, scale_at, heads, d, count, D, stride_h, stride_scale):
    """Writes values ``d`` of ``heads`` as they are, or as int8 with scales from ``scales + scale_at`` on."""
    kept = heads < count
    inside = kept[:, None] & (d < D)[None, :]
    at = to + heads.to(tl.int64)[:, None] * stride_h + d[None, :]
    if scales is None:
        tl.store(at, x, mask=inside)
    else:
        scale, values = quantize_rows_of_tile(x, RowQuantization(None))
        tl.store(at, values, mask=inside)
        tl.store(scales + scale_at + heads.to(tl.int64) * stride_scale, scale, mask=kept)
