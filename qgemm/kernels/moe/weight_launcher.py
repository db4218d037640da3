"""Launcher of ``weight_only_experts`` on GPU tensors, CPU tensors in Triton's interpreter: ``experts``, in floats.

Five launches for few tokens, seven for many; the first copies tokens into the order of their experts. On Hopper, few
tokens take four launches, and a single one three: the tokens of each expert are listed, not copied, and the first
product applies the activation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qgemm.kernels.expert_weights import WeightOnlyExperts
from qgemm.kernels.grouped.weight_hopper import many_tokens_launch, select_many_tokens
from qgemm.kernels.grouped.weight_launcher import select_weight_config, weight_product_launch
from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.launch import ALIGNMENT
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.launch.steps import LaunchPlan, Layout, Names, Step, Tensors
from qgemm.kernels.moe.checks import check_weight_only_experts
from qgemm.kernels.moe.few_tokens import (
    few_tokens_launch,
    hopper_forms,
    list_pairs_launch,
    select_few_tokens,
)
from qgemm.kernels.moe.launcher import combine_launch, name_tensors, plan_mixture
from qgemm.kernels.stored_form import MXFP4_GROUP, StoredForm
from qgemm.kernels.weight_only.few_rows_config import FewRows
from qgemm.numerics.formats import FP8

_PARTS = WeightOnlyExperts._fields[:10]


class _Plan(NamedTuple):
    """``launches``, and the dtypes that they view each tensor of a call as; None for the tensor's own."""

    launches: LaunchPlan
    views: tuple[torch.dtype | None, ...] = ()


def weight_only_experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: WeightOnlyExperts, residual: Tensor | None = None
) -> Tensor:
    """``dispatch.weight_only_experts`` on a GPU, for 16-bit ``x``. It checks its arguments itself."""
    tensors: Tensors = (x, top_k_index, top_k_weights, *weights.tensors, residual)
    shapes = [t is None or (t.shape, t.dtype, t.device, t.is_contiguous()) for t in tensors]
    aligned = not any(t is not None and t.data_ptr() % ALIGNMENT for t in weights.tensors)
    kind = (weight_only_experts, *shapes, *weights[10:], aligned)
    plan: _Plan | None = plans.get(kind)
    if plan is None:
        check_weight_only_experts(x, top_k_index, top_k_weights, weights, residual)
        plan = plans.keep(kind, _make_plan(x, top_k_index, weights, residual is not None, aligned))
    if residual is not None and not plan.launches.steps:
        return residual.clone(memory_format=torch.contiguous_format)
    views = plan.views or (None,) * len(tensors)
    return plan.launches.run(
        tuple(t if t is None or view is None else t.view(view) for t, view in zip(tensors, views, strict=True))
    )


def _make_plan(x: Tensor, top_k_index: Tensor, weights: WeightOnlyExperts, adds: bool, aligned: bool) -> _Plan:
    (T, top_k), (E, N, _), (H, intermediate) = top_k_index.shape, weights.gate_up.shape, weights.sizes
    P = T * top_k
    if not (P and E and H):
        return _Plan(LaunchPlan(x.device.index, 0, (), ()))
    limits = device_limits(x.device)
    if limits.hopper and aligned and (forms := hopper_forms(weights, x.dtype)):
        gate_up, down = (
            select_few_tokens(T, top_k, E, k, form) for k, form in zip((H, intermediate), forms, strict=True)
        )
        if gate_up and down:
            views = (*(None,) * 3, *(_view(name, weights, False) for name in _PARTS), None)
            return _Plan(_few_tokens(x, top_k_index, weights, adds, forms, (gate_up, down)), views)
    many = select_many_tokens(P, E) if limits.hopper and aligned and fits_many_tokens(weights, x.dtype) else None
    views = (*(None,) * 3, *(_view(name, weights, many is not None) for name in _PARTS), None)
    if many is not None:
        block_m = many.columns
        first, second = (many_tokens_launch(P, E, n, k, many, x.dtype, limits) for n, k in ((N, H), (H, intermediate)))
        outs, ends = 2, ["scale", "bias"]
    else:
        forms = [StoredForm.of(part.format, part.group_size, part.zero_point) for part in weights.parts]
        config = select_weight_config(P, E, forms, x.device)
        block_m = config.block_m
        first, second = (
            weight_product_launch(P, E, n, part.K, form, config, x.device)
            for n, part, form in zip((N, H), weights.parts, forms, strict=True)
        )
        outs, ends = 1, ["scale", "zero_point", "global_scale", "bias"]

    def multiply(names: Names, a: str, weight: str, out: str) -> Step:
        launch = first if weight == "gate_up" else second
        return names.step(launch, a, weight, *(out,) * outs, *(f"{weight}_{end}" for end in ends), "tiles")

    return _Plan(plan_mixture(x, top_k_index, weights, adds, block_m, multiply), views)


