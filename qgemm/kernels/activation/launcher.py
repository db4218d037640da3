"""Launchers of the activation kernels, on GPU tensors, or CPU tensors in Triton's interpreter."""

import torch
from torch import Tensor

from qgemm.kernels.activation.kernels import (
    _activation_backward_kernel,
    _activation_kernel,
    _activation_quantize_kernel,
)
from qgemm.kernels.activations import GatedActivation
from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.quantize import launcher as quantize
from qgemm.kernels.stages.activations import DEVICE_ACTIVATIONS, device_activation
from qgemm.numerics.formats import INT8
from qgemm.numerics.integers import cdiv

MAX_ROW_BYTES = 32_768  # of a row, after the activation, that a program keeps in registers
LONG_ROW_BLOCK = 4096  # values of a longer row that are computed at a time
MAX_VALUES_PER_THREAD = 32  # of a row of up to 4,096 values
BLOCK = 1024  # values per program without quantization


def activation_quantize(
    x: Tensor,
    activation: str,
    gated: bool,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
    prefix: Tensor | None = None,
    up_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """``dispatch.activation_quantize`` on a GPU."""
    columns = x.shape[-1]
    K = (columns // 2 if gated else columns) + (0 if prefix is None else prefix.shape[-1])
    q = x.new_empty((*x.shape[:-1], K), dtype=dtype)
    row_scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if row_scale.numel():
        launch, tensors = find_launch(x, activation, gated, input_scale, q, row_scale, prefix, up_first)
        launch(*tensors)
    return q, row_scale


def find_launch(
    x: Tensor,
    activation: str,
    gated: bool,
    input_scale: Tensor | None,
    q: Tensor,
    row_scale: Tensor,
    prefix: Tensor | None = None,
    up_first: bool = False,
) -> tuple[Launch, tuple[Tensor | None, ...]]:
    """The launch of such a call of ``activation_quantize``, and what to call it with."""
    M, K = row_scale.numel(), q.shape[-1]
    rows = _as_rows(x, M)
    prefixes = None if prefix is None else _as_rows(prefix, M)
    before = (0, 0) if prefixes is None else (prefixes.shape[1], prefixes.stride(0))
    kind = (
        activation_quantize, rows.shape, rows.stride(), rows.dtype, rows.device, activation, gated,
        input_scale is None, q.dtype, prefixes is None, before, up_first,
    )  # fmt: skip
    launch: Launch | None = plans.get(kind)
    if launch is None:
        limits, made, (first, prefix_stride) = device_limits(rows.device), GatedActivation(activation, gated), before
        block, blocks, threads = activated_row_blocks(K, rows.itemsize)
        grid, next_early = quantize.programs(M, limits)
        function, e4m3 = device_activation(activation, rows.itemsize), quantize.rounding(q.dtype, limits)
        constants = (function, made, up_first, block, blocks, limits.pdl, next_early, e4m3)
        numbers, warps = (M, K, first, rows.stride(0), prefix_stride), max(1, threads // limits.warp_size)
        launch = Launch(_activation_quantize_kernel, grid, numbers, constants, num_warps=warps, pdl=limits.pdl)
        plans.keep(kind, launch)
    return launch, (rows, q.view(torch.int8), row_scale, input_scale, prefixes)  # the kernel takes fp8 as bytes


def _as_rows(x: Tensor, M: int) -> Tensor:
    rows = x.reshape(M, x.shape[-1])
    return rows.contiguous() if x.shape[-1] and rows.stride(1) != 1 else rows


def activate(x: Tensor, activation: str, gated: bool, up_first: bool = False) -> Tensor:
    """``dispatch.activate`` on a GPU."""
    columns = x.shape[-1]
    K = columns // 2 if gated else columns
    out = x.new_empty((*x.shape[:-1], K))
    if out.numel():
        launch, tensors = find_plain_launch(x, activation, gated, up_first, out)
        launch(*tensors)
    return out


def find_plain_launch(
    x: Tensor, activation: str, gated: bool, up_first: bool, out: Tensor
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """The launch for such a call of ``activate``, and the tensors to call it with."""
    K = out.shape[-1]
    rows = _as_rows(x, out.shape[:-1].numel())
    kind = (activate, rows.shape, rows.stride(), rows.dtype, rows.device, activation, gated, up_first)
    launch: Launch | None = plans.get(kind)
    if launch is None:
        limits, made = device_limits(rows.device), GatedActivation(activation, gated)
        work = rows.shape[0] * cdiv(K, BLOCK)
        grid, next_early = quantize.programs(work, limits)
        constants = (device_activation(activation, rows.itemsize), made, up_first, BLOCK, limits.pdl, next_early)
        numbers = (work, K, rows.stride(0))
        launch = Launch(_activation_kernel, grid, numbers, constants, num_warps=4, pdl=limits.pdl)
        plans.keep(kind, launch)
    return launch, (rows, out)


def activation_backward(
    h: Tensor, grad: Tensor, factors: Tensor, end: Tensor, activation: GatedActivation, most: int
) -> tuple[Tensor, Tensor]:
    """The gradients of ``(factors * grad * activation(h)).sum()`` for ``h``, in its dtype, and ``factors``.

    ``h``: contiguous, as ``GatedActivation`` takes it, ``[M, columns]``. ``grad``: contiguous ``[M, K]`` in the dtype
    of ``h``. ``factors``: float32 ``[M]``. ``end``: int32 ``[1]``, which holds M. ``most``: at least M; calls of the
    same ``most`` share a launch.
    """
    grad_h, grad_factors = torch.empty_like(h), torch.empty_like(factors)
    if grad_h.numel():
        kind = (activation_backward, most, grad.shape[1], h.dtype, h.device, activation)
        launch: Launch | None = plans.get(kind)
        if launch is None:
            constants = (DEVICE_ACTIVATIONS[activation.name], activation, BLOCK)
            launch = Launch(_activation_backward_kernel, most, (grad.shape[1],), constants, num_warps=4)
            plans.keep(kind, launch)
        launch(h, grad, factors, end, grad_h, grad_factors)
    return grad_h, grad_factors


def activated_row_blocks(K: int, itemsize: int) -> tuple[int, int, int]:
    """``quantize.row_blocks`` for a row of ``K`` values after the activation."""
    block, blocks, threads = quantize.row_blocks(K, itemsize, MAX_ROW_BYTES, LONG_ROW_BLOCK)
    if blocks and (K > 4096 or MAX_VALUES_PER_THREAD * threads < K):
        # With half as many threads, rows of 14,336 took 1.2 times as long on an H200, and 1,536 and 3,072 on an H100.
        block, threads = 2 * block, 2 * threads
        blocks = cdiv(K, block)
    return block, blocks, threads
