"""Mixtures of experts as PyTorch operators, by what their weights are.

- ``torch.ops.qgemm.quant_experts``: int8 or fp8 by the same; rows are quantized before either product.
- ``torch.ops.qgemm.weight_only_experts``: weights alone are quantized; products are in float.

``out[t] = sum over j of top_k_weights[t, j] * expert(top_k_index[t, j], x[t])``; ``dispatch`` documents arguments and
numbers. The activation goes in as its fields, since an operator takes tensors and plain values only.

They run on CPU and CUDA, trace through a fake implementation that makes the same checks, and have gradients for ``x``
and ``top_k_weights``, with which routers and adapters train on frozen experts. They go through the dequantized weights
(rounding counts as the identity), one expert at a time, in an operator of its own: how many rows an expert has is known
at run time only, which a compiler couldn't follow.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.kernels import dispatch
from qgemm.kernels.activations import GatedActivation
from qgemm.kernels.expert_weights import ExpertWeights, WeightOnlyExperts
from qgemm.kernels.moe.checks import check_experts, check_weight_only_experts
from qgemm.ops.declare import operator
from qgemm.ops.direct import seen_by_others

Experts: TypeAlias = ExpertWeights | WeightOnlyExperts

_ROUTED = "Tensor x, Tensor top_k_index, Tensor top_k_weights"
_ACTIVATION = "str activation, bool gated, float? limit, float alpha, float up_offset"
_FIELDS = 5  # of an activation


def quant_experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights, residual: Tensor | None = None
) -> Tensor:
    """``torch.ops.qgemm.quant_experts``, past the dispatcher where nobody on that way would see the call."""
    if seen_by_others(x, top_k_index, top_k_weights, residual, *weights.tensors):
        operands = *weights.tensors, *_fields(weights.activation)
        out: Tensor = torch.ops.qgemm.quant_experts(x, top_k_index, top_k_weights, *operands, residual)
        return out
    return dispatch.run_experts(x, top_k_index, top_k_weights, weights, residual)


def weight_only_experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: WeightOnlyExperts, residual: Tensor | None = None
) -> Tensor:
    """``torch.ops.qgemm.weight_only_experts``, past the dispatcher where nobody on that way would see the call."""
    if seen_by_others(x, top_k_index, top_k_weights, residual, *weights.tensors):
        operands = *weights.tensors, *_fields(weights.activation), weights.format, weights.group_size
        out: Tensor = torch.ops.qgemm.weight_only_experts(x, top_k_index, top_k_weights, *operands, residual)
        return out
    return dispatch.weight_only_experts(x, top_k_index, top_k_weights, weights, residual)


def _fields(a: GatedActivation) -> tuple[str, bool, float | None, float, float]:
    return a.name, a.gated, a.limit, a.alpha, a.up_offset


def _declare_experts(
    name: str,
    kind: Callable[..., Experts],
    operands: str,
    compute: Callable[..., Tensor],
    check: Callable[..., None],
    plain: str = "",
) -> None:
    """Declares the operator ``name`` and that of its gradients, for experts whose weights are a ``kind``.

    ``operands``: the tensors of such a value; ``plain``: what it has after its activation. ``compute``, ``check``: take
    ``x``, ``top_k_index``, ``top_k_weights``, the value and maybe a residual.
    """
    schema = f"{_ROUTED}, {operands}, {_ACTIVATION}{plain}"
    tensors = 3 + operands.count("Tensor")
    count = schema.count(",") + 1  # of arguments, without a residual

    def as_values(arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, Experts]:
        x, top_k_index, top_k_weights, *weights = arguments[:tensors]
        fields, others = arguments[tensors : tensors + _FIELDS], arguments[tensors + _FIELDS : count]
        return x, top_k_index, top_k_weights, kind(*weights, GatedActivation(*fields), *others)

    def run(*arguments: Any) -> Tensor:
        return compute(*as_values(arguments), *arguments[count:])

    def fake(x: Tensor, *others: Any) -> Tensor:
        check(*as_values((x, *others)), *others[count - 1 :])
        return x.new_empty(x.shape)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:tensors])
        ctx.others = inputs[tensors:count]

    def backward(ctx: Any, wanted: tuple[bool, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
        wants_x, _, wants_weights, *others = wanted
        wants_residual = others[count - 3 :] == [True]
        if any(others[: count - 3]):
            raise RuntimeError(f"{name} has gradients for x, top_k_weights and residual only; freeze the others")
        arguments = *ctx.saved_tensors, *ctx.others
        # The formulas themselves where their derivatives may be wanted, with create_graph=True. torch.func wants them
        # always, and may transform what they need the values of.
        if torch.is_grad_enabled() and torch._C._functorch.maybe_current_level() is None:
            grad_x, grad_weights = _gradients(grad, *as_values(arguments))
        else:
            grad_x, grad_weights = getattr(torch.ops.qgemm, f"{name}_backward")(grad, *arguments)
        found = (grad_x if wants_x else None, None, grad_weights if wants_weights else None, *(None,) * len(others))
        return (*found[:-1], grad) if wants_residual else found

    def refuse(ctx: Any, wanted: tuple[bool, ...], *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            f"{name} has no second derivatives in torch.func: use torch.autograd.grad with create_graph=True"
        )

    def run_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        return _gradients(grad, *as_values(arguments))

    operator(
        f"{name}({schema}, Tensor? residual=None) -> Tensor",
        cpu=run,
        cuda=run,
        fake=fake,
        setup_context=setup_context,
        backward=backward,
    )
    operator(
        f"{name}_backward(Tensor grad, {schema}) -> (Tensor, Tensor)",
        cpu=run_backward,
        cuda=run_backward,
        fake=_gradients_fake,
        backward=refuse,
    )


def _gradients(
    grad: Tensor, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: Experts
) -> tuple[Tensor, Tensor]:
    """Those of ``x`` and ``top_k_weights``."""
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
        first, second = own.float_weights(x.dtype)
        biases = [None if bias is None else bias.to(x.dtype) for bias in (own.gate_up_bias, own.down_bias)]
        h = F.linear(x[rows], first, biases[0])
        y = F.linear(own.activation(h).to(x.dtype), second, biases[1])
        grad_y = grad[rows].float()
        grad_weights[slots] = (grad_y * y.float()).sum(-1)
        grad_inner = ((grad_y * weights[slots, None]).to(x.dtype) @ second).float()
        grad_pairs[slots] = (_activation_backward(own.activation, h.float(), grad_inner).to(x.dtype) @ first).float()
    grad_x = grad_pairs.view(*top_k_index.shape, x.shape[1]).sum(1)
    return grad_x.to(x.dtype), grad_weights.view(top_k_index.shape).to(top_k_weights.dtype)


def _gradients_fake(
    grad: Tensor, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), top_k_weights.new_empty(top_k_weights.shape)


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


_declare_experts(
    "quant_experts",
    ExpertWeights,
    "Tensor gate_up, Tensor gate_up_scale, Tensor? gate_up_bias, Tensor down, Tensor down_scale, Tensor? down_bias",
    dispatch.run_experts,
    check_experts,
)
_declare_experts(
    "weight_only_experts",
    WeightOnlyExperts,
    "Tensor gate_up, Tensor gate_up_scale, Tensor? gate_up_zero_point, Tensor? gate_up_global_scale, "
    "Tensor? gate_up_bias, Tensor down, Tensor down_scale, Tensor? down_zero_point, Tensor? down_global_scale, "
    "Tensor? down_bias",
    dispatch.weight_only_experts,
    check_weight_only_experts,
    ", str format, int group_size",
)
