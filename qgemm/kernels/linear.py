"""Launcher of ``quant_linear`` on GPU tensors: a row quantization and a product, decided together once.

All about a call but its addresses follows from the sizes, strides, dtypes and devices of its tensors, and from whether
the weight's address is aligned. So the first call of a kind is checked and leaves a plan behind, and those like it are
two allocations and two launches: the quantized rows and their scales share one buffer, which no tensor is made for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import guards

from qgemm.kernels import gemm, quantize
from qgemm.kernels.dispatch import check_quant_linear
from qgemm.kernels.gemm import Product
from qgemm.kernels.launch import ALIGNMENT, Launch, hooked


def _empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# On the current device. What the code that torch.compile writes allocates with takes 1.0 us, torch.empty 2.7.
_empty: Callable[..., Tensor] = getattr(guards, "_empty_strided_cuda", _empty_strided)

MOST_PLANS = 4096


def quant_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, input_scale: Tensor | None = None
) -> Tensor:
    """``dispatch.quant_linear`` on a GPU, which checks its arguments itself. ``x`` is no negative view."""
    if x.layout is not torch.strided:
        check_quant_linear(x, weight, weight_scale, bias, input_scale)
    weight_at = weight.data_ptr()
    kind = (
        x.shape, x.stride(), x.dtype, x.device,
        weight.shape, weight.stride(), weight.dtype, weight.device, weight_at % ALIGNMENT == 0,
        weight_scale.shape, weight_scale.stride(), weight_scale.dtype, weight_scale.device,
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device),
        None if input_scale is None else (input_scale.shape, input_scale.dtype, input_scale.device),
    )  # fmt: skip
    plan = _plans.get(kind)
    if plan is None:
        check_quant_linear(x, weight, weight_scale, bias, input_scale)
        plan = _make_plan(x, weight, weight_scale, bias, input_scale)
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[kind] = plan
    if plan.device != torch._C._cuda_getDevice():
        with torch.cuda.device(plan.device):
            return quant_linear(x, weight, weight_scale, bias, input_scale)

    out = _empty(plan.out_shape, plan.out_strides, x.dtype)
    if plan.quantize_rows is None or plan.scaled_mm is None:
        return out
    rows = x if plan.rows is None else x.reshape(plan.rows)
    buffer = _empty((plan.buffer,), (1,), torch.int8)

    x_at, scale_at = rows.data_ptr(), weight_scale.data_ptr()
    bias_at = 0 if bias is None else bias.data_ptr()
    input_scale_at = 0 if input_scale is None else input_scale.data_ptr()
    quantize_rows, scaled_mm = plan.quantize_rows.aligned, plan.scaled_mm.launch.aligned
    unaligned = (x_at | weight_at | scale_at | bias_at | input_scale_at) % ALIGNMENT
    if quantize_rows is None or scaled_mm is None or plan.scaled_mm.workspace or unaligned or hooked():
        # The first call, and any that is out of the ordinary.
        values, scales = plan.quantized(buffer)
        plan.quantize_rows(rows, values, scales, input_scale)
        plan.scaled_mm(values, weight.t(), out, scales, weight_scale, bias)
        return out
    stream = torch._C._cuda_getCurrentRawStream(plan.device)
    q = buffer.data_ptr()
    row_scale = q + plan.row_scale
    product = (q, weight_at, out.data_ptr(), row_scale, scale_at)
    quantize_rows(stream, (x_at, q, row_scale) if input_scale is None else (x_at, q, row_scale, input_scale_at))
    scaled_mm(stream, product if bias is None else (*product, bias_at))
    return out


class _Plan(NamedTuple):
    """What calls of a kind have in common. The launches are None where the output is empty."""

    device: int
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    M: int
    K: int
    rows: tuple[int, int] | None
    """The shape to bring ``x`` to; None where its memory is ``[M, K]`` as it is."""
    row_scale: int
    """Where the scales begin in the buffer, in bytes; the quantized rows are at 0."""
    buffer: int
    """Bytes."""
    quantize_rows: Launch | None
    scaled_mm: Product | None

    def quantized(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """The quantized rows and their scales as tensors."""
        q = buffer[: self.M * self.K].view(self.M, self.K)
        return q, buffer[self.row_scale :].view(torch.float32)


_plans: dict[tuple[object, ...], _Plan] = {}


def _make_plan(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, input_scale: Tensor | None
) -> _Plan:
    N, K = weight.shape
    M = math.prod(x.shape[:-1])
    rows = x.reshape(M, K)
    out = x.new_empty((*x.shape[:-1], N))
    row_scale = -(-M * K // ALIGNMENT) * ALIGNMENT
    buffer = row_scale + 4 * M
    plan = _Plan(
        x.device.index, tuple(out.shape), out.stride(), M, K,
        None if rows.data_ptr() == x.data_ptr() else (M, K), row_scale, buffer, None, None,
    )  # fmt: skip
    if not out.numel():
        return plan
    q, scales = plan.quantized(x.new_empty(buffer, dtype=torch.int8))
    return plan._replace(
        quantize_rows=quantize.plan(rows, input_scale),
        scaled_mm=gemm.plan(q, weight.t(), scales, weight_scale, bias, None, x.dtype),
    )
