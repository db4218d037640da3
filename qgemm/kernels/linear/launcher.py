"""Launcher of ``quant_linear`` on GPU tensors: a row quantization and a product, or both in one, decided once.

All about a call but its addresses follows from the sizes, strides, dtypes and devices of its tensors, and from whether
the weight's address is aligned. So the first call of a kind is checked and leaves a plan behind, and those like it are
two allocations and one or two launches: the quantized rows and their scales share one buffer, which no tensor is made
for. Calls of one launch share the buffer of their stream too: what runs on a stream runs in turn.

One launch takes the host less time than two, which overlap on the device: ``hopper.in_one_launch`` decides
(docs/performance.md has the measurements).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import guards

from qgemm.kernels.checks import check_quant_linear
from qgemm.kernels.gemm import launcher as gemm
from qgemm.kernels.gemm.config import GemmConfig, is_valid
from qgemm.kernels.gemm.launcher import Product, vector_stride
from qgemm.kernels.launch.device import DeviceLimits, device_limits
from qgemm.kernels.launch.launch import ALIGNMENT, Launch, hooked
from qgemm.kernels.linear.kernels import _quant_linear_kernel
from qgemm.kernels.quantize import launcher as quantize


def _empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# On the current device. What the code that torch.compile writes allocates with takes 1.0 us, torch.empty 2.7.
_empty: Callable[..., Tensor] = getattr(guards, "_empty_strided_cuda", _empty_strided)

# What a CUDA graph writes to must be its own: two may run at a time.
_is_capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing

MOST_PLANS = 4096
MOST_STREAMS = 256  # that keep a buffer
CACHE_LINE = 128  # bytes
COUNTS = CACHE_LINE  # bytes, where programs that wait for one another count
MOST_GRAPH_LAUNCHES = 16_384  # of a device, that have counts: 2 MB

# Where there is no kernel of Hopper's, one row takes one launch if it and the weight are short: each program quantizes
# the row, so there may not be more than multiprocessors.
LONGEST_FUSED_ROW = 8192  # bytes
FUSED_CONFIG = GemmConfig(16, 32, 512, num_warps=4, num_stages=6, schedule="tiles")


def quant_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, input_scale: Tensor | None = None
) -> Tensor:
    """``dispatch.quant_linear`` on a GPU, which checks its arguments itself. ``x`` is no negative view."""
    return plan_quant_linear(x, weight, weight_scale, bias, input_scale)(x, weight, weight_scale, bias, input_scale)


def plan_quant_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, input_scale: Tensor | None
) -> Plan:
    """The plan of such a call, checked and made if it is the first."""
    if x.layout is not torch.strided:
        check_quant_linear(x, weight, weight_scale, bias, input_scale)
    kind = (
        x.shape, x.is_contiguous() or x.stride(), x.dtype, x.get_device(),
        weight.shape, weight.is_contiguous() or weight.stride(), weight.dtype, weight.get_device(),
        weight.data_ptr() % ALIGNMENT == 0,
        weight_scale.shape, weight_scale.is_contiguous() or weight_scale.stride(),
        weight_scale.dtype, weight_scale.get_device(),
        None if bias is None else (bias.shape, bias.is_contiguous() or bias.stride(), bias.dtype, bias.get_device()),
        None if input_scale is None else (input_scale.shape, input_scale.dtype, input_scale.get_device()),
    )  # fmt: skip
    plan = _plans.get(kind)
    if plan is None:
        check_quant_linear(x, weight, weight_scale, bias, input_scale)
        plan = _make_plan(x, weight, weight_scale, bias, input_scale)
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[kind] = plan
    return plan


class Plan(NamedTuple):
    """What calls of a kind have in common. They make one launch, ``fused``, or two; none for an empty output.

    Their buffer has ``COUNTS`` bytes of zeros first, then the quantized rows, then their scales.
    """

    device: int
    one_of_several: bool
    """Whether there are other devices, so that another one may be the current one."""
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    aligned: bool
    """Whether it is for weights whose address is a multiple of ``ALIGNMENT``."""
    M: int
    K: int
    rows: tuple[int, int] | None
    """The shape to bring ``x`` to; None where its memory is ``[M, K]`` as it is."""
    q_scale: int
    """Where the scales begin, in bytes from the quantized rows."""
    buffer: int
    """Bytes."""
    counts: bool
    """Whether programs of ``fused`` wait for one another."""
    one_in_graphs: bool
    """Whether ``fused`` is for CUDA graphs too, if programs wait for one another."""
    fused: Launch | None
    quantize_rows: Launch | None
    scaled_mm: Product | None

    def __call__(
        self, x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, input_scale: Tensor | None
    ) -> Tensor:
        """The layer's output for tensors like those that it was made for."""
        if self.one_of_several and self.device != torch._C._cuda_getDevice():
            with torch.cuda.device(self.device):
                return self(x, weight, weight_scale, bias, input_scale)

        rows = x if self.rows is None else x.reshape(self.rows)
        x_at, weight_at, scale_at = rows.data_ptr(), weight.data_ptr(), weight_scale.data_ptr()
        bias_at = 0 if bias is None else bias.data_ptr()
        input_scale_at = 0 if input_scale is None else input_scale.data_ptr()
        # What the launches of a plan by the driver aren't made for.
        unusual = (x_at | weight_at | scale_at | bias_at | input_scale_at) % ALIGNMENT or hooked()
        if unusual and weight_at % ALIGNMENT and self.aligned:
            return quant_linear(x, weight, weight_scale, bias, input_scale)

        out = _empty(self.out_shape, self.out_strides, x.dtype)
        out_at = out.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        # The default stream, 0, is never captured.
        capturing = stream and _is_capturing()
        in_one, counts = self.fused, None
        if capturing and self.counts:
            counts = _counts_for_good(self.device) if self.one_in_graphs else None
            in_one = self.fused if counts is not None else None
        # Between two launches another thread may make its own on this stream.
        own = in_one is None or capturing
        buffer = _empty((self.buffer,), (1,), torch.int8) if own else _shared_buffer(self.device, stream, self.buffer)
        buffer_at = buffer.data_ptr()
        counts_at = buffer_at if counts is None else counts.data_ptr()
        q_at = buffer_at + COUNTS
        q_scale_at = q_at + self.q_scale
        quantization = (x_at, q_at, q_scale_at) if input_scale is None else (x_at, q_at, q_scale_at, input_scale_at)
        product = (weight_at, out_at, scale_at) if bias is None else (weight_at, out_at, scale_at, bias_at)
        if in_one is not None:
            fused = in_one.aligned
            if fused is None or unusual:
                q, q_scale = self.quantized(buffer)
                if counts is None:
                    counts = buffer[:COUNTS].view(torch.int32)
                more = (q, counts) if self.counts else ()
                in_one(rows, q, q_scale, input_scale, weight, out, weight_scale, bias, *more)
            elif self.counts:
                fused(stream, (*quantization, *product, q_at, counts_at))
            else:
                fused(stream, quantization + product)
        elif self.quantize_rows is not None and self.scaled_mm is not None:
            quantize_rows, scaled_mm = self.quantize_rows.aligned, self.scaled_mm.launch.aligned
            if quantize_rows is None or scaled_mm is None or self.scaled_mm.workspace or unusual:
                q, q_scale = self.quantized(buffer)
                self.quantize_rows(rows, q, q_scale, input_scale)
                self.scaled_mm(q, weight.t(), out, q_scale, weight_scale, bias)
            else:
                quantize_rows(stream, quantization)
                scaled_mm(stream, (q_at, *product[:2], q_scale_at, *product[2:]))
        return out

    def quantized(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """The quantized rows and their scales as tensors."""
        q, scale = COUNTS, COUNTS + self.q_scale
        return (
            buffer[q : q + self.M * self.K].view(self.M, self.K),
            buffer[scale : scale + 4 * self.M].view(torch.float32),
        )


_plans: dict[tuple[object, ...], Plan] = {}
_NO_BUFFER = torch.empty(0, dtype=torch.int8)
_shared_buffers: dict[tuple[int, int], Tensor] = {}
"""Of plans with one launch, by device and stream; no larger than the longest rows of those: some megabytes."""


_NO_COUNTS: tuple[Tensor, Iterator[int]] = (_NO_BUFFER, iter(()))
_graph_counts: dict[int, tuple[Tensor, Iterator[int]]] = {}
"""By device, zeros and the indices of those that ``_counts_for_good`` hasn't given out."""


def _shared_buffer(device: int, stream: int, size: int) -> Tensor:
    """Of ``size`` bytes at least. Its first ``COUNTS`` are zeros, but while a kernel runs."""
    buffer = _shared_buffers.get((device, stream), _NO_BUFFER)
    if buffer.numel() < size:
        if len(_shared_buffers) >= MOST_STREAMS:
            _shared_buffers.clear()

        def zeros() -> Tensor:
            with _on_stream(device, stream):
                return _empty((size,), (1,), torch.int8).zero_()

        buffer = _shared_buffers[device, stream] = _for_good(zeros)
    return buffer


def _on_stream(device: int, stream: int) -> AbstractContextManager[None]:
    """Makes it this thread's current stream."""
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device))


