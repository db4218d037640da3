"""Norms of queries and keys, rotary embedding and writing to a cache, in plain PyTorch.

This is the specification, and it is what runs on a CPU. The values are those of the models' own modules, bit for bit. A
head's first R values are R / 2 pairs, and pair ``i`` is rotated by an angle with cosine ``cos[i]`` and sine ``sin[i]``:

    y[i]         = x[i] * cos[i] - x[R / 2 + i] * sin[i]
    y[R / 2 + i] = x[R / 2 + i] * cos[i] + x[i] * sin[i]

``interleaved``: pairs are adjacent, ``x[2 i]`` and ``x[2 i + 1]``. Values from R on stay as they are.

- If ``cos`` has the dtype of ``x``, both products and their sum are rounded to it, as in Llama, Qwen, Gemma, Phi and
  GLM. If it is float32, or with ``in_float``, everything is float32 with one rounding, as in OLMo 2 and Cohere.
- A norm comes first; ``norms.Norm`` says where it rounds. Its weight is ``[D]``, the same for every head;
  ``[heads, D]``, one per head; or ``[heads * D]``, one norm over all heads' values, as in OLMo 2.
- Values may have the norm, too, without a weight, as in Gemma 4; some of its layers make the values from the keys
  before their norm.
- Queries may be multiplied by a factor of their positions (Ministral 3), and by a number (OPT, Whisper).
- int8 keys and values have a scale for each token and head, as from ``quantize_rows``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qgemm.kernels.norms import Norm
from qgemm.kernels.reference import quantize_rows_reference
from qgemm.kernels.rotary.call import KeyValueStore, RotaryCall

ANGLES: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda angles: torch.cat((angles, angles), dim=-1),
    "once": lambda angles: angles,
    "each twice": lambda angles: angles.repeat_interleave(2, dim=-1),
}
"""The columns that models expect for a pair's cosine, by name: one in each half, one, or two adjacent ones."""


def rotary_angles_reference(
    positions: Tensor, frequencies: Tensor, scale: float, layout: str, dtype: torch.dtype, axes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``dispatch.rotary_angles``."""
    of_pairs = positions[..., None] if axes is None else positions.permute(1, 2, 0).index_select(-1, axes)
    angles = ANGLES[layout](of_pairs.float() * frequencies.float())
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate_reference(call: RotaryCall) -> tuple[Tensor, Tensor, Tensor]:
    """``dispatch.rotate``."""
    heads, method = call.qkv.unflatten(-1, (call.heads, -1)), Norm(call.norm, call.eps)
    cos, sin = (x.float() if call.in_float and x is not None else x for x in (call.cos, call.sin))
    q = heads[:, :, :: call.q_step][:, :, : call.q_heads]
    k, v = (heads[:, :, first :: call.k_step][:, :, : call.kv_heads] for first in (call.k_head, call.v_head))
    if call.values != "plain":
        v = Norm("layer" if method.is_layer else "rms_once", call.eps)(v, v.new_ones(call.head_size))
    q, k = (_normalized(x, w, method) for x, w in ((q, call.q_weight), (k, call.k_weight)))
    q, k = (_rotated(x, cos, sin, call.interleaved) for x in (q, k))
    if call.positions is not None:
        factors = position_factors_reference(call.positions, call.growth, call.period)
        q = q * factors[..., None, None].to(q.dtype)
    q = q * call.scale if call.scale != 1.0 else q
    return q.clone(memory_format=torch.contiguous_format), _by_head(k), _by_head(v)


def position_factors_reference(positions: Tensor, growth: float, period: float) -> Tensor:
    """The factors of queries at ``positions``, float32."""
    return 1 + growth * torch.log(1 + torch.floor(positions / period))


def store_reference(key: Tensor, value: Tensor, store: KeyValueStore) -> None:
    """``dispatch.store_key_value``."""
    k, v, k_scale, v_scale, length = store
    B, _, S, _ = key.shape
    first = [0] * B if length is None else (length - S).expand(B).tolist()
    for new, stored, scale in ((key, k, k_scale), (value, v, v_scale)):
        values = scales = new
        if scale is not None:
            values, scales = quantize_rows_reference(new)
        for row, start in enumerate(first):
            kept = slice(max(-start, 0), max(min(S, k.shape[2] - start), 0))
            to = slice(start + kept.start, start + max(kept.start, kept.stop))
            stored[row, :, to] = values[row, :, kept]
            if scale is not None:
                scale[row, :, to] = scales[row, :, kept]


def _normalized(x: Tensor, weight: Tensor | None, norm: Norm) -> Tensor:
    """``x [B, S, heads, D]`` after its norm, if there is a weight."""
    if weight is None:
        return x
    heads, D = x.shape[2:]
    if weight.shape == (D,):
        return norm(x, weight)
    if weight.ndim == 2:
        return torch.stack([norm(x[:, :, head], weight[head]) for head in range(heads)], dim=2)
    return norm(x.flatten(2), weight).view(x.shape)


def _rotated(x: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Tensor:
    """``x [B, S, heads, D]`` with its pairs rotated. ``cos``, ``sin``: ``[1 or B, S, R / 2]``."""
    if cos is None or sin is None:
        return x
    cos, sin = cos[:, :, None], sin[:, :, None]
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = turned.unflatten(-1, (half, 2)).unbind(-1) if interleaved else turned.unflatten(-1, (2, half)).unbind(-2)
    new = (pairs[0] * cos - pairs[1] * sin, pairs[1] * cos + pairs[0] * sin)
    out = torch.stack(new, dim=-1 if interleaved else -2).flatten(-2).to(x.dtype)
    return torch.cat((out, rest), dim=-1)


def _by_head(x: Tensor) -> Tensor:
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format)
