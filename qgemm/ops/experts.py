"""``torch.ops.qgemm.quant_experts``: a mixture of experts in int8, as a PyTorch operator.

``out[t] = sum over j of top_k_weights[t, j] * expert(top_k_index[t, j], x[t])``; ``dispatch.experts`` documents
arguments and numbers. The activation goes in as its fields, since an operator takes tensors and plain values only.

It runs on CPU and CUDA, traces through a fake implementation that makes the same checks, and has gradients for ``x``
and ``top_k_weights``, with which routers and adapters train on frozen experts. They go through the dequantized weights
(rounding counts as the identity), one expert at a time, in an operator of its own: how many rows an expert has is known
at run time only, which a compiler couldn't follow.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.kernels import checks, dispatch
from qgemm.kernels.activations import GatedActivation
from qgemm.kernels.expert_weights import ExpertWeights
from qgemm.ops.declare import operator
from qgemm.ops.direct import seen_by_others

_OPERANDS = (
    "Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up, Tensor gate_up_scale, Tensor? gate_up_bias, "
    "Tensor down, Tensor down_scale, Tensor? down_bias, "
    "str activation, bool gated, float? limit, float alpha, float up_offset"
)


def quant_experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights, residual: Tensor | None = None
) -> Tensor:
    """``torch.ops.qgemm.quant_experts``, past the dispatcher where nobody on that way would see the call."""
    if (
        torch.compiler.is_compiling()
        or seen_by_others(x, weights.gate_up, weights.gate_up_scale, weights.gate_up_bias, top_k_weights, residual)
        or seen_by_others(x, weights.down, weights.down_scale, weights.down_bias, top_k_index)
    ):
        a = weights.activation
        fields = (a.name, a.gated, a.limit, a.alpha, a.up_offset)
        out: Tensor = torch.ops.qgemm.quant_experts(x, top_k_index, top_k_weights, *weights[:6], *fields, residual)
        return out
    return dispatch.run_experts(x, top_k_index, top_k_weights, weights, residual)


def _as_values(arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, ExpertWeights]:
    """The operator's arguments as ``dispatch.run_experts`` takes them."""
    x, top_k_index, top_k_weights, *tensors = arguments[:9]
    return x, top_k_index, top_k_weights, ExpertWeights._make((*tensors, GatedActivation(*arguments[9:14])))


def _compute(*arguments: Any) -> Tensor:
    return dispatch.run_experts(*_as_values(arguments), *arguments[14:])


def _fake(x: Tensor, *others: Any) -> Tensor:
    checks.check_experts(*_as_values((x, *others)), *others[13:])
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.activation = inputs[9:14]


def _backward(ctx: Any, wanted: tuple[bool, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    wants_x, _, wants_weights, *others = wanted
    wants_residual = others[11:] == [True]
    if any(others[:11]):
        raise RuntimeError("quant_experts has gradients for x, top_k_weights and residual only; freeze the others")
    grad_x, grad_weights = torch.ops.qgemm.quant_experts_backward(grad, *ctx.saved_tensors, *ctx.activation)
    found = (grad_x if wants_x else None, None, grad_weights if wants_weights else None, *(None,) * len(others))
    return (*found[:-1], grad) if wants_residual else found


operator(
    f"quant_experts({_OPERANDS}, Tensor? residual=None) -> Tensor",
    cpu=_compute,
    cuda=_compute,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)


def _compute_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    x, top_k_index, top_k_weights, experts = _as_values(arguments)
    k = top_k_index.shape[1]
    ids = top_k_index.flatten()
    pairs = ids.argsort(stable=True)
    ends = torch.searchsorted(ids[pairs], torch.arange(experts.down.shape[0] + 1, device=ids.device)).tolist()
    weights = top_k_weights.flatten().float()
    # Of each pair of a token and an expert; summed at the end, in an order that doesn't depend on the device's mood.
    grad_pairs = x.new_zeros((ids.shape[0], x.shape[1]), dtype=torch.float32)
    grad_weights = torch.zeros_like(weights)
    for expert, (start, end) in enumerate(pairwise(ends)):
        if start == end:
            continue
        slots = pairs[start:end]
        rows, own = slots // k, experts.of(expert)
        first = (own.gate_up * own.gate_up_scale[:, None]).to(x.dtype)
        second = (own.down * own.down_scale[:, None]).to(x.dtype)
        biases = [None if bias is None else bias.to(x.dtype) for bias in (own.gate_up_bias, own.down_bias)]
        h = F.linear(x[rows], first, biases[0])
        y = F.linear(own.activation(h).to(x.dtype), second, biases[1])
        grad_y = grad[rows].float()
        grad_weights[slots] = (grad_y * y.float()).sum(-1)
        grad_inner = ((grad_y * weights[slots, None]).to(x.dtype) @ second).float()
        grad_pairs[slots] = (_activation_backward(own.activation, h.float(), grad_inner).to(x.dtype) @ first).float()
    grad_x = grad_pairs.view(*top_k_index.shape, -1).sum(1)
    return grad_x.to(x.dtype), grad_weights.view(top_k_index.shape).to(top_k_weights.dtype)


def _activation_backward(activation: GatedActivation, h: Tensor, grad: Tensor) -> Tensor:
    """The gradient of ``activation(h)`` for ``h``, both float32, where ``grad`` is that of its result."""
    gate, up = h.chunk(2, dim=-1) if activation.gated else (h, None)
    clamped = gate if activation.limit is None else gate.clamp(max=activation.limit)
    if up is None:
        opened = grad
    else:
        clamped_up = up if activation.limit is None else up.clamp(-activation.limit, activation.limit)
        opened = grad * (clamped_up + activation.up_offset)
    grad_gate = _gate_backward(activation, clamped, opened)
    if activation.limit is not None:
        grad_gate = grad_gate.masked_fill(gate > activation.limit, 0.0)
    if up is None:
        return grad_gate
    grad_up = grad * _gate(activation, clamped)
    if activation.limit is not None:
        grad_up = grad_up.masked_fill(up.abs() > activation.limit, 0.0)
    return torch.cat((grad_gate, grad_up), dim=-1)


def _gate(activation: GatedActivation, gate: Tensor) -> Tensor:
    return GatedActivation(activation.name, gated=False, alpha=activation.alpha)(gate)


def _gate_backward(activation: GatedActivation, gate: Tensor, grad: Tensor) -> Tensor:
    out: Tensor
    if activation.name == "silu":
        sigmoid = torch.sigmoid(activation.alpha * gate)
        out = grad * sigmoid * (1 + activation.alpha * gate * (1 - sigmoid))
    elif activation.name == "relu":
        out = torch.ops.aten.threshold_backward(grad, gate, 0)
    elif activation.name == "relu2":
        out = grad * 2 * gate.clamp(min=0)
    else:
        approximate = {"gelu": "none", "gelu_tanh": "tanh"}[activation.name]
        out = torch.ops.aten.gelu_backward(grad, gate, approximate=approximate)
    return out


def _backward_fake(
    grad: Tensor, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), top_k_weights.new_empty(top_k_weights.shape)


operator(
    f"quant_experts_backward(Tensor grad, {_OPERANDS}) -> (Tensor, Tensor)",
    cpu=_compute_backward,
    cuda=_compute_backward,
    fake=_backward_fake,
)
