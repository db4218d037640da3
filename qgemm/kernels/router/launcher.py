"""Launcher of the routing kernel: ``route`` on GPU tensors, CPU tensors in Triton's interpreter."""

import torch
from torch import Tensor

from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.launch import MAX_ROWS_TO_OVERLAP, Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.router.kernels import _route_kernel
from qgemm.kernels.routing import Routing
from qgemm.numerics.integers import next_power_of_2

MAX_EXPERTS = 1024  # whose logits a warp can hold; with more, PyTorch routes


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``dispatch.route`` on a GPU."""
    T, E = logits.shape
    if E > MAX_EXPERTS or not _has_groups_of_powers_of_2(logits, routing):
        with torch.no_grad():
            return routing(logits, bias)
    weights = logits.new_empty((T, routing.top_k), dtype=routing.dtype(logits))
    index = logits.new_empty((T, routing.top_k), dtype=torch.int64)
    if not T:
        return weights, index
    kind = (
        route,
        logits.shape,
        logits.stride(),
        logits.dtype,
        logits.device,
        routing,
        None if bias is None else bias.dtype,
    )
    launch: Launch | None = plans.get(kind)
    if launch is None:
        launch = plans.keep(kind, _make_launch(logits, routing))
    launch(logits, bias if bias is None else bias.contiguous(), weights, index)
    return weights, index


def _has_groups_of_powers_of_2(logits: Tensor, routing: Routing) -> bool:
    """Whether groups have sizes that are powers of 2, or no group is ruled out."""
    E, groups = logits.shape[1], routing.groups
    if routing.kept_groups == groups:
        return True
    is_power = next_power_of_2(E) == E and groups == next_power_of_2(groups)
    return is_power and device_limits(logits.device).warp_size <= E


def _make_launch(logits: Tensor, routing: Routing) -> Launch:
    (T, E), limits = logits.shape, device_limits(logits.device)
    block = max(limits.warp_size, next_power_of_2(E))
    constants = (
        routing.top_k, routing.kind, routing.normalized, routing.scale, routing.floor, routing.groups,
        routing.kept_groups, routing.offset, routing.rounded, routing.margin,
        block, next_power_of_2(routing.top_k), limits.pdl, limits.pdl and T <= MAX_ROWS_TO_OVERLAP,
    )  # fmt: skip
    return Launch(_route_kernel, T, (E, *logits.stride()), constants, num_warps=1, pdl=limits.pdl)
