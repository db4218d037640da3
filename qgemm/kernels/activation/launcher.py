"""Launchers of the activation kernels, on GPU tensors, or CPU tensors in Triton's interpreter."""

import torch
from torch import Tensor

from qgemm.kernels.activation.kernels import _activation_kernel, _activation_quantize_kernel
from qgemm.kernels.activations import GatedActivation
from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.quantize import launcher as quantize
from qgemm.kernels.stages.activations import DEVICE_ACTIVATIONS
from qgemm.numerics.formats import INT8
from qgemm.numerics.integers import cdiv

MAX_ROW_BYTES = 32_768  # of a row, after the activation, that a program keeps in registers
LONG_ROW_BLOCK = 4096  # values of a longer row that are computed at a time
BLOCK = 1024  # values per program without quantization


def activation_quantize(
    x: Tensor, activation: str, gated: bool, input_scale: Tensor | None = None, dtype: torch.dtype = INT8.storage
) -> tuple[Tensor, Tensor]:
    """``dispatch.activation_quantize`` on a GPU."""
    columns = x.shape[-1]
    K = columns // 2 if gated else columns
    q = x.new_empty((*x.shape[:-1], K), dtype=dtype)
    row_scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if row_scale.numel():
        rows = x.reshape(row_scale.numel(), columns)
        if columns and rows.stride(1) != 1:
            rows = rows.contiguous()
        launch = _plan(rows, K, GatedActivation(activation, gated), input_scale, dtype)
        launch(rows, q.view(torch.int8), row_scale, input_scale)  # the kernel gets fp8 as bytes
    return q, row_scale


def _plan(rows: Tensor, K: int, activation: GatedActivation, scale: Tensor | None, dtype: torch.dtype) -> Launch:
    kind = (activation_quantize, rows.shape, rows.stride(), rows.dtype, rows.device, activation, scale is None, dtype)
    launch: Launch | None = plans.get(kind)
    if launch is None:
        limits = device_limits(rows.device)
        block, blocks, threads = activated_row_blocks(K, rows.itemsize)
        grid, next_early = quantize.programs(rows.shape[0], limits)
        function, e4m3 = DEVICE_ACTIVATIONS[activation.name], quantize.rounding(dtype, limits)
        constants = (function, activation, block, blocks, limits.pdl, next_early, e4m3)
        numbers, warps = (rows.shape[0], K, rows.stride(0)), max(1, threads // limits.warp_size)
        made = Launch(_activation_quantize_kernel, grid, numbers, constants, num_warps=warps, pdl=limits.pdl)
        launch = plans.keep(kind, made)
    return launch


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """``dispatch.activate`` on a GPU."""
    columns = x.shape[-1]
    K = columns // 2 if gated else columns
    out = x.new_empty((*x.shape[:-1], K))
    if out.numel():
        rows = x.reshape(-1, columns)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        kind = (activate, rows.shape, rows.stride(), rows.dtype, rows.device, activation, gated)
        launch: Launch | None = plans.get(kind)
        if launch is None:
            limits, made = device_limits(rows.device), GatedActivation(activation, gated)
            work = rows.shape[0] * cdiv(K, BLOCK)
            grid, next_early = quantize.programs(work, limits)
            constants = (DEVICE_ACTIVATIONS[activation], made, BLOCK, limits.pdl, next_early)
            numbers = (work, K, rows.stride(0))
            launch = Launch(_activation_kernel, grid, numbers, constants, num_warps=4, pdl=limits.pdl)
            plans.keep(kind, launch)
        launch(rows, out)
    return out


def activated_row_blocks(K: int, itemsize: int) -> tuple[int, int, int]:
    """``quantize.row_blocks`` for a row of ``K`` values after the activation."""
    block, blocks, threads = quantize.row_blocks(K, itemsize, MAX_ROW_BYTES, LONG_ROW_BLOCK)
    if blocks and K > 4096:
        # Gates and ups are read: with half as many threads, rows of 14,336 took 1.2 times as long on an H200.
        block, threads = 2 * block, 2 * threads
        blocks = cdiv(K, block)
    return block, blocks, threads
