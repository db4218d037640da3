"""The kernels' functions in plain PyTorch: the specification that every implementation is tested against.

Written for clarity; ``cpu.py`` and the GPU kernels are the fast ones.

- int8 is symmetric, in [-127, 127]: ``scale = amax / 127`` in float32, ``q = round_half_even(x / scale)``; the numbers
  come from ``qgemm.numerics.formats``.
- With a zero point ``z``, which only static scales have, ``q = clamp(round_half_even(x / scale) + z, -128, 127)``: all
  256 values are used, since no value needs an opposite then. 0 is stored as ``z``, exactly.
- A row of zeros has scale 1. A row with NaN or Inf has scale NaN and zeros as values, so the product is a row of NaN,
  never finite garbage.
- A product is accumulated exactly in int32, then scaled in float32 as ``acc * a_scale[m] * b_scale[n] + bias[n]`` and
  cast once. A residual is added to the cast value in float32, and the sum is cast: the bits of two operators.
- A product with a weight that alone is quantized is a float product: with ``W = (q - z) * s`` in float32, it is
  ``x @ W.T + bias`` in float32, cast once.
- A norm rounds where the model's module does (``norms.Norm``), and so does an activation before a product
  (``activations.activated``): a fused block has the bits of its parts. The sum with a residual is rounded before its
  norm.
- fp8 is e4m3, in [-448, 448], with ``scale = amax / 448``; float32 ``x / scale`` is rounded to nearest, halves to even.
  A product is accumulated in float32, then scaled as for int8. With blocks, each 128 values of a row have a scale, and
  each 128 x 128 values of a weight: sums of 128 products are scaled and added in float32.
- Experts round to the dtype of their input where a float module does: after each product, including its bias, and after
  the activation, which is computed in float32. The weighted sum over a token's experts is float32, slot by slot, and
  cast once.
- Attention is computed in float32 and rounded once: scores, softmax and the sum over values.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from qgemm.kernels.activations import ACTIVATIONS, activated
from qgemm.kernels.expert_weights import ExpertWeights, WeightOnlyExperts
from qgemm.kernels.norms import Norm, NormCall
from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.numerics.blocks import BLOCK
from qgemm.numerics.formats import FP8, INT4, INT8, OPERANDS
from qgemm.numerics.groups import grouped, spread
from qgemm.numerics.packing import unpack_codes


def quantize_rows_reference(
    x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None, dtype: torch.dtype = INT8.storage
) -> tuple[Tensor, Tensor]:
    """``(q, row_scale)`` of ``x [..., K]``: ``dtype [..., K]`` and float32 ``[...]``, with ``x ~ q * row_scale``.

    ``scale``: one static float32 scale for all rows, instead of each row's own; values beyond it saturate.
    ``zero_point``: for a static scale, the int8 number that 0 becomes; then ``x ~ (q - zero_point) * row_scale``.
    """
    values = x.float()
    finite = values.isfinite().all(dim=-1)
    if scale is None:
        amax = values.abs().amax(dim=-1) if x.shape[-1] else values.new_zeros(x.shape[:-1])
        row_scale = OPERANDS[dtype].scale_of(amax)
    else:
        row_scale = torch.where(finite, scale.reshape(()), torch.nan)
    q = values / row_scale[..., None]
    if zero_point is None:
        return OPERANDS[dtype].store(q), row_scale
    return INT8.asymmetric.store(q.round() + zero_point.float()), row_scale


def quantize_groups_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """``(q, scale)`` of ``x [..., K]``: e4m3 ``[..., K]``, and float32 ``[..., ceil(K / 128)]`` for each 128 values."""
    groups = grouped(x.reshape(x.shape[:-1].numel(), x.shape[-1]), BLOCK)
    q, scale = quantize_rows_reference(groups, dtype=FP8.storage)
    return q.flatten(1)[:, : x.shape[-1]].reshape(x.shape), scale.view(*x.shape[:-1], groups.shape[1])


def weight_only_linear_reference(x: Tensor, weight: ScaledWeight) -> Tensor:
    """``x @ W.T + bias`` in the dtype of ``x``; ``W`` is ``weight.dequantize`` in float32.

    With ``weight.int8_activations``, rows are quantized and the sums of groups are exact:
    ``int4_int8_linear_reference``.
    """
    if weight.int8_activations:
        return int4_int8_linear_reference(x, weight)
    product = x.float() @ weight.dequantize(torch.float32).t()
    return (product if weight.bias is None else product + weight.bias.float()).to(x.dtype)


def int4_int8_linear_reference(x: Tensor, weight: ScaledWeight) -> Tensor:
    """``row_scale * (sums[0] * scale[0] + sums[1] * scale[1] + ...) + bias`` in float32, rounded once.

    ``sums[g]``: exact int32 products of group ``g`` of the quantized rows with the weight's, minus its zero points.
    """
    K, size, order = weight.in_features, weight.group_size, weight.input_order
    q, row_scale = quantize_rows_reference(x if order is None else x[..., order])
    values = INT4.decode(unpack_codes(weight.values, K))
    if weight.zero_point is not None:
        values -= spread(weight.zero_point, size, K)
    q, values = q.reshape(-1, K), values.to(torch.int8)
    total = torch.zeros(len(q), len(values), device=x.device, dtype=torch.float32)
    for g, scale in enumerate(weight.scale.float().t()):
        part = slice(g * size, (g + 1) * size)
        total += int_mm_reference(q[:, part], values[:, part].t()).float() * scale
    out = total * row_scale.reshape(-1, 1)
    out = out if weight.bias is None else out + weight.bias.float()
    return out.to(x.dtype).view(*x.shape[:-1], len(values))


def norm_quantize_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
) -> tuple[Tensor, Tensor]:
    """``quantize_rows_reference(norm(x, weight, bias), input_scale)``; the norm is rounded to the dtype of ``x``.

    For ``"rms"``, with ``h`` the float32 ``x``: ``y = round(h * rsqrt(mean(h^2) + eps))``, then ``round(weight * y)``.
    """
    return quantize_rows_reference(norm(x, weight, bias), input_scale, dtype=dtype)


def add_norm_quantize_reference(
    x: Tensor,
    residual: Tensor,
    branch_weight: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
    gate: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(total, q, row_scale)``: ``total = round(residual + x)``, and ``norm(total, weight, bias)``, quantized.

    With ``branch_weight``, ``norm(x, branch_weight)`` replaces ``x``; with ``gate``, ``round(gate * x)`` does, to the
    gate's dtype; then ``round(factor * x)`` does. Without ``weight``, ``total`` itself is quantized.
    """
    total, normed = add_norm_reference(x, residual, branch_weight, weight, bias, norm, gate, factor)
    return total, *quantize_rows_reference(normed, input_scale, dtype=dtype)


