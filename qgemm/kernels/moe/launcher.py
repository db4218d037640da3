"""Launcher of ``experts`` on GPU tensors, CPU tensors in Triton's interpreter: five launches for few tokens, seven
for many.

Everything about a call except its addresses follows from the sizes, dtypes and devices of its tensors: how many rows
each expert gets stays on the device. So the first call of a kind is checked and leaves a plan behind. Later calls like
it allocate the output and one buffer for everything in between, and launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from qgemm.kernels.activation.launcher import activated_row_blocks
from qgemm.kernels.expert_weights import ExpertWeights, WeightOnlyExperts
from qgemm.kernels.grouped import launcher as grouped
from qgemm.kernels.grouped.config import select_grouped_config
from qgemm.kernels.launch.device import DeviceLimits, device_limits
from qgemm.kernels.launch.launch import ALIGNMENT, MAX_ROWS_TO_OVERLAP, Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.launch.steps import LaunchPlan, Layout, Names, Step, Tensors
from qgemm.kernels.moe.checks import check_experts
from qgemm.kernels.moe.kernels import (
    _activate_kernel,
    _combine_kernel,
    _count_pairs_kernel,
    _place_pairs_kernel,
    _quantize_pairs_kernel,
    _quantize_tokens_kernel,
)
from qgemm.kernels.quantize import launcher as quantize
from qgemm.kernels.stages.activations import DEVICE_ACTIVATIONS
from qgemm.numerics.blocks import BLOCK
from qgemm.numerics.formats import FP8, INT8
from qgemm.numerics.integers import cdiv, next_power_of_2

MAX_PAIRS_TO_COUNT = 512  # that the program of every pair counts
CHUNK = 128  # pairs


def experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights, residual: Tensor | None = None
) -> Tensor:
    """``dispatch.experts`` on a GPU. It checks its arguments itself."""
    tensors: Tensors = (x, top_k_index, top_k_weights, *weights[:6], residual)
    aligned = (weights.gate_up.data_ptr() | weights.down.data_ptr()) % ALIGNMENT == 0
    shapes = [t is None or (t.shape, t.dtype, t.device, t.is_contiguous()) for t in tensors]
    kind = (experts, *shapes, weights.activation, aligned)
    plan: LaunchPlan | None = plans.get(kind)
    if plan is None:
        check_experts(x, top_k_index, top_k_weights, weights, residual)
        plan = plans.keep(kind, _make_plan(x, top_k_index, weights, residual is not None, aligned))
    if residual is not None and not plan.steps:
        return residual.clone(memory_format=torch.contiguous_format)
    if takes_bytes(weights.gate_up, x.device):
        tensors = tuple(t.view(torch.int8) if t is not None and t.dtype == FP8.storage else t for t in tensors)
    return plan.run(tensors)


def takes_bytes(weight: Tensor, device: torch.device) -> bool:
    """Whether kernels get the bytes of an fp8 ``weight`` and of its rows, on devices without products of fp8."""
    return weight.dtype == FP8.storage and not device_limits(device).multiplies_fp8


def _make_plan(x: Tensor, top_k_index: Tensor, weights: ExpertWeights, adds: bool, aligned: bool) -> LaunchPlan:
    (T, top_k), (E, N, H) = top_k_index.shape, weights.gate_up.shape
    P, intermediate = T * top_k, weights.down.shape[2]
    if not (P and E and H):
        return LaunchPlan(x.device.index, 0, (), ())
    dtype, blocks = weights.gate_up.dtype, weights.has_blocks
    hopper = aligned and all(
        grouped.takes_hopper_kernel(n, k, x.dtype, x.device) for n, k in ((N, H), (H, intermediate))
    )
    first = select_grouped_config(P, E, N, H, x.device, hopper, dtype, blocks)
    second = select_grouped_config(P, E, H, intermediate, x.device, hopper, dtype, blocks)

    def multiply(names: Names, a: str, weight: str, out: str) -> Step:
        n, k, config = (N, H, first) if weight == "gate_up" else (H, intermediate, second)
        launch = grouped.product_launch(P, E, n, k, x.dtype, x.device, config, dtype, blocks)
        outs = (out,) * grouped.outputs(config)
        return names.step(launch, a, weight, *outs, f"{a}_scale", f"{weight}_scale", f"{weight}_bias", "tiles")

    return plan_mixture(x, top_k_index, weights, adds, first.block_m, multiply)


def plan_mixture(
    x: Tensor,
    top_k_index: Tensor,
    weights: ExpertWeights | WeightOnlyExperts,
    adds: bool,
    block_m: int,
    multiply: Callable[[Names, str, str, str], Step],
) -> LaunchPlan:
    """Pairs of a token and an expert are sorted, multiplied, activated, multiplied again and summed.

    ``adds``: whether there is a residual. ``block_m``: the rows of a tile of the products. ``multiply``: makes a
    product's step from the names of its rows, its weight and its output.
    """
    (T, top_k), E, (H, intermediate) = top_k_index.shape, len(weights.down), weights.sizes
    P, limits, rows, dtype, in_groups = T * top_k, device_limits(x.device), x.dtype, INT8.storage, False
    if isinstance(weights, ExpertWeights):
        dtype, in_groups = weights.gate_up.dtype, weights.has_blocks
        rows = torch.int8 if takes_bytes(weights.gate_up, x.device) else dtype
    layout = Layout()
    layout.add("q", "rows", (P, H), rows)
    if isinstance(weights, ExpertWeights):
        layout.add("q_scale", "row scales", (P * (cdiv(H, BLOCK) if in_groups else 1),), torch.float32)
    layout.add("tiles", "tiles", (grouped.table_size(P, E, block_m),), torch.int32)
    layout.add("position", "position", (P,), torch.int32)
    layout.add("counts", "counts", (cdiv(P, CHUNK), _bins(E)), torch.int32)
    layout.add("g", "products", (P, weights.gate_up.shape[1]), x.dtype)
    layout.add("h", "rows", (P, intermediate), rows)
    if isinstance(weights, ExpertWeights):
        layout.add("h_scale", "row scales", (P * (cdiv(intermediate, BLOCK) if in_groups else 1),), torch.float32)
    layout.add("y", "products", (P, H), x.dtype)
    size, parts = layout.parts()
    names = name_tensors(weights, adds, parts)
    early = limits.pdl and T <= MAX_ROWS_TO_OVERLAP
    block, blocks, threads = activated_row_blocks(intermediate, x.itemsize)
    block = max(block, BLOCK) if in_groups else block
    flags = (limits.pdl, early, quantize.rounding(dtype, limits), in_groups)
    constants = (DEVICE_ACTIVATIONS[weights.activation.name], weights.activation, block, blocks, *flags)
    warps = max(1, threads // limits.warp_size)
    activation = Launch(_activate_kernel, P, (intermediate,), constants, num_warps=warps, pdl=limits.pdl)
    steps = (
        *_route_steps(x, top_k, E, block_m, early, names, dtype, in_groups),
        multiply(names, "q", "gate_up", "g"),
        names.step(activation, "g", "h", "h_scale", "tiles"),
        multiply(names, "h", "down", "y"),
        names.step(combine_launch(T, top_k, H, early, limits), "y", "position", "top_k_weights", "residual", "out"),
    )
    return LaunchPlan(x.device.index, size, tuple(parts.values()), steps)


def name_tensors(weights: ExpertWeights | WeightOnlyExperts, adds: bool, parts: Iterable[str]) -> Names:
    """The names of a call's tensors and of the ``parts`` of its buffer. ``adds``: whether there is a residual."""
    own = dict(zip(weights._fields, weights.tensors, strict=False))
    absent = {name for name, value in own.items() if value is None} | ({"lists", "q_scale", "h_scale"} - {*parts})
    names = ("x", "top_k_index", "top_k_weights", *own, "residual", "out", *parts)
    return Names(names, absent if adds else {*absent, "residual"})


