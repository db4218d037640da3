"""Launcher of ``weight_only_experts`` on GPU tensors, CPU tensors in Triton's interpreter: as ``experts``, in floats.

Five launches for few tokens, seven for many; the first puts copies of tokens in the order of their experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgemm.kernels.expert_weights import WeightOnlyExperts
from qgemm.kernels.grouped.launcher import table_size
from qgemm.kernels.grouped.weight_launcher import select_weight_config, stored_form, weight_product_launch
from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.launch.steps import LaunchPlan, Layout, Names, Step, Tensors
from qgemm.kernels.moe.checks import check_weight_only_experts
from qgemm.kernels.moe.launcher import CHUNK, MAX_TOKENS_TO_OVERLAP, activate_launch, combine_launch, route_steps
from qgemm.numerics.formats import FP8
from qgemm.numerics.integers import cdiv, next_power_of_2

_PARTS = WeightOnlyExperts._fields[:10]
ARGUMENTS = ("x", "top_k_index", "top_k_weights", *_PARTS, "residual", "out")


def weight_only_experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: WeightOnlyExperts, residual: Tensor | None = None
) -> Tensor:
    """``dispatch.weight_only_experts`` on a GPU, of 16-bit ``x``; it checks its arguments itself."""
    tensors: Tensors = (x, top_k_index, top_k_weights, *weights.tensors, residual)
    shapes = [t is None or (t.shape, t.dtype, t.device, t.is_contiguous()) for t in tensors]
    kind = (weight_only_experts, *shapes, *weights[10:])
    plan: LaunchPlan | None = plans.get(kind)
    if plan is None:
        check_weight_only_experts(x, top_k_index, top_k_weights, weights, residual)
        plan = plans.keep(kind, _make_plan(x, top_k_index, weights, residual is not None))
    if residual is not None and not plan.steps:
        return residual.clone(memory_format=torch.contiguous_format)
    # Kernels know e4m3 by its bits.
    return plan.run(tuple(t.view(torch.uint8) if t is not None and t.dtype == FP8.storage else t for t in tensors))


def _make_plan(x: Tensor, top_k_index: Tensor, weights: WeightOnlyExperts, adds: bool) -> LaunchPlan:
    (T, top_k), (E, N, _), (H, intermediate) = top_k_index.shape, weights.gate_up.shape, weights.sizes
    P = T * top_k
    if not (P and E and H):
        return LaunchPlan(x.device.index, 0, (), ())
    limits = device_limits(x.device)
    form = stored_form(weights.format, weights.group_size, weights.gate_up_scale)
    config = select_weight_config(P, E, form, x.device)
    groups = max(64, next_power_of_2(E))  # no fewer bins than a warp has threads
    layout = Layout()
    layout.add("q", "rows", (P, H), x.dtype)
    layout.add("tiles", "tiles", (table_size(P, E, config.block_m),), torch.int32)
    layout.add("position", "position", (P,), torch.int32)
    layout.add("counts", "counts", (cdiv(P, CHUNK), groups), torch.int32)
    layout.add("g", "products", (P, N), x.dtype)
    layout.add("h", "rows", (P, intermediate), x.dtype)
    layout.add("y", "products", (P, H), x.dtype)
    size, parts = layout.parts()

    absent = {name for name, value in weights._asdict().items() if value is None}
    names = Names(
        (*ARGUMENTS, *parts, "q_scale", "h_scale"),
        {*absent, "q_scale", "h_scale"} | (set() if adds else {"residual"}),
    )
    early = limits.pdl and T <= MAX_TOKENS_TO_OVERLAP

    def multiply(n: int, k: int, a: str, weight: str, out: str) -> Step:
        launch = weight_product_launch(P, E, n, k, form, config, x.device)
        ends = ("scale", "zero_point", "global_scale", "bias")
        return names.step(launch, a, weight, out, *(f"{weight}_{end}" for end in ends), "tiles")

    steps = (
        *route_steps(x, P, top_k, E, groups, config.block_m, early, limits, names),
        multiply(N, H, "q", "gate_up", "g"),
        names.step(
            activate_launch(P, intermediate, x.dtype, weights.activation, early, limits), "g", "h", "h_scale", "tiles"
        ),
        multiply(H, intermediate, "h", "down", "y"),
        names.step(combine_launch(T, top_k, H, early, limits), "y", "position", "top_k_weights", "residual", "out"),
    )
    return LaunchPlan(x.device.index, size, tuple(parts.values()), steps)
