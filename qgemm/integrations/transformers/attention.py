"""The attention "qgemm" of transformers: ``model.set_attn_implementation("qgemm")``.

- Decoding with a ``KeyValueCache`` (up to 16 new tokens of a sequence) uses ``torch.ops.qgemm.decode_attention``, which
  reads the keys in use in place, in float or int8, and handles padding, windows, sinks and soft caps.
- A prompt uses PyTorch's attention over its own keys, without a mask if it needs none.
- Other caches, masks of another form and everything else are computed as transformers' "sdpa" does; sinks and soft
  caps, which "sdpa" doesn't support, are computed by their formula in float32.

``mask`` is the corresponding mask function. It makes no mask for a ``KeyValueCache``, which knows where sequences
begin, unless a model needs one of another form, as for images.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from qgemm.integrations.transformers.cache import NO_MASK
from qgemm.integrations.transformers.tokens import CacheMetadata, Seen, Tokens, UnfitAttentionError
from qgemm.kernels.attention.checks import MAX_HEAD_SIZE, MAX_QUERIES

MAX_SCORES = 2**27  # in float32, at a time


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Called by transformers: ``query [B, heads, S, D]``; returns ``[B, S, heads, D]``, and no weights."""
    # Not getattr with a default, because torch.compile would consider the attribute missing.
    about: CacheMetadata | None = key.about if hasattr(key, "about") else None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if about is None:
        if not softcap and s_aux is None:
            found: tuple[Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, **others
            )
            return found
        if attention_mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True):
            attention_mask = _visible(0, query.shape[2], key.shape[2], 0, None, query.device)
        return _by_formula(query, key, value, attention_mask, scale, softcap, s_aux), None
    if not torch.compiler.is_compiling():
        _check_fits(module, value, attention_mask, about)
    if attention_mask is None and dropout == 0.0 and query.shape[-1] <= MAX_HEAD_SIZE and not _is_prompt(query, about):
        out: Tensor = torch.ops.qgemm.decode_attention(
            query.transpose(1, 2), key, value, about.k_scale, about.v_scale, about.tokens.length, about.tokens.start,
            s_aux, scale, softcap or 0.0, about.window, about.tokens.bound,
        )  # fmt: skip
        return out, None
    out = _of_prompt(query, key, value, attention_mask, about, dropout, scale, softcap, s_aux)
    if not (getattr(module, "store_full_length_kv", False) or getattr(module, "is_kv_shared_layer", False)):
        about.fresh = None  # no other layer reads it
    return out, None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    local_size: int | None = None,
    **others: Any,
) -> Tensor | None:
    """The mask ``[B, 1, q_length, kv_length]``, True where a query sees a key; None if attention needs no mask."""
    # With a static cache, transformers allows no skip for a single token, and models allow none for their own masks.
    ordinary = not use_vmap and (allow_is_causal_skip or q_length == 1)
    if isinstance(q_offset, Seen):
        knows = ordinary and q_offset.tokens.look_at(attention_mask, q_length)
        # A caller that asks for a plain mask even though attention needs none derives another mask from it.
        asked = ordinary or use_vmap or mask_function is not causal_mask_function
        q_offset.tokens.told_of_mask = asked and not knows
        q_offset.tokens.told_of_window |= local_size is not None
        if knows:
            return None
        allow_is_causal_skip, q_offset = False, q_offset.tokens.seen()
    elif kv_offset == NO_MASK:
        if ordinary:
            return None
        kv_offset = 0
    found: Tensor | None = sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip,
        use_vmap=use_vmap, local_size=local_size, **others,
    )  # fmt: skip
    return found


def _check_fits(module: nn.Module, value: Tensor, mask: Tensor | None, about: CacheMetadata) -> None:
    """Raises ``UnfitAttentionError`` where the module's attention contradicts what the cache knows."""
    about.tokens.unread = False
    kind = type(module).__name__
    if about.v_scale is not None and getattr(value, "about", None) is not about:
        raise UnfitAttentionError(f"{kind} changes values between the cache and attention")
    if not getattr(module, "is_causal", True):
        raise UnfitAttentionError(f"{kind} sees the tokens that are to come")
    if mask is not None and not about.tokens.told_of_mask:
        raise UnfitAttentionError(f"{kind} makes a mask of its own")
    if mask is None and about.window and not about.tokens.told_of_window:
        raise UnfitAttentionError(f"{kind} has a window in its cache and none in its mask")


