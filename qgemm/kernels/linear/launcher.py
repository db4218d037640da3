"""Launcher of ``quant_linear`` on GPU tensors: a row quantization and a product, or both in one launch, decided once.

Everything about a call except its addresses follows from the sizes, strides, dtypes and devices of its tensors, and
from whether the weight's address is aligned. So the first call of a kind is checked and leaves a plan behind. Later
calls like it are two allocations and one or two launches: the quantized rows and their scales share one buffer, for
which no tensor is made. Calls of one launch also share the buffer of their stream, because work on a stream runs in
order.

One launch takes the host less time than two, but two overlap on the device: ``hopper.in_one_launch`` decides
(docs/performance/int8.md has the measurements).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from qgemm.kernels.checks import check_block_scaled_linear, check_quant_linear
from qgemm.kernels.gemm.config import GemmConfig, is_valid
from qgemm.kernels.gemm.launcher import plan_product, row_stride, vector_stride, with_contiguous_columns
from qgemm.kernels.launch import memory
from qgemm.kernels.launch.device import DeviceLimits, device_limits
from qgemm.kernels.launch.launch import ALIGNMENT, MAX_ROWS_TO_OVERLAP, Launch, hooked
from qgemm.kernels.launch.memory import CACHE_LINE_BYTES, COUNTS_BYTES
from qgemm.kernels.launch.plans import plans, remember
from qgemm.kernels.launch.steps import LaunchPlan, Names, Part
from qgemm.kernels.linear.kernels import _quant_linear_kernel
from qgemm.kernels.quantize import launcher as quantize
from qgemm.numerics.blocks import BLOCK
from qgemm.numerics.formats import FP8, INT8
from qgemm.numerics.integers import cdiv, next_power_of_2, round_up

# Without Hopper's kernel, one row takes one launch if it and the weight are short: each program quantizes the row, so
# there may not be more programs than SMs.
MAX_FUSED_ROW_BYTES = 8192
FUSED_CONFIG = GemmConfig(16, 32, 512, num_warps=4, num_stages=6, schedule="tiles")

ARGUMENTS = ("x", "weight", "weight_scale", "bias", "input_scale", "residual", "out")
PARTS = ("counts", "q", "q_scale")
# The arguments of each launch.
QUANTIZATION = ("x", "q", "q_scale", "input_scale")
PRODUCT = ("q", "weight", "out", "q_scale", "weight_scale", "bias", "residual")
BOTH = (*QUANTIZATION, "weight", "out", "weight_scale", "bias", "residual")


def quant_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
    residual: Tensor | None = None,
    recallable: bool = False,
    blocks: bool = False,
) -> Tensor:
    """``dispatch.quant_linear`` on a GPU. It checks its arguments itself. ``x`` must not be a negative view.

    ``blocks``: whether the scales are of blocks, as in ``dispatch.block_scaled_linear``.
    """
    if x.layout is not torch.strided:
        _check(x, weight, weight_scale, bias, input_scale, residual, blocks)
    kind: tuple[object, ...] = (
        quant_linear, blocks,
        x.shape, x.is_contiguous() or x.stride(), x.dtype, x.get_device(),
        weight.shape, weight.is_contiguous() or weight.stride(), weight.dtype, weight.get_device(),
        weight.data_ptr() % ALIGNMENT == 0,
        weight_scale.shape, weight_scale.is_contiguous() or weight_scale.stride(),
        weight_scale.dtype, weight_scale.get_device(),
        None if bias is None else (bias.shape, bias.is_contiguous() or bias.stride(), bias.dtype, bias.get_device()),
        None if input_scale is None else (input_scale.shape, input_scale.dtype, input_scale.get_device()),
    )  # fmt: skip
    if residual is not None:
        strides = residual.is_contiguous() or residual.stride()
        kind = (*kind, residual.shape, strides, residual.dtype, residual.get_device(), residual.layout)
    plan: LinearPlan | None = plans.get(kind)
    if plan is None:
        _check(x, weight, weight_scale, bias, input_scale, residual, blocks)
        plan = plans.keep(kind, _make_plan(x, weight, weight_scale, bias, input_scale, residual))
    if recallable and plan.aligned:
        what = "blocks" if blocks else None
        remember(plan.run, x, weight, weight_scale, bias, input_scale, residual, what)
    out = plan.run(x, weight, weight_scale, bias, input_scale, residual)
    assert out is not None  # the plan was made for such a weight
    return out


def _check(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    residual: Tensor | None,
    blocks: bool,
) -> None:
    if blocks:
        check_block_scaled_linear(x, weight, weight_scale, bias, residual)
    else:
        check_quant_linear(x, weight, weight_scale, bias, input_scale, residual)


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """What calls of a kind have in common. They make one launch or two; none for an empty output.

    Their buffer has ``COUNTS_BYTES`` of zeros first, then the quantized rows, then their scales.
    """

    device: int
    one_of_several: bool
    """Whether there are other devices, one of which may be the current device."""
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    aligned: bool
    """Whether the plan is for weights whose address is a multiple of ``ALIGNMENT``."""
    rows: tuple[int, int] | None
    """The shape that ``x`` is viewed as; None if its memory is ``[M, K]`` already."""
    residual_rows: tuple[int, int] | None
    """The same for the residual."""
    q_bytes: int
    """Where the scales begin, in bytes from the quantized rows."""
    usual: LaunchPlan
    captured: LaunchPlan
    """The launches in CUDA graphs, unless these have counts for ``counted``."""
    shares_buffer: bool
    """Whether calls on a stream share its buffer: calls of one launch do. Between two, others may launch theirs."""
    counted: LaunchPlan | None
    """The launches in CUDA graphs that have the counts which programs that wait for one another need."""
    takes_bytes: bool = False
    """Whether kernels are given the bytes of an fp8 weight."""

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        other: Tensor | None,
        residual: Tensor | None = None,
    ) -> Tensor | None:
        """The layer's output for tensors like those that it was made for; None for a weight that isn't ``aligned``.

        ``other``: as in ``launch.plans.recall``.
        """
        if self.one_of_several and self.device != torch._C._cuda_getDevice():
            with torch.cuda.device(self.device):
                return self.run(x, weight, weight_scale, bias, other, residual)

        rows = x if self.rows is None else x.reshape(self.rows)
        x_at, weight_at, scale_at = rows.data_ptr(), weight.data_ptr(), weight_scale.data_ptr()
        bias_at = 0 if bias is None else bias.data_ptr()
        other_at = 0 if other is None else other.data_ptr()
        if residual is not None and self.residual_rows is not None:
            residual = with_contiguous_columns(residual.reshape(self.residual_rows))
        residual_at = 0 if residual is None else residual.data_ptr()
        # Whether the plan's launches by the driver can't be used.
        unusual = (x_at | weight_at | scale_at | bias_at | other_at | residual_at) % ALIGNMENT or hooked()
        if unusual and weight_at % ALIGNMENT and self.aligned:
            return None

        out = memory.empty(self.out_shape, self.out_strides, x.dtype)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        plan, counts = self.usual, None
        # The default stream, 0, is never captured.
        capturing = stream and memory.is_capturing()
        if capturing:
            counts = memory.graph_counts(self.device) if self.counted is not None else None
            plan = self.captured if counts is None or self.counted is None else self.counted
        elif self.counted is not None and not self.shares_buffer:
            counts = memory.stream_buffer(self.device, stream, COUNTS_BYTES)
        if self.shares_buffer and not capturing:
            buffer = memory.stream_buffer(self.device, stream, plan.buffer)
        else:
            buffer = memory.empty((plan.buffer,), (1,), torch.int8)
        buffer_at = buffer.data_ptr()
        q_at = buffer_at + COUNTS_BYTES
        addresses = (
            x_at, weight_at, scale_at, bias_at, other_at, residual_at, out.data_ptr(),
            buffer_at if counts is None else counts.data_ptr(), q_at, q_at + self.q_bytes,
        )  # fmt: skip
        for step in plan.steps:
            by_driver = step.launch.aligned
            if by_driver is None or unusual:
                own_counts, q, q_scale = plan.parts_of(buffer)
                if counts is not None:
                    own_counts = plan.parts[0].of(counts.view(torch.int8))
                weight = weight.view(torch.int8) if self.takes_bytes else weight
                tensors = (rows, weight, weight_scale, bias, other, residual, out)
                step.run((*tensors, own_counts, q, q_scale))
            else:
                by_driver(stream, step.pick(addresses))
        return out


class Way(NamedTuple):
    """How a layer is computed: in one launch, or in two, which overlap or don't."""

    overlaps: bool
    """Of two launches: whether the second may start early."""
    one: Launch | None = None
    private: int = 0
    """Of one launch: how many bytes its programs need to quantize a row each for itself; 0 if they share their rows."""
    in_graphs: bool = False
    """Of one launch whose programs share rows: whether it is for CUDA graphs, too."""


