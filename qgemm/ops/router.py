"""``torch.ops.qgemm.route``: the experts of each token, and their weights.

``route(logits, top_k, kind, normalized, in_float) -> (weights, index)``; ``dispatch.route`` documents them, and the
arguments are the fields of a ``Routing``. Weights have gradients for the logits.
"""

from typing import Any

import torch
from torch import Tensor

from qgemm.kernels import checks, dispatch
from qgemm.kernels.routing import Routing
from qgemm.ops.declare import operator
from qgemm.ops.direct import rows_seen_by_others


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """``torch.ops.qgemm.route``, past the dispatcher where nobody on that way would see the call."""
    out: tuple[Tensor, Tensor]
    if torch.compiler.is_compiling() or rows_seen_by_others(logits):
        fields = (routing.top_k, routing.kind, routing.normalized, routing.in_float)
        out = torch.ops.qgemm.route(logits, *fields)
    else:
        out = dispatch.route(logits, routing)
    return out


def _route(logits: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    return dispatch.route(logits, Routing(*fields))


def _fake(logits: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    routing = Routing(*fields)
    checks.check_route(logits, routing)
    shape = (logits.shape[0], routing.top_k)
    return logits.new_empty(shape, dtype=routing.dtype(logits)), logits.new_empty(shape, dtype=torch.int64)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, *fields = inputs
    _, index = output
    ctx.mark_non_differentiable(index)
    ctx.routing = Routing(*fields)
    ctx.save_for_backward(logits, index)


def _backward(ctx: Any, wanted: tuple[bool, ...], grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    logits, index = ctx.saved_tensors
    grad, x = grad.float(), logits.float()
    if ctx.routing.kind == "softmax" and not ctx.routing.normalized:
        p = x.softmax(dim=-1)
        every = torch.zeros_like(p).scatter(-1, index, grad)
        found = p * (every - (p * every).sum(dim=-1, keepdim=True))
    else:
        # Of the chosen alone, whose softmax the normalized weights are.
        p = x.gather(-1, index).softmax(dim=-1)
        found = torch.zeros_like(x).scatter(-1, index, p * (grad - (p * grad).sum(dim=-1, keepdim=True)))
    return found.to(logits.dtype), None, None, None, None


operator(
    "route(Tensor logits, int top_k, str kind, bool normalized, bool in_float) -> (Tensor, Tensor)",
    cpu=_route,
    cuda=_route,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
