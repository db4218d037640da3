"""Launchers of the routing kernels: ``route``, ``router_logits``, on GPU tensors or in Triton's interpreter."""

import torch
from torch import Tensor

from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.launch import MAX_ROWS_TO_OVERLAP, Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.quantize import launcher as quantize
from qgemm.kernels.router.config import MAX_ROW_BYTES, TOKENS, is_for_few
from qgemm.kernels.router.kernels import _route_kernel, _router_logits_kernel
from qgemm.kernels.router.reference import router_logits_reference
from qgemm.kernels.routing import Routing
from qgemm.numerics.integers import cdiv, next_power_of_2

MAX_EXPERTS = 1024  # whose logits a warp can hold; with more, PyTorch routes


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``dispatch.router_logits`` on a GPU."""
    if not is_for_few(x, weight):
        with torch.no_grad():
            return router_logits_reference(x, weight, bias, dtype)
    out = x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)
    launch, tensors = find_logits_launch(x, weight, bias, out)
    launch(*tensors)
    return out


def find_logits_launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
) -> tuple[Launch, tuple[Tensor | None, ...]]:
    """The launch of such a product that ``is_for_few``, and what to call it with."""
    x, weight = (each if each.stride(1) == 1 else each.contiguous() for each in (x, weight))
    bias = None if bias is None else bias.contiguous()
    kind = (
        router_logits, x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.stride(), weight.dtype,
        None if bias is None else bias.dtype, out.dtype,
    )  # fmt: skip
    launch: Launch | None = plans.get(kind)
    if launch is None:
        (T, K), E, limits = x.shape, weight.shape[0], device_limits(x.device)
        block, blocks, threads = quantize.row_blocks(K, max(x.itemsize, weight.itemsize), MAX_ROW_BYTES, 0)
        tokens = min(TOKENS, next_power_of_2(T))
        grid, next_early = quantize.programs(E * cdiv(T, tokens), limits, True)
        numbers, constants = (T, E, K, x.stride(0), weight.stride(0)), (tokens, block, blocks, limits.pdl, next_early)
        warps = max(1, threads // limits.warp_size)
        launch = Launch(_router_logits_kernel, grid, numbers, constants, num_warps=warps, pdl=limits.pdl)
        plans.keep(kind, launch)
    return launch, (x, weight, bias, out)


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
