"""Attention to a cache of keys and values.

- ``decode_attention(q, k, v, k_scale, v_scale, length, start, sinks, scale, softcap, window, max_length)``: without
  gradients.
"""

from typing import Any

from torch import Tensor

from qgemm.kernels import checks, dispatch
from qgemm.ops.declare import operator


def _decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    length: Tensor,
    start: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    max_length: int,
) -> Tensor:
    return dispatch.decode_attention(
        q, k, v, length,
        k_scale=k_scale, v_scale=v_scale, start=start, sinks=sinks, scale=scale, softcap=softcap, window=window,
        max_length=max_length,
    )  # fmt: skip


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    length: Tensor,
    start: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    max_length: int,
) -> Tensor:
    checks.check_decode_attention(q, k, v, k_scale, v_scale, length, start, sinks, softcap, window, max_length)
    return q.new_empty(q.shape)


def _no_backward(ctx: Any, wanted: tuple[bool, ...], *grads: Tensor) -> Any:
    raise NotImplementedError(
        "decode_attention has no gradient: train with torch.nn.functional.scaled_dot_product_attention"
    )


operator(
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, Tensor length, Tensor? start, "
    "Tensor? sinks, float scale, float softcap, int window, int max_length) -> Tensor",
    cpu=_decode_attention,
    cuda=_decode_attention,
    fake=_fake,
    setup_context=lambda ctx, inputs, output: None,
    backward=_no_backward,
)