def _keep_counts(device: int) -> None:
    """Allocates what ``_counts_for_good`` gives out, the first time. Not in a graph, whose memory it would be."""
    if device not in _graph_counts and not _is_capturing():

        def zeros() -> Tensor:
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                made = torch.zeros(MOST_GRAPH_LAUNCHES, COUNTS // 4, dtype=torch.int32, device=f"cuda:{device}")
            # A graph's stream doesn't wait for this one.
            stream.synchronize()
            return made

        _graph_counts.setdefault(device, (_for_good(zeros), iter(range(MOST_GRAPH_LAUNCHES))))


def _for_good(allocate: Callable[[], Tensor]) -> Tensor:
    """What ``allocate`` gives, called in a thread of its own.

    While ``torch.compile(mode="reduce-overhead")`` warms up a CUDA graph, it has its thread allocate in the graph's
    memory, and takes what is still allocated there afterwards for a leak.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(allocate).result()


def _counts_for_good(device: int) -> Tensor | None:
    """Zeros for a launch that a CUDA graph holds, which nobody else gets; None if there are none left.

    Its own memory won't do: others use that in between. Nor may graphs share zeros: they can run side by side.
    """
    zeros, unused = _graph_counts.get(device, _NO_COUNTS)
    index = next(unused, None)
    return None if index is None else zeros[index]


def _make_plan(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, input_scale: Tensor | None
) -> Plan:
    N, K = weight.shape
    M = math.prod(x.shape[:-1])
    rows = x.reshape(M, K)
    out = x.new_empty((*x.shape[:-1], N))
    q_scale = -(-M * K // ALIGNMENT) * ALIGNMENT
    buffer = COUNTS + q_scale + 4 * M
    plan = Plan(
        x.device.index, torch.cuda.device_count() > 1, tuple(out.shape), out.stride(),
        weight.data_ptr() % ALIGNMENT == 0, M, K, None if rows.data_ptr() == x.data_ptr() else (M, K), q_scale, buffer,
        False, False, None, None, None,
    )  # fmt: skip
    if not out.numel():
        return plan
    limits = device_limits(x.device)
    q, scales = plan.quantized(x.new_empty(buffer, dtype=torch.int8))
    product = gemm.plan(q, weight.t(), scales, weight_scale, bias, None, x.dtype, constant_b=True)
    plan = plan._replace(scaled_mm=product)
    if product.config.schedule == "specialized":
        from qgemm.kernels.gemm import hopper

        early = hopper.starts_early(product.config, M, N, K, limits)
        plan = plan._replace(quantize_rows=quantize.plan(rows, input_scale, next_early=early))
        if hopper.in_one_launch(product.config, M, N, K, limits):
            epilogue_strides = vector_stride(weight_scale, N), vector_stride(bias, N)
            launch = hopper.quant_linear_launch(
                product.config, M, N, K, rows.stride(), weight.stride(0), epilogue_strides, x.dtype, limits
            )
            in_graphs = hopper.in_one_launch(product.config, M, N, K, limits, in_graphs=True)
            if in_graphs:
                _keep_counts(x.device.index)
            return plan._replace(counts=True, one_in_graphs=in_graphs, fused=launch)
        return plan

    early = M <= quantize.MOST_ROWS_TO_OVERLAP
    plan = plan._replace(quantize_rows=quantize.plan(rows, input_scale, next_early=early))
    config = fused_config(N, K, x.itemsize, limits) if M == 1 else None
    if config is None:
        return plan
    part = -(-(buffer - COUNTS) // CACHE_LINE) * CACHE_LINE
    programs = -(-N // config.block_n)
    return plan._replace(
        buffer=COUNTS + part * programs,
        fused=_fused_launch(rows, weight, weight_scale, bias, config, programs, part),
    )


def fused_config(N: int, K: int, itemsize: int, limits: DeviceLimits) -> GemmConfig | None:
    """The config of ``_quant_linear_kernel`` for a row of ``K`` values of ``itemsize`` bytes; None for two launches."""
    if not 0 < K * itemsize <= LONGEST_FUSED_ROW:
        return None
    fits = -(-N // FUSED_CONFIG.block_n) <= limits.num_sms and is_valid(FUSED_CONFIG, 1, limits)
    return FUSED_CONFIG if fits else None


def _fused_launch(
    row: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, config: GemmConfig, programs: int, part: int
) -> Launch:
    N, K = weight.shape
    stride_bn, stride_bk = weight.stride()
    limits = device_limits(row.device)
    numbers = (
        N, K, part,
        row.stride(1), stride_bk, stride_bn, vector_stride(weight_scale, N), vector_stride(bias, N),
    )  # fmt: skip
    constants = (
        *row_blocks(K, config.num_warps * limits.warp_size),
        config, K % config.block_k == 0, limits.pdl,
    )  # fmt: skip
    return Launch(_quant_linear_kernel, programs, numbers, constants, config.num_warps, config.num_stages, limits.pdl)


def row_blocks(K: int, threads: int) -> tuple[int, int]:
    """``(ROW_BLOCK, ROW_BLOCKS)`` of ``_quant_linear_kernel``: a thread has 8 values of a block."""
    block = min(8 * threads, 1 << (K - 1).bit_length())
    return block, -(-K // block)
