"""Launcher of the norm kernel: ``norm_quantize``, ``add_norm_quantize``, ``add_norm``, ``post_norm`` and
``post_norm_quantize`` on GPU tensors, or CPU tensors in Triton's interpreter.

They are one kernel with different parts left out, so a row has the same bits in all of them.
"""

import torch
from torch import Tensor

from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.norm.kernels import _norm_kernel
from qgemm.kernels.norms import Norm, of_samples
from qgemm.kernels.quantize import launcher as quantize
from qgemm.numerics.formats import INT8
from qgemm.numerics.integers import cdiv, next_power_of_2

MAX_ROW_BYTES = 32_768  # of a row that a program holds in registers; PyTorch normalizes longer ones

Vectors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""The branch's weight or its gate, and weight and bias of the norm of the sum."""


def norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
) -> tuple[Tensor, Tensor]:
    """``dispatch.norm_quantize`` on a GPU."""
    if not _is_held(x):
        return quantize.quantize_rows(norm(x, weight, bias), input_scale, dtype=dtype)
    q, row_scale = _empty_rows(x, dtype)
    _run(x, None, (None, None, weight, bias), norm, (None, None, q, row_scale), input_scale)
    return q, row_scale


def add_norm_quantize(
    x: Tensor,
    residual: Tensor,
    branch_weight: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dispatch.add_norm_quantize`` on a GPU."""
    if not _is_held(x):
        total, normed = _add_norm_by_torch(x, residual, (branch_weight, gate, weight, bias), norm)
        return total, *quantize.quantize_rows(normed, input_scale, dtype=dtype)
    total, (q, row_scale) = x.new_empty(x.shape), _empty_rows(x, dtype)
    _run(x, residual, (branch_weight, gate, weight, bias), norm, (total, None, q, row_scale), input_scale)
    return total, q, row_scale


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    branch_weight: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``dispatch.add_norm`` on a GPU."""
    vectors = branch_weight, gate, weight, bias
    if not _is_held(x):
        return _add_norm_by_torch(x, residual, vectors, norm)
    total = None if residual is None and branch_weight is None and gate is None else x.new_empty(x.shape)
    normed = None if weight is None else x.new_empty(x.shape)
    if total is not None or normed is not None:
        _run(x, residual, vectors, norm, (total, normed, None, None), None)
    total = x if total is None else total
    return total, total if normed is None else normed


def post_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
) -> Tensor:
    """``dispatch.post_norm`` on a GPU."""
    if not _is_held(x):
        return _add_norm_by_torch(x, residual, (None, None, weight, bias), norm)[1]
    normed = x.new_empty(x.shape)
    _run(x, residual, (None, None, weight, bias), norm, (None, normed, None, None), None)
    return normed


def post_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dispatch.post_norm_quantize`` on a GPU."""
    if not _is_held(x):
        normed = post_norm(x, residual, weight, bias, norm)
        return normed, *quantize.quantize_rows(normed, input_scale, dtype=dtype)
    normed, (q, row_scale) = x.new_empty(x.shape), _empty_rows(x, dtype)
    _run(x, residual, (None, None, weight, bias), norm, (None, normed, q, row_scale), input_scale)
    return normed, q, row_scale


def _is_held(x: Tensor) -> bool:
    """Whether a program can hold a row."""
    return 0 < x.shape[-1] * x.itemsize <= MAX_ROW_BYTES


@torch.no_grad()
def _add_norm_by_torch(x: Tensor, residual: Tensor | None, vectors: Vectors, norm: Norm) -> tuple[Tensor, Tensor]:
    branch_weight, gate, weight, bias = vectors
    total = x if branch_weight is None else norm(x, branch_weight)
    total = total if gate is None else total * of_samples(gate, x)
    if residual is not None:
        total = residual + total
    total = total.to(x.dtype)
    return total, total if weight is None else norm(total, weight, bias)


def _empty_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _run(
    x: Tensor,
    residual: Tensor | None,
    vectors: Vectors,
    norm: Norm,
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    scale: Tensor | None,
) -> None:
    """The kernel. ``outputs``: total, normed, q and row_scale."""
    if x.numel():
        launch, tensors = find_launch(x, residual, vectors, norm, outputs, scale)
        launch(*tensors)


def find_launch(
    x: Tensor,
    residual: Tensor | None,
    vectors: Vectors,
    norm: Norm,
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    scale: Tensor | None,
) -> tuple[Launch, tuple[Tensor | None, ...]]:
    """The launch of such a call, and what to call it with."""
    K = x.shape[-1]
    rows = x.reshape(-1, K)
    residuals = None if residual is None else residual.reshape(-1, K)
    vectors, vector_stride = _with_one_stride(vectors)
    (_, gate, weight, _), (total, normed, q, row_scale) = vectors, outputs
    dtype = INT8.storage if q is None else q.dtype
    samples = _samples_of(weight), _samples_of(gate), vector_stride
    kind = (
        _run, rows.shape, rows.stride(), rows.dtype, rows.device, None if residuals is None else residuals.stride(),
        *[None if each is None else each.dtype for each in vectors], *[each is None for each in (*outputs, scale)],
        *samples, norm, dtype,
    )  # fmt: skip
    launch: Launch | None = plans.get(kind)
    if launch is None:
        launch = plans.keep(kind, _make_launch(rows, residuals, *samples, norm, dtype))
    # The kernel gets fp8 as bytes.
    q = None if q is None else q.view(torch.int8)
    return launch, (rows, residuals, *vectors, total, normed, q, row_scale, scale)


def _with_one_stride(vectors: Vectors) -> tuple[Vectors, int]:
    """``vectors`` with contiguous values, and the stride between the samples of those that have a row for each."""
    given = [each for each in vectors if each is not None]
    strides = {each.stride(0) for each in given if each.ndim == 2 and each.shape[0] > 1}
    if len(strides) > 1 or any(each.stride(-1) != 1 for each in given):
        vectors = tuple(each if each is None else each.contiguous() for each in vectors)  # type: ignore[assignment]
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
    dtype: torch.dtype,
) -> Launch:
    (M, K), limits = rows.shape, device_limits(rows.device)
    vector_rows = M // max(by_sample, gated, 1)
    block, blocks, threads = row_blocks(K, rows.itemsize)
    grid, next_early = quantize.programs(M, limits)
    numbers = (M, K, vector_rows, vector_stride, *rows.stride(), *((0, 0) if residuals is None else residuals.stride()))
    constants = (norm, by_sample > 0, block, blocks, limits.pdl, next_early, quantize.rounding(dtype, limits))
    warps = max(1, threads // limits.warp_size)
    return Launch(_norm_kernel, grid, numbers, constants, num_warps=warps, pdl=limits.pdl)


def row_blocks(K: int, itemsize: int) -> tuple[int, int, int]:
    """``(BLOCK, BLOCKS, threads)``, as in ``quantize.row_blocks``. A thread has 16 bytes of a block.

    With more, the compiler would have a choice between the layout in which it reads floats and that in which it writes
    int8 values. Which values a thread adds up would then differ between the functions of this file, and with it a sum's
    last bit.
    """
    _, _, threads = quantize.row_blocks(K, itemsize, MAX_ROW_BYTES, 0)
    block = min(16 // itemsize * threads, next_power_of_2(K))
    return block, cdiv(K, block), threads