def _is_prompt(query: Tensor, about: CacheMetadata) -> bool:
    """Whether PyTorch's attention reads the keys: for many queries, or if this forward's keys are the only ones.

    While a CUDA graph is captured it isn't so, because the graph is replayed with more keys.
    """
    S, used = query.shape[2], about.tokens.used
    if S > MAX_QUERIES:
        return True
    return used == S and not (query.is_cuda and torch.cuda.is_current_stream_capturing())


def _of_prompt(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    about: CacheMetadata,
    dropout: float,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention ``[B, S, heads, D]`` over the keys of a cache, in float."""
    tokens, S = about.tokens, query.shape[2]
    used = tokens.capacity if tokens.used is None else tokens.used
    if about.fresh is not None:
        key, value = about.fresh
    else:
        key, value = (
            _in_float(key[:, :, :used], about.k_scale, query),
            _in_float(value[:, :, :used], about.v_scale, query),
        )
    if mask is not None:
        mask = mask[..., :used]
    elif tokens.used is None or used != S or tokens.start is not None or 0 < about.window < used:
        mask = _own_mask(tokens, S, used, about.window)
    if softcap or s_aux is not None:
        if mask is None:
            mask = _own_mask(tokens, S, used, 0)
        return _by_formula(query, key, value, mask, scale, softcap, s_aux)
    grouped = query.shape[1] != key.shape[1]
    if mask is not None and grouped:
        # With a mask, PyTorch's fast kernels don't support grouped queries.
        key, value = (repeat_kv(x, query.shape[1] // x.shape[1]) for x in (key, value))
    out = F.scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal=mask is None and S > 1, scale=scale,
        enable_gqa=mask is None and grouped,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous()


def _in_float(stored: Tensor, scale: Tensor | None, like: Tensor) -> Tensor:
    return stored if scale is None else (stored * scale[:, :, : stored.shape[2], None]).to(like.dtype)


def _own_mask(tokens: Tokens, S: int, used: int, window: int) -> Tensor:
    """The mask of this forward, which the layers share."""
    found = tokens.masks.get((S, window))
    if found is None:
        first = tokens.length - S if tokens.used is None else used - S
        found = _visible(first, S, used, window, tokens.start, tokens.length.device)
        if not torch.compiler.is_compiling():
            tokens.masks[S, window] = found
    return found


def _visible(first: int | Tensor, S: int, keys: int, window: int, start: Tensor | None, device: torch.device) -> Tensor:
    """``[1 or B, 1, S, keys]``: which keys are seen by the queries at positions ``first`` and later."""
    position = torch.arange(S, device=device)[:, None] + first
    key = torch.arange(keys, device=device)
    visible = key <= position
    if window:
        visible = visible & (key > position - window)
    visible = visible[None, None]
    return visible if start is None else visible & (key >= start[:, None, None, None])


def _by_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """``[B, S, heads, D]`` in float32, some queries at a time; ``mask``: bool, or values added to the scores."""
    B, heads, S, _ = query.shape
    group = heads // key.shape[1]
    keys, values = key.float().unsqueeze(2).mT, value.float().unsqueeze(2)
    sink = None if s_aux is None else s_aux.float().view(1, -1, group, 1, 1)
    step = max(1, MAX_SCORES // max(1, B * heads * key.shape[2]))
    parts = []
    for begin in range(0, S, step):
        part = slice(begin, begin + step)
        scores = query[:, :, part].float().unflatten(1, (-1, group)) @ keys * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            own = mask[:, :, None, part]
            scores = scores.masked_fill(~own, -torch.inf) if own.dtype == torch.bool else scores + own
        if sink is not None:
            scores = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), -1)
        # A query in the padding, which sees nothing, gives zeros.
        weights = scores.softmax(-1).nan_to_num(0.0)[..., : key.shape[2]]
        parts.append((weights @ values).flatten(1, 2).transpose(1, 2))
    return torch.cat(parts, 1).to(query.dtype)