def _bins(E: int) -> int:
    """The number of bins in which kernels count the pairs of ``E`` experts: at least as many as a warp has threads."""
    return max(64, next_power_of_2(E))


def _route_steps(
    x: Tensor, top_k: int, E: int, block_m: int, early: bool, names: Names, dtype: torch.dtype, in_groups: bool
) -> list[Step]:
    """The steps that sort pairs by expert and quantize tokens to ``dtype``. ``in_groups``: with scales of groups."""
    (T, K), P, limits = x.shape, x.shape[0] * top_k, device_limits(x.device)
    strides = x.contiguous().stride()
    block, blocks, threads = quantize.row_blocks(
        K, x.dtype.itemsize, quantize.max_row_bytes(limits), quantize.LONG_ROW_BLOCK
    )
    warps = max(1, threads // limits.warp_size)
    block = max(block, BLOCK) if in_groups else block
    pdl, flags, form = limits.pdl, (limits.pdl, early), (quantize.rounding(dtype, limits), in_groups)
    groups = _bins(E)
    if P <= MAX_PAIRS_TO_COUNT:
        routing = (top_k, block, blocks, max(32, next_power_of_2(P)), groups, block_m, *flags, *form)
        warps = max(warps, 4)
        launch = Launch(_quantize_pairs_kernel, P + 1, (P, E, K, *strides), routing, num_warps=warps, pdl=pdl)
        return [names.step(launch, "x", "top_k_index", "q", "q_scale", "position", "tiles")]
    chunks = cdiv(P, CHUNK)
    count = Launch(_count_pairs_kernel, chunks, (P, E), (CHUNK, groups, *flags), num_warps=4, pdl=pdl)
    placing = (CHUNK, groups, block_m, *flags)
    place = Launch(_place_pairs_kernel, chunks + 1, (P, E, chunks), placing, num_warps=8, pdl=pdl)
    constants = (top_k, block, blocks, *flags, *form)
    tokens = Launch(_quantize_tokens_kernel, T, (K, *strides), constants, num_warps=warps, pdl=pdl)
    return [
        names.step(count, "top_k_index", "counts"),
        names.step(place, "top_k_index", "counts", "position", "tiles"),
        names.step(tokens, "x", "q", "q_scale", "position"),
    ]


def combine_launch(
    T: int, top_k: int, H: int, early: bool, limits: DeviceLimits, E: int = 0, is_sorted: bool = True
) -> Launch:
    """The weighted sum of each token's rows. If these aren't sorted, its positions are experts, of ``E``."""
    # 8 values per thread; for few tokens, more programs.
    block = min(256 if T * H < 2**18 else 1024, max(32, next_power_of_2(H)))
    constants = (top_k, block, is_sorted, limits.pdl, early)
    warps = max(1, block // 8 // limits.warp_size)
    return Launch(_combine_kernel, T * cdiv(H, block), (H, E), constants, num_warps=warps, pdl=limits.pdl)
