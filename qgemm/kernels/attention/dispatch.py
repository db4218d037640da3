"""The public functions of attention to a cache: check the arguments, then run where the tensors are.

As ``kernels/dispatch.py``. Numbers: ``kernels/reference.py``. On the CPU: ``cpu.py``. On a GPU: ``launcher.py``.
"""

import functools
from typing import Any

from torch import Tensor

from qgemm.kernels import checks
from qgemm.kernels.attention import cpu
from qgemm.kernels.attention.call import AttentionCall, PagedCall, StoreCall
from qgemm.kernels.attention.checks import check_decode_attention, check_paged_attention, check_store_in_pages


def decode_attention(
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
    max_length: int | None = None,
) -> Tensor:
    """Attention of the newest tokens to all keys of a cache: ``softmax(scale * q @ k.T) @ v``, ``[B, S, Hq, D]``.

    Returns a contiguous tensor of q's dtype. Query ``i`` is at position ``length - S + i`` and sees the keys up to its
    own; only those are read. A query that sees none gives zeros. The same bits every time.

    - ``q``: float16, bfloat16 or float32 ``[B, S, Hq, D]``, S from 1 to 16, D up to 512, any strides.
    - ``k``, ``v``: ``[B, Hkv, L, D]``, of q's dtype, or int8 with ``k_scale`` and ``v_scale``, float32 ``[B, Hkv, L]``.
      Hq is a multiple of Hkv: so many heads of q in a row share a head of k. Any strides, but the last is 1.
    - ``length``: int32 ``[1]`` or ``[B]``, on the device: how many keys there are, with those of ``q`` itself.
    - ``start``: int32 ``[B]`` or ``[1]``: keys before that are padding.
    - ``sinks``: ``[Hq]``: a score for each head that takes part in the softmax, but has no value.
    - ``scale``: ``D ** -0.5`` if None. ``softcap``: scores become ``softcap * tanh(scores / softcap)``; 0 for none.
    - ``window``: how many keys a query sees at most, the last ones; 0 for all.
    - ``max_length``: ``length`` is at most that; L if None. A GPU shares out the work by it: the same ``max_length``
      gives the same launches, so a CUDA graph is good for all lengths up to it.

    A value of NaN or Inf makes NaN or Inf of its column for the queries that see it; with S > 1 also for those before
    them, if the device computes all S together.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    max_length = k.shape[2] if max_length is None else max_length
    call = AttentionCall(q, k, v, k_scale, v_scale, length, start, sinks, scale, softcap, window, max_length)
    return attend(call)


def attend(call: AttentionCall) -> Tensor:
    """``decode_attention``, of arguments that are a value."""
    if not call.q.is_cuda:  # on a GPU, once for every kind of call
        check_decode_attention(call)
    out: Tensor = _backend(call.q).decode_attention(call)
    return out


def paged_attention(
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
    max_queries: int,
    max_keys: int,
) -> Tensor:
    """Causal attention of sequences of unlike length, one after the other in one tensor: ``[T, Hq, D]``.

    Each sequence has some queries, its last tokens (a whole prompt, a part of one, a new token), and keys for all its
    tokens so far. They may lie anywhere in a cache that is shared. Returns a contiguous tensor of q's dtype; rows that
    belong to no sequence may hold anything. The same bits every time.

    - ``q``: float16, bfloat16 or float32 ``[T, Hq, D]``, D up to 512, any strides.
    - ``k``, ``v``: ``[P, Hkv, D]``, or ``[pages, keys of a page, Hkv, D]``, of q's dtype, or int8 with ``k_scale`` and
      ``v_scale``, float32 of the same shape without the D. Hq is a multiple of Hkv: so many heads of q in a row share a
      head of k. Any strides, but the last one of k and v is 1.
    - ``query_starts``, ``key_starts``: int32 ``[B + 1]``, on the device: queries of sequence ``b`` are those from
      ``query_starts[b]`` to ``query_starts[b + 1]``, its keys likewise. It has at least as many keys as queries, or no
      queries at all.
    - ``pages``: int64 ``[N]``: key ``i`` is ``k[pages[i]]``, counted on from page to page if ``k`` has pages; ``k[i]``
      if None. Or int32 ``[B, most]``, for keys in pages: sequence ``b`` has its keys in ``k[pages[b, 0]]``,
      ``k[pages[b, 1]]``, and so on; only differences of ``key_starts`` count then.
    - ``sinks``, ``scale``, ``softcap``, ``window``: as of ``decode_attention``.
    - ``max_queries``, ``max_keys``: bounds of what a sequence has. A GPU shares out the work by them and by B: the same
      ones give the same launches, so a CUDA graph is good for all lengths up to them.

    A value of NaN or Inf makes NaN or Inf of its column for the queries that see it, and may for those before them.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    call = PagedCall(
        q, k, v, k_scale, v_scale, query_starts, key_starts, pages, sinks, scale, softcap, window, max_queries, max_keys
    )  # fmt: skip
    return attend_paged(call)


def attend_paged(call: PagedCall) -> Tensor:
    """``paged_attention``, of arguments that are a value."""
    if not call.q.is_cuda:  # on a GPU, once for every kind of call
        check_paged_attention(call)
    out: Tensor = _backend(call.q).paged_attention(call)
    return out


def store_in_pages(
    key: Tensor,
    value: Tensor,
    k: Tensor,
    v: Tensor,
    key_starts: Tensor | None,
    pages: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Stores the newest key and value of each sequence in its pages; or any keys and values in their places.

    - ``key``, ``value``: float16, bfloat16 or float32 ``[B, Hkv, D]``, any strides but the last is 1; further rows are
      ignored.
    - ``k``, ``v``, ``k_scale``, ``v_scale``, ``key_starts``, ``pages``: as of ``paged_attention``, with keys in pages.
      The lengths count the new keys. A sequence without keys has none.
    - ``key_starts`` None: ``pages`` are int64 ``[B]``, the place of each key.

    Into int8 each head of a token is quantized with a scale of its own, as ``quantize_rows`` has it.
    """
    store(StoreCall(key, value, k, v, k_scale, v_scale, key_starts, pages))


def store(call: StoreCall) -> None:
    """``store_in_pages``, of arguments that are a value."""
    if not call.k.is_cuda:  # on a GPU, once for every kind of call
        check_store_in_pages(call)
    _backend(call.k).store_in_pages(call)


def _backend(tensor: Tensor) -> Any:
    """The module that computes where ``tensor`` is; that of GPUs is not imported before it's needed."""
    return _gpu() if checks.on_gpu(tensor) else cpu


@functools.cache
def _gpu() -> Any:
    from qgemm.kernels.attention import launcher

    return launcher