def _make_plan(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    residual: Tensor | None,
) -> LinearPlan:
    (N, K), M = weight.shape, math.prod(x.shape[:-1])
    rows, out, device = x.reshape(M, K), x.new_empty((*x.shape[:-1], N)), x.device.index
    q_bytes = round_up(M * K, ALIGNMENT)
    blocks = cdiv(K, BLOCK) if weight_scale.ndim == 2 else 1
    takes_bytes = weight.dtype == FP8.storage and not device_limits(x.device).multiplies_fp8
    size = COUNTS_BYTES + q_bytes + 4 * M * blocks
    parts = (
        Part(0, (COUNTS_BYTES // 4,), torch.int32),
        Part(COUNTS_BYTES, (M, K), torch.int8 if takes_bytes else weight.dtype),
        Part(COUNTS_BYTES + q_bytes, (M * blocks,), torch.float32),
    )
    given = residual
    if residual is not None:
        residual = with_contiguous_columns(residual.reshape(M, N))
    two = one = LaunchPlan(device, size, parts, ())
    way = Way(overlaps=False)
    if out.numel():
        two, one, way = _add_launches(two, rows, weight, weight_scale, bias, input_scale, residual)
    if way.in_graphs:
        memory.keep_graph_counts(device)
    as_given = given is None or residual is None or residual.data_ptr() == given.data_ptr()
    return LinearPlan(
        device=device,
        one_of_several=torch.cuda.device_count() > 1,
        out_shape=tuple(out.shape),
        out_strides=out.stride(),
        aligned=weight.data_ptr() % ALIGNMENT == 0,
        rows=None if rows.data_ptr() == x.data_ptr() else (M, K),
        residual_rows=None if as_given else (M, N),
        q_bytes=q_bytes,
        usual=one if way.one else two,
        captured=one if way.private else two,
        shares_buffer=way.one is not None,
        counted=one if way.in_graphs else None,
        takes_bytes=takes_bytes,
    )


def _add_launches(
    plan: LaunchPlan,
    rows: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    residual: Tensor | None,
) -> tuple[LaunchPlan, LaunchPlan, Way]:
    """``plan``, which has only its parts, with two launches and with one, if possible; and the way that was chosen."""
    M, N = rows.shape[0], weight.shape[0]
    optional = {"bias": bias, "input_scale": input_scale, "residual": residual}
    absent = {"zero_point", *(name for name, value in optional.items() if value is None)}
    names = Names((*ARGUMENTS, *PARTS, "zero_point"), absent)
    _, q, a_scale = plan.parts_of(rows.new_empty(plan.buffer, dtype=torch.int8))
    scale_stride, group_strides, block_strides = vector_stride(weight_scale, N), None, None
    if weight_scale.ndim == 2:
        groups = a_scale.numel() // M
        a_scale, group_strides = a_scale.view(M, groups), (groups, 1)
        scale_stride, block_strides = weight_scale.stride(0), (1, weight_scale.stride(1))
    product = plan_product(
        q.view(weight.dtype), weight.t(), rows.dtype, a_scale=a_scale, b_scale=weight_scale, bias=bias,
        residual=residual, constant_b=True,
    )  # fmt: skip
    epilogue_strides = scale_stride, vector_stride(bias, N), row_stride(residual)
    way = choose_way(product.config, rows, weight, epilogue_strides, block_strides)
    quantization = quantize.plan_quantization(
        rows, input_scale, next_early=way.overlaps, dtype=weight.dtype, group_strides=group_strides
    )
    two = replace(
        plan, steps=(names.step(quantization, *QUANTIZATION, "zero_point"), names.step(product.launch, *PRODUCT))
    )
    if way.one is None:
        return two, plan, way
    tensors = BOTH if way.private else (*BOTH, "q", "counts")
    buffer = COUNTS_BYTES + way.private if way.private else plan.buffer
    return two, replace(plan, buffer=buffer, steps=(names.step(way.one, *tensors),)), way


def choose_way(
    config: GemmConfig,
    rows: Tensor,
    weight: Tensor,
    epilogue_strides: tuple[int, int, int],
    block_strides: tuple[int, int] | None,
) -> Way:
    """How to compute a layer whose product has ``config``.

    ``epilogue_strides``: the strides of the weight's scale, the bias and the residual. ``block_strides``: those of
    block scales, from one block of K to the next; None without block scales.
    """
    (M, K), N = rows.shape, weight.shape[0]
    limits = device_limits(rows.device)
    if config.schedule == "specialized":
        from qgemm.kernels.gemm import hopper

        overlaps = hopper.starts_early(config, M, N, K, limits)
        if not hopper.in_one_launch(config, M, N, K, limits):
            return Way(overlaps)
        both = hopper.quant_linear_launch(config, rows, weight, epilogue_strides, limits, block_strides)
        return Way(overlaps, both, in_graphs=hopper.in_one_launch(config, M, N, K, limits, in_graphs=True))
    if M == 1 and weight.dtype == INT8.storage and fits_fused_kernel(N, K, rows.itemsize, limits):
        programs = cdiv(N, FUSED_CONFIG.block_n)
        own = round_up(round_up(K, ALIGNMENT) + 4, CACHE_LINE_BYTES)
        vectors = epilogue_strides[:2]
        return Way(True, _fused_launch(rows.stride(1), weight, vectors, programs, own, limits), programs * own)
    return Way(overlaps=M <= MAX_ROWS_TO_OVERLAP)


def fits_fused_kernel(N: int, K: int, itemsize: int, limits: DeviceLimits) -> bool:
    """Whether ``_quant_linear_kernel`` is used for a row of ``K`` values of ``itemsize`` bytes."""
    if not 0 < K * itemsize <= MAX_FUSED_ROW_BYTES:
        return False
    return cdiv(N, FUSED_CONFIG.block_n) <= limits.num_sms and is_valid(FUSED_CONFIG, 1, limits)


def _fused_launch(
    stride_xk: int, weight: Tensor, epilogue_strides: tuple[int, int], programs: int, own: int, limits: DeviceLimits
) -> Launch:
    (N, K), (stride_bn, stride_bk), config = weight.shape, weight.stride(), FUSED_CONFIG
    numbers = (N, K, own, stride_xk, stride_bk, stride_bn, *epilogue_strides)
    block = min(8 * config.num_warps * limits.warp_size, next_power_of_2(K))  # a thread has 8 values of it
    constants = (
        block, cdiv(K, block), config, K % config.block_k == 0, limits.pdl,
    )  # fmt: skip
    return Launch(_quant_linear_kernel, programs, numbers, constants, config.num_warps, config.num_stages, limits.pdl)
