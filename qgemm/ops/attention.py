"""Attention to a cache of keys and values, without gradients.

- ``decode_attention(q, k, v, k_scale, v_scale, length, start, sinks, scale, softcap, window, max_length)``.
- ``paged_attention(q, k, v, k_scale, v_scale, query_starts, key_starts, pages, sinks, scale, softcap, window,
  max_queries, max_keys)``.
- ``store_in_pages(key, value, k, v, k_scale, v_scale, key_starts, pages)``, which changes ``k``, ``v`` and the scales.
"""

from typing import Any

from torch import Tensor

from qgemm.kernels.attention import dispatch
from qgemm.kernels.attention.call import AttentionCall, PagedCall, StoreCall
from qgemm.kernels.attention.checks import check_decode_attention, check_paged_attention, check_store_in_pages
from qgemm.ops.declare import operator


def _decode_attention(*arguments: Any) -> Tensor:
    return dispatch.attend(AttentionCall(*arguments))


def _fake(*arguments: Any) -> Tensor:
    call = AttentionCall(*arguments)
    check_decode_attention(call)
    return call.q.new_empty(call.q.shape)


def _paged_attention(*arguments: Any) -> Tensor:
    return dispatch.attend_paged(PagedCall(*arguments))


def _fake_paged(*arguments: Any) -> Tensor:
    call = PagedCall(*arguments)
    check_paged_attention(call)
    return call.q.new_empty(call.q.shape)


def _store_in_pages(*arguments: Any) -> None:
    dispatch.store(StoreCall(*arguments))


def _fake_store(*arguments: Any) -> None:
    check_store_in_pages(StoreCall(*arguments))


def _no_backward(ctx: Any, wanted: tuple[bool, ...], *grads: Tensor) -> Any:
    raise NotImplementedError(
        "attention to a cache has no gradient: train with torch.nn.functional.scaled_dot_product_attention"
    )


operator(
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, Tensor length, Tensor? start, "
    "Tensor? sinks, float scale, float softcap, int window, int max_length) -> Tensor",
    compute=_decode_attention,
    fake=_fake,
    backward=_no_backward,
)
operator(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, Tensor query_starts, "
    "Tensor key_starts, Tensor? pages, Tensor? sinks, float scale, float softcap, int window, SymInt max_queries, "
    "SymInt max_keys) -> Tensor",
    compute=_paged_attention,
    fake=_fake_paged,
    backward=_no_backward,
)
operator(
    "store_in_pages(Tensor key, Tensor value, Tensor(a!) k, Tensor(b!) v, Tensor(c!)? k_scale, Tensor(d!)? v_scale, "
    "Tensor? key_starts, Tensor pages) -> ()",
    compute=_store_in_pages,
    fake=_fake_store,
)
