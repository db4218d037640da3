"""``torch.ops.qgemm.route``: the experts of each token, and their weights; ``router_logits``: the product before it.

``router_logits(x, weight, bias, dtype) -> logits`` has the gradients of PyTorch's product.

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
from qgemm.kernels.router import dispatch as product
from qgemm.kernels.router.config import is_for_few
from qgemm.kernels.router.reference import router_logits_reference
from qgemm.kernels.routing import Routing
from qgemm.ops.declare import gradients_through, operator
from qgemm.ops.direct import recall_launch, remember_launch, seen_by_others


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``torch.ops.qgemm.route``, bypassing the dispatcher where nothing in it needs to see the call."""
    out: tuple[Tensor, Tensor]
    if seen_by_others(logits, bias):
        out = torch.ops.qgemm.route(logits, bias, *astuple(routing))
    else:
        out = dispatch.route(logits, routing, bias)
    return out


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``torch.ops.qgemm.router_logits`` for few tokens on a GPU, where it is one launch; else PyTorch's product."""
    if not x.is_cuda or not is_for_few(x, weight):
        return router_logits_reference(x, weight, bias, dtype)
    what, tensors = ("router_logits", dtype), (x, weight, bias)
    recalled = recall_launch(what, tensors)
    if recalled is not None:
        return recalled[0]
    out: Tensor
    if seen_by_others(*tensors):
        out = torch.ops.qgemm.router_logits(*tensors, dtype)
        return out
    out = product.router_logits(*tensors, dtype)

    def launched() -> Any:
        from qgemm.kernels.router import launcher

        return launcher.find_logits_launch(x, weight, bias, out)

    remember_launch(what, tensors, (out,), launched)
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


def _logits_fake(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    product.check_router_logits(x, weight, bias, dtype)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


def _logits_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *operands, ctx.dtype = inputs
    ctx.save_for_backward(*operands)


def _logits_backward(ctx: Any, wanted: tuple[bool, ...], grad: Tensor) -> list[Tensor | None]:
    saved = ctx.saved_tensors
    sources = {at: saved[at] for at, want in enumerate(wanted) if want}

    def compute(*values: Tensor) -> tuple[Tensor]:
        given = dict(zip(sources, values, strict=True))
        x, weight, bias = (given.get(at, each) for at, each in enumerate(saved))
        return (router_logits_reference(x, weight, bias, ctx.dtype),)

    found = dict(zip(sources, gradients_through(compute, list(sources.values()), [grad]), strict=True))
    return [found.get(at) for at in range(len(wanted))]


operator(
    "router_logits(Tensor x, Tensor weight, Tensor? bias, ScalarType dtype) -> Tensor",
    compute=product.router_logits,
    fake=_logits_fake,
    setup_context=_logits_setup,
    backward=_logits_backward,
)
