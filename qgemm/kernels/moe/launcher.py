"""Launcher of ``experts`` on GPU tensors, CPU tensors in Triton's interpreter: five launches for few tokens, seven
for many.

All about a call but its addresses follows from the sizes, dtypes and devices of its tensors: how many rows each expert
gets stays on the device. So the first call of a kind is checked and leaves a plan behind. Those like it allocate the
output and one buffer for all that lies between, and launch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qgemm.kernels.activations import GatedActivation
from qgemm.kernels.checks import check_experts
from qgemm.kernels.expert_weights import ExpertWeights
from qgemm.kernels.gemm.config import GemmConfig
from qgemm.kernels.grouped import launcher as grouped
from qgemm.kernels.grouped.config import select_grouped_config
from qgemm.kernels.launch.device import DeviceLimits, device_limits
from qgemm.kernels.launch.launch import ALIGNMENT, Launch, hooked
from qgemm.kernels.linear.launcher import _empty
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

MOST_PLANS = 4096
MOST_PAIRS_TO_COUNT = 512  # for every pair
CHUNK = 128  # pairs
MOST_TOKENS_TO_OVERLAP = 64  # see quantize.MOST_ROWS_TO_OVERLAP
CACHE_LINE = 128  # bytes
LONGEST_WHOLE_ROW = 32_768  # bytes of a row that a program keeps in registers, after the activation
PART_OF_A_ROW = 4096  # values at a time of a longer one

Tensors = tuple[Tensor | None, ...]
ARGUMENTS = ("x", "top_k_index", "top_k_weights", *ExpertWeights._fields[:6], "out")


def experts(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights) -> Tensor:
    """``dispatch.experts`` on a GPU, which checks its arguments itself."""
    tensors: Tensors = (x, top_k_index, top_k_weights, *weights[:6])
    aligned = (weights.gate_up.data_ptr() | weights.down.data_ptr()) % ALIGNMENT == 0
    shapes = [t is None or (t.shape, t.dtype, t.device, t.is_contiguous()) for t in tensors]
    kind = (*shapes, weights.activation, aligned)
    plan = _plans.get(kind)
    if plan is None:
        check_experts(x, top_k_index, top_k_weights, weights)
        plan = _make_plan(x, top_k_index, weights, aligned)
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[kind] = plan
    return _run(plan, tensors)


def _run(plan: _Plan, tensors: Tensors) -> Tensor:
    x = tensors[0]
    assert x is not None
    if not plan.steps:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if x.is_cuda and plan.device != torch._C._cuda_getDevice():
        with torch.cuda.device(plan.device):
            return _run(plan, tensors)
    # Weights always are; the others are small.
    tensors = tuple(t if t is None or t.is_contiguous() else t.contiguous() for t in tensors)
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    # What the driver's launches of a plan aren't made for.
    unusual = not x.is_cuda or hooked() or any(address % ALIGNMENT for address in addresses)
    launches = [step.launch.aligned for step in plan.steps]
    if unusual or None in launches:
        return _run_with_tensors(plan, tensors)

    out = _empty(tuple(x.shape), (x.shape[1], 1), x.dtype)
    buffer = _empty((plan.buffer,), (1,), torch.int8)
    base = buffer.data_ptr()
    addresses.append(out.data_ptr())
    addresses += [base + part.offset for part in plan.parts]
    stream = torch._C._cuda_getCurrentRawStream(x.device.index)
    for launch, step in zip(launches, plan.steps, strict=True):
        launch(stream, step.pick(addresses))  # type: ignore[misc]
    return out


def _run_with_tensors(plan: _Plan, tensors: Tensors) -> Tensor:
    x = tensors[0]
    assert x is not None
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    buffer = x.new_empty(plan.buffer, dtype=torch.int8)
    every = (*tensors, out, *[part.of(buffer) for part in plan.parts])
    for step in plan.steps:
        step.launch(*[None if index is None else every[index] for index in step.tensors])
    return out


class _Part(NamedTuple):
    """A tensor in the buffer."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, buffer: Tensor) -> Tensor:
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return buffer[self.offset : self.offset + size].view(self.dtype).view(self.shape)


