"""Launcher of the norm kernel: ``norm_rows`` computes all functions of ``dispatch`` with a norm on GPU tensors, or on
CPU tensors in Triton's interpreter.

They are one kernel with different parts left out, so a row has the same bits in all of them.
"""

import torch
from torch import Tensor

from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.norm.kernels import _norm_kernel
from qgemm.kernels.norms import Norm, NormCall, NormOutputs
from qgemm.kernels.quantize import launcher as quantize
from qgemm.numerics.formats import INT8
from qgemm.numerics.integers import cdiv, next_power_of_2

MAX_ROW_BYTES = 32_768  # of a row that a program holds in registers; PyTorch normalizes longer ones


def norm_rows(call: NormCall, total: bool = False, normed: bool = False) -> NormOutputs:
    """The functions of ``dispatch`` with a norm on a GPU: the floats that are wanted, and rows of ``call.dtype``."""
    x, dtype = call.x, call.dtype
    if not 0 < x.shape[-1] * x.itemsize <= MAX_ROW_BYTES:
        return _by_torch(call)
    outputs = (
        x.new_empty(x.shape) if total else None,
        x.new_empty(x.shape) if normed else None,
        None if dtype is None else x.new_empty(x.shape, dtype=dtype),
        None if dtype is None else x.new_empty(x.shape[:-1], dtype=torch.float32),
    )
    if x.numel() and (total or normed or dtype is not None):
        launch, tensors = find_launch(call, outputs)
        launch(*tensors)
    return outputs


@torch.no_grad()
def _by_torch(call: NormCall) -> NormOutputs:
    """As ``norm_rows``, for rows that no program can hold; all floats are made anyway."""
    total, dtype = call.total(), call.dtype
    normed = total if call.weight is None else call.norm(total, call.weight, call.bias)
    rows = (None, None) if dtype is None else quantize.quantize_rows(normed, call.input_scale, dtype=dtype)
    return total, normed, *rows


def find_launch(call: NormCall, outputs: NormOutputs) -> tuple[Launch, tuple[Tensor | None, ...]]:
    """The launch of such a call, and what to call it with."""
    x, residual, *vectors, norm, scale, _, factor, total_factor = call
    K = x.shape[-1]
    rows = x.reshape(-1, K)
    residuals = None if residual is None else residual.reshape(-1, K)
    vectors, vector_stride = _with_one_stride(vectors)
    (_, gate, weight, _), (total, normed, q, row_scale) = vectors, outputs
    dtype = INT8.storage if q is None else q.dtype
    samples = _samples_of(weight), _samples_of(gate), vector_stride
    arithmetic = norm, factor, dtype
    kind = (
        norm_rows, rows.shape, rows.stride(), rows.dtype, rows.device,
        None if residuals is None else residuals.stride(), *[None if each is None else each.dtype for each in vectors],
        *[each is None for each in (*outputs, scale, total_factor)], *samples, *arithmetic,
    )  # fmt: skip
    launch: Launch | None = plans.get(kind)
    if launch is None:
        launch = plans.keep(kind, _make_launch(rows, residuals, *samples, *arithmetic))
    # The kernel gets fp8 as bytes.
    q = None if q is None else q.view(torch.int8)
    return launch, (rows, residuals, *vectors, total, normed, q, row_scale, scale, total_factor)


def _with_one_stride(vectors: list[Tensor | None]) -> tuple[list[Tensor | None], int]:
    """``vectors`` with contiguous values, and the stride between the samples of those that have a row for each."""
    _, gate, weight, _ = vectors
    if gate is not None and gate.ndim == 1 and weight is not None and weight.ndim == 2:
        vectors = [vectors[0], gate.expand(weight.shape), *vectors[2:]]
    given = [each for each in vectors if each is not None]
    strides = {each.stride(0) for each in given if each.ndim == 2 and each.shape[0] > 1}
    if len(strides) > 1 or any(each.stride(-1) != 1 for each in given):
        vectors = [each if each is None else each.contiguous() for each in vectors]
        strides = {given[0].shape[-1]}
    return vectors, strides.pop() if strides else 0


def _samples_of(vectors: Tensor | None) -> int:
    """How many samples have vectors of their own; 0 if all have the same, or none."""
    return 0 if vectors is None or vectors.ndim == 1 else vectors.shape[0]


def _make_launch(
    rows: Tensor,
    residuals: Tensor | None,
    by_sample: int,
    gated: int,
    vector_stride: int,
    norm: Norm,
    factor: float,
    dtype: torch.dtype,
) -> Launch:
    (M, K), limits = rows.shape, device_limits(rows.device)
    vector_rows = M // max(by_sample, gated, 1)
    block, blocks, threads = row_blocks(K, rows.itemsize)
    grid, next_early = quantize.programs(M, limits)
    numbers = (M, K, vector_rows, vector_stride, *rows.stride(), *((0, 0) if residuals is None else residuals.stride()))
    constants = (norm, factor, by_sample > 0, block, blocks, limits.pdl, next_early, quantize.rounding(dtype, limits))
    warps = max(1, threads // limits.warp_size)
    # Such rows are read value by value. ptxas would rather spill than have a program less on an SM, but not on Hopper.
    registers = 255 if K % 16 and limits.warp_size == 32 and not limits.hopper else None
    return Launch(_norm_kernel, grid, numbers, constants, num_warps=warps, pdl=limits.pdl, max_registers=registers)


def row_blocks(K: int, itemsize: int) -> tuple[int, int, int]:
    """``(BLOCK, BLOCKS, threads)``, as in ``quantize.row_blocks``. A thread has 16 bytes of a block.

    With more, the compiler would have a choice between the layout in which it reads floats and that in which it writes
    int8 values. Which values a thread adds up would then differ between the functions of this file, and with it a sum's
    last bit.
    """
    _, _, threads = quantize.row_blocks(K, itemsize, MAX_ROW_BYTES, 0)
    block = min(16 // itemsize * threads, next_power_of_2(K))
    return block, cdiv(K, block), threads
