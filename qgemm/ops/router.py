"""``torch.ops.qgemm.route``: the experts of each token, and their weights.

``route(logits, bias, top_k, kind, normalized, in_float, scale, floor, groups, kept_groups, offset, rounded, margin) ->
(weights, index)``. ``dispatch.route`` documents the arguments; those from ``top_k`` on are the fields of a ``Routing``.
Weights have gradients for the logits; the choice has none, and so the bias has none.
"""

from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from qgemm.kernels import dispatch
from qgemm.kernels.moe.checks import check_route
from qgemm.kernels.routing import Routing
from qgemm.ops.declare import gradients_through, operator
from qgemm.ops.direct import seen_by_others


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``torch.ops.qgemm.route``, bypassing the dispatcher where nothing in it needs to see the call."""
    out: tuple[Tensor, Tensor]
    if seen_by_others(logits, bias):
        out = torch.ops.qgemm.route(logits, bias, *astuple(routing))
    else:
        out = dispatch.route(logits, routing, bias)
    return out


def _route(logits: Tensor, bias: Tensor | None, *fields: Any) -> tuple[Tensor, Tensor]:
    return dispatch.route(logits, Routing(*fields), bias)


def _fake(logits: Tensor, bias: Tensor | None, *fields: Any) -> tuple[Tensor, Tensor]:
    routing = Routing(*fields)
    check_route(logits, routing, bias)
    shape = (logits.shape[0], routing.top_k)
    return logits.new_empty(shape, dtype=routing.dtype(logits)), logits.new_empty(shape, dtype=torch.int64)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, *fields = inputs
    _, index = output
    ctx.mark_non_differentiable(index)
    ctx.routing = Routing(*fields)
    ctx.save_for_backward(logits, index)


def _backward(ctx: Any, wanted: tuple[bool, ...], grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    logits, index = ctx.saved_tensors
    compute = lambda x: (ctx.routing.weights(x, index),)  # noqa: E731
    (found,) = gradients_through(compute, [logits.float()], [grad.float()])
    assert found is not None
    return found.to(logits.dtype), *(None,) * (len(wanted) - 1)


operator(
    "route(Tensor logits, Tensor? bias, int top_k, str kind, bool normalized, bool in_float, float scale, float floor, "
    "int groups, int kept_groups, float offset=0.0, bool rounded=False, float margin=0.0) -> (Tensor, Tensor)",
    compute=_route,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
