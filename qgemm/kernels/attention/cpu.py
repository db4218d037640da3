"""``decode_attention`` and ``paged_attention`` on the CPU: PyTorch's attention over the keys in use.

It computes in float32: for one query, PyTorch's attention takes 8 to 20 times as long in bfloat16 (torch 2.13, an AMD
EPYC with AVX512-BF16). Other types are converted, one sequence at a time.
"""

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qgemm.kernels.attention.call import AttentionCall, PagedCall, StoreCall
from qgemm.kernels.cpu_rows import quantize_rows


@torch.no_grad()
@torch.autocast("cpu", enabled=False)
def decode_attention(call: AttentionCall) -> Tensor:
    """``dispatch.decode_attention`` on the CPU, where ``max_length`` makes no difference."""
    q, k, v, k_scale, v_scale, length, start, sinks, scale, softcap, window, _ = call
    B, S = q.shape[:2]
    out = q.new_zeros(q.shape)
    for rows, first, end in _spans(B, S, length, start, window, together=k.dtype == torch.float32):
        if first >= end:
            continue
        queries = q[rows].transpose(1, 2).float()
        keys, values = k[rows, :, first:end].float(), v[rows, :, first:end].float()
        if k_scale is not None and v_scale is not None:
            keys = keys.mul_(k_scale[rows, :, first:end, None])
            values = values.mul_(v_scale[rows, :, first:end, None])
        visible = _visible(S, first, end, window) if S > 1 else None
        out[rows] = _attend(queries, keys, values, visible, sinks, scale, softcap).transpose(1, 2)
    return out


@torch.no_grad()
@torch.autocast("cpu", enabled=False)
def paged_attention(call: PagedCall) -> Tensor:
    """``dispatch.paged_attention`` on the CPU, where ``max_queries`` and ``max_keys`` make no difference."""
    q, k, v, k_scale, v_scale, query_starts, key_starts, pages, sinks, scale, softcap, window, _, _ = call
    out = q.new_zeros(q.shape)
    bounds = zip(pairwise(query_starts.tolist()), pairwise(key_starts.tolist()), strict=True)
    for row, ((first_query, end_query), (first_key, end_key)) in enumerate(bounds):
        S, L = end_query - first_query, end_key - first_key
        first = max(L - S - window + 1, 0) if window else 0
        if S < 1 or first >= L:
            continue
        if pages is not None and pages.ndim == 2:
            i = torch.arange(first, L, device="cpu")
            places: Any = pages[row, i // k.shape[1]], i % k.shape[1]
        else:
            places = slice(first_key + first, end_key)
            places = places if pages is None else _in_pages(pages[places], k)
        queries, keys, values = (
            each[part].transpose(0, 1)[None].float()
            for each, part in ((q, slice(first_query, end_query)), (k, places), (v, places))
        )
        if k_scale is not None and v_scale is not None:
            keys = keys * k_scale[places].mT[None, :, :, None]
            values = values * v_scale[places].mT[None, :, :, None]
        visible = _visible(S, first, L, window) if S > 1 else None
        found = _attend(queries, keys, values, visible, sinks, scale, softcap)
        out[first_query:end_query] = found[0].transpose(0, 1)
    return out


@torch.no_grad()
def store_in_pages(call: StoreCall) -> None:
    """``dispatch.store_in_pages`` on the CPU."""
    key, value, k, v, k_scale, v_scale, key_starts, pages = call
    rows: Any = slice(len(pages))
    places: Any = _in_pages(pages, k)
    if key_starts is not None:
        last = key_starts.diff().long() - 1
        rows = (last >= 0).nonzero().flatten()
        last = last[rows]
        places = pages[rows, last // k.shape[1]].long(), last % k.shape[1]
    for new, cached, scale in ((key, k, k_scale), (value, v, v_scale)):
        if scale is None:
            cached[places] = new[rows]
        else:
            cached[places], scale[places] = quantize_rows(new[rows])


def _in_pages(places: Tensor, k: Tensor) -> Any:
    """The indices of ``places`` in ``k``, whether it has pages or not."""
    return places if k.ndim == 3 else (places // k.shape[1], places % k.shape[1])


def _spans(
    B: int, S: int, length: Tensor, start: Tensor | None, window: int, together: bool
) -> Iterator[tuple[slice, int, int]]:
    """Slices of the batch, each with the first and the end of the keys that any of its queries sees.

    ``together``: whether neighbours with the same keys in use are yielded as one slice.
    """
    ends = length.reshape(-1).expand(B).tolist()
    starts = [0] * B if start is None else start.expand(B).tolist()
    spans = [
        (max(s, e - S - window + 1 if window else 0, 0), e, 0 if together else row)
        for row, (s, e) in enumerate(zip(starts, ends, strict=True))
    ]
    row = 0
    for (first, end, _), group in groupby(spans):
        count = len(list(group))
        yield slice(row, row + count), first, end
        row += count


def _visible(S: int, first: int, end: int, window: int) -> Tensor:
    """``[S, keys]``: whether each of the last ``S`` positions sees each of the keys from ``first`` to ``end``."""
    position = torch.arange(end - S, end, device="cpu")[:, None]
    key = torch.arange(first, end, device="cpu")
    visible = key <= position
    return visible & (key > position - window) if window else visible


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, sinks: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Heads come before positions. Soft caps and sinks, which PyTorch's attention lacks, follow the formula."""
    (B, Hq, S, D), (Hkv, L) = q.shape, k.shape[1:3]
    if not softcap and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=Hq != Hkv)
    scores = (q.reshape(B, Hkv, -1, D) @ k.mT).view(B, Hq, S, L) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    sink = scores.new_full((1,), -torch.inf) if sinks is None else sinks.float()[:, None, None]
    # At least a finite number, also if a query sees nothing.
    top = torch.maximum(scores.amax(dim=-1, keepdim=True), sink).clamp(min=torch.finfo(torch.float32).min)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True) + torch.exp(sink - top)
    summed = (weights.view(B, Hkv, -1, L) @ v).view(B, Hq, S, D)
    return summed / total.masked_fill(total == 0, 1.0)