class _Step(NamedTuple):
    """A launch, with the tensors among ``ARGUMENTS`` and the parts that it takes; None for one that isn't there."""

    launch: Launch
    tensors: tuple[int | None, ...]
    pick: Callable[[Sequence[int]], tuple[int, ...]]


class _Plan(NamedTuple):
    """What calls of a kind have in common."""

    device: int | None
    buffer: int
    """Bytes."""
    parts: tuple[_Part, ...]
    steps: tuple[_Step, ...]


_plans: dict[tuple[object, ...], _Plan] = {}


class _Buffer:
    """Lays out the parts of the buffer; those with one ``place`` share its memory."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[str, tuple[int, ...], torch.dtype]] = {}

    def add(self, name: str, place: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.parts[name] = (place, shape, dtype)

    def layout(self) -> tuple[int, dict[str, _Part]]:
        sizes: dict[str, int] = {}
        for place, shape, dtype in self.parts.values():
            size = torch.Size(shape).numel() * dtype.itemsize
            sizes[place] = max(sizes.get(place, 0), -(-size // CACHE_LINE) * CACHE_LINE)
        starts, end = {}, 0
        for place, size in sizes.items():
            starts[place] = end
            end += size
        return end, {name: _Part(starts[place], shape, dtype) for name, (place, shape, dtype) in self.parts.items()}


def _make_plan(x: Tensor, top_k_index: Tensor, weights: ExpertWeights, aligned: bool) -> _Plan:
    (T, top_k), (E, N, H) = top_k_index.shape, weights.gate_up.shape
    P, intermediate = T * top_k, weights.down.shape[2]
    if not (P and E and H):
        return _Plan(x.device.index, 0, (), ())
    limits = device_limits(x.device)
    hopper = aligned and all(
        grouped.takes_hopper_kernel(n, k, x.dtype, x.device) for n, k in ((N, H), (H, intermediate))
    )
    first = select_grouped_config(P, E, N, H, x.device, hopper)
    second = select_grouped_config(P, E, H, intermediate, x.device, hopper)

    groups = max(64, grouped.next_power_of_2(E))  # no fewer bins than a warp has threads
    buffer = _Buffer()
    buffer.add("q", "int8 rows", (P, H), torch.int8)
    buffer.add("q_scale", "row scales", (P,), torch.float32)
    buffer.add("tiles", "tiles", (grouped.table_size(P, E, first.block_m),), torch.int32)
    buffer.add("position", "position", (P,), torch.int32)
    buffer.add("counts", "counts", (-(-P // CHUNK), groups), torch.int32)
    buffer.add("g", "float rows", (P, N), x.dtype)
    buffer.add("h", "int8 rows", (P, intermediate), torch.int8)
    buffer.add("h_scale", "row scales", (P,), torch.float32)
    buffer.add("y", "float rows", (P, H), x.dtype)
    size, parts = buffer.layout()

    absent = {name for name, value in weights._asdict().items() if value is None}
    steps = _Steps((*ARGUMENTS, *parts), absent)
    early = limits.pdl and T <= MOST_TOKENS_TO_OVERLAP
    for launch, arguments in _route(x, P, top_k, E, groups, first.block_m, early, limits):
        steps.add(launch, *arguments)
    bias_dtypes = [None if bias is None else bias.dtype for bias in (weights.gate_up_bias, weights.down_bias)]
    launch = grouped.product_plan(P, E, N, H, x.dtype, bias_dtypes[0], x.device, first)
    steps.add_product(launch, first, "q", "gate_up", "g")
    steps.add(_activate(P, intermediate, x.dtype, weights.activation, early, limits), "g", "h", "h_scale", "tiles")
    launch = grouped.product_plan(P, E, H, intermediate, x.dtype, bias_dtypes[1], x.device, second)
    steps.add_product(launch, second, "h", "down", "y")
    steps.add(_combine(T, top_k, H, early, limits), "y", "position", "top_k_weights", "out")
    return _Plan(x.device.index, size, tuple(parts.values()), tuple(steps.steps))


class _Steps:
    """The launches of a plan, whose tensors are given by name."""

    def __init__(self, names: tuple[str, ...], absent: set[str]) -> None:
        """``names``: of all tensors, in order. ``absent``: which of them are None."""
        self._names = names
        self._absent = absent
        self.steps: list[_Step] = []

    def add(self, launch: Launch, *arguments: str) -> None:
        indices = tuple(None if name in self._absent else self._names.index(name) for name in arguments)
        present = [index for index in indices if index is not None]
        self.steps.append(_Step(launch, indices, operator.itemgetter(*present)))

    def add_product(self, launch: Launch, config: GemmConfig, a: str, weight: str, out: str) -> None:
        outs = (out, out) if config.schedule == "specialized" else (out,)
        self.add(launch, a, weight, *outs, f"{a}_scale", f"{weight}_scale", f"{weight}_bias", "tiles")


def _route(
    x: Tensor, P: int, top_k: int, E: int, groups: int, block_m: int, early: bool, limits: DeviceLimits
) -> list[tuple[Launch, tuple[str, ...]]]:
    """The launches that sort the pairs by expert and quantize their tokens, with their tensors."""
    T, K = x.shape
    strides = x.contiguous().stride()
    block, blocks, threads = quantize.row_blocks(
        K, x.dtype.itemsize, quantize.longest_whole_row(limits), quantize.PART_OF_A_ROW
    )
    warps = max(1, threads // limits.warp_size)
    pdl, flags = limits.pdl, (limits.pdl, early)
    if P <= MOST_PAIRS_TO_COUNT:
        routing = (top_k, block, blocks, max(32, grouped.next_power_of_2(P)), groups, block_m, *flags)
        warps = max(warps, 4)
        launch = Launch(_quantize_pairs_kernel, P + 1, (P, E, K, *strides), routing, num_warps=warps, pdl=pdl)
        return [(launch, ("x", "top_k_index", "q", "q_scale", "position", "tiles"))]
    chunks = -(-P // CHUNK)
    count = Launch(_count_pairs_kernel, chunks, (P, E), (CHUNK, groups, *flags), num_warps=4, pdl=pdl)
    placing = (CHUNK, groups, block_m, *flags)
    place = Launch(_place_pairs_kernel, chunks + 1, (P, E, chunks), placing, num_warps=8, pdl=pdl)
    constants = (top_k, block, blocks, *flags)
    tokens = Launch(_quantize_tokens_kernel, T, (K, *strides), constants, num_warps=warps, pdl=pdl)
    return [
        (count, ("top_k_index", "counts")),
        (place, ("top_k_index", "counts", "position", "tiles")),
        (tokens, ("x", "q", "q_scale", "position")),
    ]


def _activate(
    P: int, K: int, dtype: torch.dtype, activation: GatedActivation, early: bool, limits: DeviceLimits
) -> Launch:
    block, blocks, threads = row_blocks(K, dtype.itemsize)
    constants = (DEVICE_ACTIVATIONS[activation.name], activation, block, blocks, limits.pdl, early)
    warps = max(1, threads // limits.warp_size)
    return Launch(_activate_kernel, P, (K,), constants, num_warps=warps, pdl=limits.pdl)


def row_blocks(K: int, itemsize: int) -> tuple[int, int, int]:
    """``quantize.row_blocks`` for ``_activate_kernel``."""
    block, blocks, threads = quantize.row_blocks(K, itemsize, LONGEST_WHOLE_ROW, PART_OF_A_ROW)
    if blocks and K > 4096:
        # Gates and ups are read: with half as many threads, rows of 14,336 took 1.2 times as long on an H200.
        block, threads = 2 * block, 2 * threads
        blocks = -(-K // block)
    return block, blocks, threads


def _combine(T: int, top_k: int, H: int, early: bool, limits: DeviceLimits) -> Launch:
    # 8 values a thread; few tokens want more programs.
    block = min(256 if T * H < 2**18 else 1024, max(32, grouped.next_power_of_2(H)))
    constants = (top_k, block, limits.pdl, early)
    warps = max(1, block // 8 // limits.warp_size)
    return Launch(_combine_kernel, T * -(-H // block), (H,), constants, num_warps=warps, pdl=limits.pdl)
