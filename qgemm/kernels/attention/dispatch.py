"""The public functions of attention to a cache: check the arguments, then run where the tensors are.

As ``kernels/dispatch.py``. The numbers: ``kernels/reference.py``. On the CPU: ``cpu.py``. On a GPU: ``launcher.py``.
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
    own position; no others are read. A query that sees no key gives zeros. The result has the same bits every time.

    - ``q``: float16, bfloat16 or float32 ``[B, S, Hq, D]``, S from 1 to 16, D up to 512, any strides.
    - ``k``, ``v``: ``[B, Hkv, L, D]``, of q's dtype, or int8 with ``k_scale`` and ``v_scale``, float32 ``[B, Hkv, L]``.
      Hq is a multiple of Hkv: each ``Hq / Hkv`` consecutive heads of q share a head of k. Any strides, but the last is
      1.
    - ``length``: int32 ``[1]`` or ``[B]``, on the device: the number of keys, including those of ``q`` itself.
    - ``start``: int32 ``[B]`` or ``[1]``: keys before it are padding.
    - ``sinks``: ``[Hq]``: a score for each head that is part of the softmax, but has no value.
    - ``scale``: ``D ** -0.5`` if None. ``softcap``: scores become ``softcap * tanh(scores / softcap)``; 0 for none.
    - ``window``: the maximum number of keys that a query sees, the last ones; 0 for all.
    - ``max_length``: an upper bound of ``length``; L if None. A GPU divides the work by it. The same ``max_length``
      gives the same launches, so a CUDA graph works for all lengths up to it.

    A value of NaN or Inf makes its column NaN or Inf for the queries that see it. With S > 1, it does so for earlier
    queries, too, if the device computes all S together.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    max_length = k.shape[2] if max_length is None else max_length
    call = AttentionCall(q, k, v, k_scale, v_scale, length, start, sinks, scale, softcap, window, max_length)
    return attend(call)


def attend(call: AttentionCall) -> Tensor:
    """``decode_attention`` with its arguments as one value."""
    if not call.q.is_cuda:  # the GPU's launcher checks once for every kind of call
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
    """Causal attention of sequences of different lengths, one after the other in one tensor: ``[T, Hq, D]``.

    Each sequence has some queries, its last tokens (a whole prompt, a part of one, or a new token), and keys for all
    its tokens so far, which may lie anywhere in a shared cache. Returns a contiguous tensor of q's dtype. Rows that
    belong to no sequence may hold anything. The result has the same bits every time.

    - ``q``: float16, bfloat16 or float32 ``[T, Hq, D]``, D up to 512, any strides.
    - ``k``, ``v``: ``[P, Hkv, D]``, or ``[pages, keys of a page, Hkv, D]``, of q's dtype, or int8 with ``k_scale`` and
      ``v_scale``, float32 of the same shape without the D. Hq is a multiple of Hkv: each ``Hq / Hkv`` consecutive heads
      of q share a head of k. Any strides, but the last one of k and v is 1.
    - ``query_starts``, ``key_starts``: int32 ``[B + 1]``, on the device. The queries of sequence ``b`` are those from
      ``query_starts[b]`` to ``query_starts[b + 1]``, its keys likewise. It has at least as many keys as queries, or no
      queries at all.
    - ``pages``: None: key ``i`` is ``k[i]``. int64 ``[N]``: key ``i`` is ``k[pages[i]]``, counted through all pages if
      ``k`` has pages. int32 ``[B, most]``, for keys in pages: sequence ``b`` has its keys in ``k[pages[b, 0]]``,
      ``k[pages[b, 1]]``, and so on; then only the differences of ``key_starts`` matter.
    - ``sinks``, ``scale``, ``softcap``, ``window``: as in ``decode_attention``.
    - ``max_queries``, ``max_keys``: upper bounds for every sequence. A GPU divides the work by them and by B. The same
      bounds give the same launches, so a CUDA graph works for all lengths up to them.

    A value of NaN or Inf makes its column NaN or Inf for the queries that see it, and possibly for earlier ones.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    call = PagedCall(
        q, k, v, k_scale, v_scale, query_starts, key_starts, pages, sinks, scale, softcap, window, max_queries, max_keys
    )  # fmt: skip
    return attend_paged(call)


def attend_paged(call: PagedCall) -> Tensor:
    """``paged_attention`` with its arguments as one value."""
    if not call.q.is_cuda:  # the GPU's launcher checks once for every kind of call
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
    """Stores the newest key and value of each sequence in its pages, or any keys and values in their places.

    - ``key``, ``value``: float16, bfloat16 or float32 ``[B, Hkv, D]``, any strides but the last is 1; further rows are
      ignored.
    - ``k``, ``v``, ``k_scale``, ``v_scale``, ``key_starts``, ``pages``: as in ``paged_attention``, with keys in pages.
      The lengths include the new keys. A sequence of length 0 has no new key.
    - ``key_starts`` None: ``pages`` is int64 ``[B]``, the place of each key.

    For int8, each head of a token is quantized with its own scale, as by ``quantize_rows``.
    """
    store(StoreCall(key, value, k, v, k_scale, v_scale, key_starts, pages))


def store(call: StoreCall) -> None:
    """``store_in_pages`` with its arguments as one value."""
    if not call.k.is_cuda:  # the GPU's launcher checks once for every kind of call
        check_store_in_pages(call)
    _backend(call.k).store_in_pages(call)


def _backend(tensor: Tensor) -> Any:
    """The module that computes where ``tensor`` is. The GPU's is imported only when it's needed."""
    return _gpu() if checks.on_gpu(tensor) else cpu


@functools.cache
def _gpu() -> Any:
    from qgemm.kernels.attention import launcher

    return launcher
