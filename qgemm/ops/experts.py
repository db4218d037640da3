"""Mixtures of experts as PyTorch operators, by what their weights are.

- ``torch.ops.qgemm.quant_experts``: int8 or fp8 by the same; rows are quantized before either product.
- ``torch.ops.qgemm.weight_only_experts``: weights alone are quantized; products are in float.

``out[t] = sum over j of top_k_weights[t, j] * expert(top_k_index[t, j], x[t])``; ``dispatch`` documents arguments and
numbers. The activation goes in as its fields, since an operator takes tensors and plain values only.

They run on CPU and CUDA, trace through a fake implementation that makes the same checks, and have gradients for ``x``
and ``top_k_weights``, with which routers and adapters train on frozen experts. They go through the dequantized weights
(rounding counts as the identity), in an operator of its own (``expert_gradients.py``): how many rows an expert has is
known at run time only, which a compiler couldn't follow.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from qgemm.kernels import dispatch
from qgemm.kernels.activations import GatedActivation
from qgemm.kernels.expert_weights import ExpertWeights, WeightOnlyExperts
from qgemm.kernels.moe.checks import check_experts, check_weight_only_experts
from qgemm.ops.declare import operator
from qgemm.ops.direct import seen_by_others
from qgemm.ops.expert_gradients import gradients

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
        operands = *weights.tensors, *_fields(weights.activation), *weights[11:]
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
            grad_x, grad_weights = gradients(grad, *as_values(arguments))
        else:
            grad_x, grad_weights = getattr(torch.ops.qgemm, f"{name}_backward")(grad, *arguments)
        found = (grad_x if wants_x else None, None, grad_weights if wants_weights else None, *(None,) * len(others))
        return (*found[:-1], grad) if wants_residual else found

    def refuse(ctx: Any, wanted: tuple[bool, ...], *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            f"{name} has no second derivatives in torch.func: use torch.autograd.grad with create_graph=True"
        )

    def run_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        return gradients(grad, *as_values(arguments))

    operator(
        f"{name}({schema}, Tensor? residual=None) -> Tensor",
        compute=run,
        fake=fake,
        setup_context=setup_context,
        backward=backward,
    )
    operator(
        f"{name}_backward(Tensor grad, {schema}) -> (Tensor, Tensor)",
        compute=run_backward,
        fake=_gradients_fake,
        backward=refuse,
    )


def _gradients_fake(
    grad: Tensor, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), top_k_weights.new_empty(top_k_weights.shape)


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
    ", str gate_up_format, int gate_up_group_size, str down_format, int down_group_size",
)
