"""Attention to a cache of keys and values.

- ``decode_attention(q, k, v, k_scale, v_scale, length, start, sinks, scale, softcap, window, max_length)``: without
  gradients.
"""

from typing import Any

from torch import Tensor

from qgemm.kernels import dispatch
from qgemm.kernels.attention.checks import AttentionCall, check_decode_attention
from qgemm.ops.declare import operator


def _decode_attention(*arguments: Any) -> Tensor:
    return dispatch.attend(AttentionCall(*arguments))


def _fake(*arguments: Any) -> Tensor:
    call = AttentionCall(*arguments)
    check_decode_attention(call)
    return call.q.new_empty(call.q.shape)


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