def add_norm_reference(
    x: Tensor,
    residual: Tensor | None,
    branch_weight: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    gate: Tensor | None = None,
    factor: float = 1.0,
    total_factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(total, norm(total, weight, bias))``, with ``total`` as in ``add_norm_quantize_reference``.

    It is then ``round(total_factor * total)``. Without ``residual``, nothing is added. Without ``weight``, the second
    result is ``total``, too.
    """
    call = NormCall(x, residual, branch_weight, gate, weight, bias, norm, factor=factor, total_factor=total_factor)
    total = call.total()
    return total, total if weight is None else norm(total, weight, bias)


def post_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
    """``norm(round(residual + x), weight, bias)``."""
    return norm(residual + x, weight, bias)


def post_norm_quantize_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
) -> tuple[Tensor, Tensor, Tensor]:
    """``post_norm_reference``, and ``(q, row_scale)`` of it."""
    normed = post_norm_reference(x, residual, weight, bias, norm)
    return normed, *quantize_rows_reference(normed, input_scale, dtype=dtype)


def activation_quantize_reference(
    x: Tensor,
    activation: str,
    gated: bool,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
    prefix: Tensor | None = None,
    up_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """``quantize_rows_reference(round(round(act(gate)) * up), input_scale)`` of ``x [..., 2I]``, gates before ups.

    Without ``gated``, it quantizes ``round(act(x))``; with ``prefix``, ``cat(prefix, ...)``; with
    ``up_first``, ups are before gates. ``round`` is to the dtype of ``x``.
    """
    values = activated(x, activation, gated, up_first)
    values = values if prefix is None else torch.cat([prefix, values], dim=-1)
    return quantize_rows_reference(values, input_scale, dtype=dtype)


def int_mm_reference(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of int8 ``[M, K]`` and ``[K, N]`` in exact int32."""
    return (a.double() @ b.double()).to(torch.int32)


def scaled_mm_reference(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    residual: Tensor | None = None,
) -> Tensor:
    """``(a @ b) * a_scale[:, None] * b_scale + bias`` as ``out_dtype [M, N]``; scales are vectors or scalars.

    ``residual``: ``out_dtype [M, N]``, added to that.
    """
    out = (a.double() @ b.double()).float() * a_scale.reshape(-1, 1) * b_scale.reshape(1, -1)
    if bias is not None:
        out = out + bias.float()
    out = out.to(out_dtype)
    return out if residual is None else (out.float() + residual.float()).to(out_dtype)


def block_scaled_mm_reference(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``out_dtype [M, N]`` of e4m3 ``a [M, K]`` and ``b [N, K]``, with a scale for each 128 values of a row and block.

    ``sum over g of (a_g @ b_g.T) * a_scale[m, g] * b_scale[n // 128, g]``, in float32, plus ``bias[n]``. ``a_scale``:
    ``[M, ceil(K / 128)]``; ``b_scale``: ``[ceil(N / 128), ceil(K / 128)]``.
    """
    out = a_scale.new_zeros((a.shape[0], b.shape[0]))
    for g in range(a_scale.shape[1]):
        part = slice(g * BLOCK, (g + 1) * BLOCK)
        product = (a[:, part].double() @ b[:, part].double().t()).float()
        out += product * (a_scale[:, g, None] * b_scale[:, g].repeat_interleave(BLOCK)[: b.shape[0]])
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def multiply_reference(
    q: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """A linear layer of quantized rows: ``out_dtype [..., N]`` from ``q [..., K]`` and ``weight [N, K]``.

    The product is that of ``scaled_mm_reference``; with a residual, ``round(round(product) + residual)``.
    """
    a, a_scale = q.reshape(row_scale.numel(), weight.shape[1]), row_scale.reshape(-1)
    out = scaled_mm_reference(a, weight.t(), a_scale, weight_scale, bias, out_dtype)
    out = out.view(*q.shape[:-1], weight.shape[0])
    return out if residual is None else out + residual


def matmul_reference(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``activation(a @ b + bias)`` of float ``[M, K]`` and ``[K, N]``, in float32. ``out_dtype``: a's dtype if None."""
    out = a.float() @ b.float()
    if bias is not None:
        out = out + bias.float()
    if activation is not None:
        out = ACTIVATIONS[activation](out)
    return out.to(out_dtype or a.dtype)


def grouped_mm_reference(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """For every group ``g`` of rows of ``a [T, K]``: ``(a @ b[g].T) * a_scale[:, None] * b_scale[g] + bias[g]``.

    ``b``: ``[G, N, K]``. ``offsets [G]``: where each group ends; the next one begins there. Rows beyond the last group
    are zeros.
    """
    out = a.new_zeros((a.shape[0], b.shape[1]), dtype=out_dtype)
    start = 0
    for group, end in enumerate(offsets.tolist()):
        rows = slice(start, end)
        group_bias = None if bias is None else bias[group]
        out[rows] = scaled_mm_reference(a[rows], b[group].t(), a_scale[rows], b_scale[group], group_bias, out_dtype)
        start = end
    return out


def experts_reference(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights, residual: Tensor | None = None
) -> Tensor:
    """``out[t] = sum over j of top_k_weights[t, j] * expert[top_k_index[t, j]](x[t])``; see ``dispatch.experts``."""

    def product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        if weights.has_blocks:
            q, q_scale = quantize_groups_reference(x)
            return block_scaled_mm_reference(q, weight, q_scale, scale, bias, x.dtype)
        q, q_scale = quantize_rows_reference(x, dtype=weight.dtype)
        return scaled_mm_reference(q, weight.t(), q_scale, scale, bias, x.dtype)

    def expert(x: Tensor, number: int) -> Tensor:
        own = weights.of(number)
        h = product(x, own.gate_up, own.gate_up_scale, own.gate_up_bias)
        return product(own.activation(h).to(x.dtype), own.down, own.down_scale, own.down_bias)

    return _mixture(x, top_k_index, top_k_weights, len(weights.down), expert, residual)


def weight_only_experts_reference(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: WeightOnlyExperts, residual: Tensor | None = None
) -> Tensor:
    """``experts_reference`` with the weights that the stored ones stand for; see ``dispatch.weight_only_experts``."""

    def product(x: Tensor, weight: ScaledWeight) -> Tensor:
        out = x.float() @ weight.dequantize(torch.float32).t()
        return (out if weight.bias is None else out + weight.bias.float()).to(x.dtype)

    def expert(x: Tensor, number: int) -> Tensor:
        first, second = weights.stored(number, number + 1)
        return product(weights.activation(product(x, first)).to(x.dtype), second)

    return _mixture(x, top_k_index, top_k_weights, len(weights.down), expert, residual)


def _mixture(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    E: int,
    run: Callable[[Tensor, int], Tensor],
    residual: Tensor | None,
) -> Tensor:
    out = torch.zeros_like(x, dtype=torch.float32)
    for slot in range(top_k_index.shape[1]):
        for expert in range(E):
            chosen = top_k_index[:, slot] == expert
            out[chosen] += run(x[chosen], expert).float() * top_k_weights[chosen, slot, None].float()
    total = out.to(x.dtype)
    return total if residual is None else residual + total


def decode_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    start: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
) -> Tensor:
    """``softmax(scale * q @ k.T) @ v`` over the keys that each query sees; see ``attention/dispatch.decode_attention``.

    Computed in float32, or in float64 if ``q`` is float64.
    """
    (B, S, Hq, D), (Hkv, L) = q.shape, k.shape[1:3]
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(dtype) if k_scale is None else k.to(dtype) * k_scale[..., None]
    values = v.to(dtype) if v_scale is None else v.to(dtype) * v_scale[..., None]
    keys, values = (each.repeat_interleave(Hq // Hkv, dim=1) for each in (keys, values))
    sink = q.new_full((1,), -torch.inf, dtype=dtype) if sinks is None else sinks.to(dtype)
    ends = length.reshape(-1, 1).expand(B, 1)
    starts = torch.zeros_like(ends) if start is None else start[:, None]
    out = torch.empty(B, S, Hq, D, dtype=q.dtype, device=q.device)
    for i in range(S):
        position, key = ends - S + i, torch.arange(L, device=q.device)
        visible = (key <= position) & (key >= starts)  # [B, L]
        if window:
            visible &= key > position - window
        scores = torch.einsum("bhd,bhld->bhl", q[:, i].to(dtype), keys) * (D**-0.5 if scale is None else scale)
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        top = torch.maximum(scores.amax(dim=-1), sink).clamp(min=torch.finfo(dtype).min)
        weights = torch.exp(scores - top[..., None])
        total = weights.sum(dim=-1) + torch.exp(sink - top)
        # Memory of keys that no query sees may hold anything.
        summed = torch.einsum("bhl,bhld->bhd", weights, values.masked_fill(~visible[:, None, :, None], 0.0))
        out[:, i] = summed / total.masked_fill(total == 0, 1.0)[..., None]  # a query that sees nothing gives zeros
    return out


def paged_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    *,
    pages: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
) -> Tensor:
    """``decode_attention_reference`` for each sequence separately; see ``attention/dispatch.paged_attention``."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    options: dict[str, Any] = {"sinks": sinks, "scale": scale, "softcap": softcap, "window": window}
    bounds = zip(pairwise(query_starts.tolist()), pairwise(key_starts.tolist()), strict=True)
    for row, ((first, end), (first_key, end_key)) in enumerate(bounds):
        places: Any = slice(first_key, end_key)
        if pages is not None and pages.ndim == 2:
            i = torch.arange(end_key - first_key, device=q.device)
            places = pages[row, i // k.shape[1]], i % k.shape[1]
        elif pages is not None:
            places = pages[places]
            places = places if k.ndim == 3 else (places // k.shape[1], places % k.shape[1])
        keys, values = (each[places].transpose(0, 1)[None] for each in (k, v))
        for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
            options[name] = None if scales is None else scales[places].mT[None]
        length = torch.tensor([end_key - first_key], dtype=torch.int32, device=q.device)
        out[first:end] = decode_attention_reference(q[None, first:end], keys, values, length, **options)[0]
    return out