def fits_many_tokens(weights: WeightOnlyExperts, dtype: torch.dtype) -> bool:
    """Whether Hopper's kernel of many tokens accepts ``weights`` with rows of ``dtype``: mxfp4 by bfloat16."""
    return dtype == torch.bfloat16 and all(
        part.format == "fp4"
        and part.scale.dtype == torch.uint8
        and part.group_size == MXFP4_GROUP
        and part.weight.shape[1] % 16 == 0
        and part.K % (2 * MXFP4_GROUP) == 0  # two exponents are loaded together
        for part in weights.parts
    )


def _view(name: str, weights: WeightOnlyExperts, in_words: bool) -> torch.dtype | None:
    """The dtype that kernels view a tensor as. ``in_words``: pairs of a weight's bytes, and of exponents as scales."""
    value = getattr(weights, name)
    if value is None:
        return None
    if in_words and (name in ("gate_up", "down") or value.dtype == torch.uint8):
        return torch.uint16
    if value.dtype != FP8.storage:
        return None
    return torch.uint8 if name in ("gate_up", "down") else torch.int8  # kernels read e4m3 by its bits


def _few_tokens(
    x: Tensor,
    top_k_index: Tensor,
    weights: WeightOnlyExperts,
    adds: bool,
    forms: list[StoredForm],
    tiles: tuple[FewRows, FewRows],
) -> LaunchPlan:
    """Lists of each expert's pairs, two products and a sum. The rows of ``h`` and ``y`` are pairs, in their order.

    ``forms``, ``tiles``: of both weights.
    """
    (T, top_k), (E, N, _), (H, intermediate) = top_k_index.shape, weights.gate_up.shape, weights.sizes
    P, limits = T * top_k, device_limits(x.device)
    layout = Layout()
    layout.add("h", "h", (P, intermediate), x.dtype)
    layout.add("y", "y", (P, H), x.dtype)
    if T > 1:
        layout.add("lists", "lists", (min(P, E), 1 + P), torch.int32)
    size, parts = layout.parts()
    names = name_tensors(weights, adds, parts)

    def multiply(part: int, a: str, weight: str, out: str) -> Step:
        n, k = (H, intermediate) if part else (N, H)
        activation = None if part else weights.activation
        launch = few_tokens_launch(T, top_k, E, n, k, forms[part], tiles[part], activation, limits)
        ends = [f"{weight}_{end}" for end in ("scale", "zero_point", "global_scale", "bias")]
        return names.step(launch, a, "top_k_index", "lists", weight, *ends, out)

    combine = combine_launch(T, top_k, H, limits.pdl, limits, E, is_sorted=False)
    steps = [
        multiply(0, "x", "gate_up", "h"),
        multiply(1, "h", "down", "y"),
        names.step(combine, "y", "top_k_index", "top_k_weights", "residual", "out"),
    ]
    if T > 1:
        steps.insert(0, names.step(list_pairs_launch(P, E, limits), "top_k_index", "lists"))
    return LaunchPlan(x.device.index, size, tuple(parts.values()), tuple(steps))
