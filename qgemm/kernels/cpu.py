"""The kernels' functions on the CPU: the numbers of ``reference.py``, at the speed of oneDNN. Here are the products.

Integer products go through ``torch._int_mm``, which uses a CPU's int8 dot product instructions. On processors without
them it saturates at 16 bits, or is a plain loop that takes 25 to 40 times as long as a float32 product. One product,
computed once per process, shows whether that is so. If it is, sums are made of float32 products short enough to be
exact, and a layer takes about as long as a float32 one. fp8 operands are multiplied in float32 everywhere.
"""

import functools
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from qgemm.device import one_thread
from qgemm.kernels.activations import ACTIVATIONS
from qgemm.kernels.cpu_rows import (  # noqa: F401
    VALUES_AT_A_TIME,
    activate,
    activation_quantize,
    as_rows,
    blocks_of,
    norm_rows,
    of_all_threads,
    quantize_block,
    quantize_groups,
    quantize_rows,
    without_grad,
)
from qgemm.kernels.routing import Routing
from qgemm.numerics.blocks import BLOCK
from qgemm.numerics.formats import INT8
from qgemm.numerics.groups import spread
from qgemm.numerics.integers import cdiv

# 2^24 / (128 * 128): float32 holds a sum of this many int8 products exactly.
_EXACT_K = 1024
_SUMS_AT_A_TIME = 2**20
_ROWS_OF_A_PRODUCT = 128  # the minimum: oneDNN rearranges the weight for each product


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """``dispatch.int_mm`` on the CPU."""
    if not has_int8_products():
        return _float_sums(a, b).to(torch.int32)
    if 0 in (*a.shape, *b.shape):
        return a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.int32)
    return torch._int_mm(_plain(a), _plain(b))


@without_grad
def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    constant_b: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """``dispatch.scaled_mm`` on the CPU, where it makes no difference whether ``b`` is constant."""
    return _multiply(a, b, a_scale.reshape(-1, 1), b_scale, bias, out_dtype, residual)


@without_grad
def multiply(
    q: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    residual: Tensor | None = None,
) -> Tensor:
    """``dispatch.multiply`` on the CPU, for ``q [..., K]`` and ``row_scale [...]``."""
    return _multiply(q, weight.t(), row_scale[..., None], weight_scale, bias, out_dtype, residual)


@without_grad
def quant_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """``dispatch.quant_linear`` on the CPU.

    Whatever few rows don't need is left out: a call of an operator takes as long as those rows.
    """
    if 0 < x.numel() <= of_all_threads(VALUES_AT_A_TIME):
        q, row_scale = quantize_block(x, input_scale, None, weight.dtype)
        return _multiply(q, weight.t(), row_scale, weight_scale, bias, x.dtype, residual)
    q, row_scale = quantize_rows(x, input_scale, dtype=weight.dtype)
    return multiply(q, row_scale, weight, weight_scale, bias, x.dtype, residual)


def _multiply(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    residual: Tensor | None,
) -> Tensor:
    """``out_dtype [..., N]`` from ``a [..., K]`` and ``b [K, N]``. ``a_scale``: ``[..., 1]``, or one number."""
    *leading, K = a.shape
    M, N = math.prod(leading), b.shape[1]
    rows = a if a.ndim == 2 else a.view(M, K)
    # No output is a view: autograd would forbid changing it in place.
    at_a_time = of_all_threads(_SUMS_AT_A_TIME)
    if at_a_time >= M * N or M <= _ROWS_OF_A_PRODUCT:
        sums = _sums(rows, b)
        return _scaled(sums if a.ndim == 2 else sums.view(*leading, N), a_scale, b_scale, bias, out_dtype, residual)
    out = a.new_empty((*leading, N), dtype=out_dtype)
    out_rows, scales = out.view(M, N), a_scale.reshape(-1, 1)
    residual = None if residual is None else as_rows(residual)
    for block in blocks_of(M, N, at_a_time, _ROWS_OF_A_PRODUCT):
        scale = scales if scales.shape[0] == 1 else scales[block]
        added = None if residual is None else residual[block]
        out_rows[block] = _scaled(_sums(rows[block], b), scale, b_scale, bias, out_dtype, added)
    return out


@without_grad
def block_scaled_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """``dispatch.block_scaled_linear`` on the CPU."""
    (N, K), M = weight.shape, math.prod(x.shape[:-1])
    q, scale = quantize_groups(x)
    # Each value times its own scale: the float32 product is the sum of the scaled sums, except for the order of
    # rounding.
    rows = q.view(M, K).float().mul_(spread(scale.view(M, cdiv(K, BLOCK)), BLOCK, K))
    out = x.new_empty((*x.shape[:-1], N))
    flat = out.view(M, N)
    for block, columns in enumerate(spread(weight_scale, BLOCK, K)):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        made = _mm(rows, (weight[part].float() * columns).t())
        if bias is not None:
            made.add_(bias[part])
        flat[:, part] = made
    return out


def _sums(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, exact for int8: in int32, or in float32 as by ``_float_sums``."""
    return int_mm(a, b) if a.dtype == INT8.storage and has_int8_products() else _float_sums(a, b)


def _float_sums(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` by float32 products, in float32. Exact for int8, and in int32 if K is too long for float32.

    Some columns of ``b`` are converted to floats at a time and stay in cache until they are multiplied.
    """
    (M, K), N = a.shape, b.shape[1]
    rows = a.float()
    if a.dtype != INT8.storage or K <= _EXACT_K:
        out = a.new_empty((M, N), dtype=torch.float32)
        for part in blocks_of(N, K, VALUES_AT_A_TIME):
            out[:, part] = _mm(rows, b[:, part].float())
        return out
    out = a.new_zeros((M, N), dtype=torch.int32)
    for part in blocks_of(N, _EXACT_K, VALUES_AT_A_TIME):
        for start in range(0, K, _EXACT_K):
            piece = slice(start, start + _EXACT_K)
            out[:, part] += _mm(rows[:, piece], b[piece, part].float()).to(torch.int32)
    return out


def _mm(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):
        return torch.mm(a, b)


def _scaled(
    sums: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    residual: Tensor | None,
) -> Tensor:
    out = sums.mul(a_scale) if sums.dtype == torch.float32 else sums.float().mul_(a_scale)  # not a view of the sums
    out.mul_(b_scale)
    if bias is not None:
        out.add_(bias)
    if out_dtype != torch.float32:
        out = out.to(out_dtype)
    return out if residual is None else out.add_(residual)


@torch.no_grad()
@torch.autocast("cpu", enabled=False)
def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``dispatch.matmul`` on the CPU."""
    out = torch.mm(a.float(), b.float())
    if bias is not None:
        out.add_(bias.float())
    if activation is not None:
        out = ACTIVATIONS[activation](out)
    return out.to(out_dtype or a.dtype)


@without_grad
def grouped_mm(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``dispatch.grouped_mm`` on the CPU."""
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    start = 0
    for group, end in enumerate(offsets.tolist()):
        end = min(max(start, end), a.shape[0])
        if end > start:
            rows = slice(start, end)
            group_bias = None if bias is None else bias[group]
            out[rows] = scaled_mm(a[rows], b[group].t(), a_scale[rows], b_scale[group], group_bias, out_dtype)
        start = end
    out[start:] = 0
    return out


@without_grad
def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``dispatch.route`` on the CPU."""
    return routing(logits, bias)


@functools.cache
def has_int8_products() -> bool:
    """Whether int8 products are exact and faster than float32 ones on this CPU; tested once per process.

    ``torch._int_mm`` must compute the largest sums correctly, which saturating instructions can't, and in less than
    twice the time of float32 products. The results are the same either way.
    """
    a = torch.full((64, 256), -128, dtype=torch.int8, device="cpu")
    a[1::2] = 127
    integers, floats = (functools.partial(product, a, a.t()) for product in (torch._int_mm, _float_sums))
    with one_thread():  # several threads on busy cores would wait for each other
        return torch.equal(integers().float(), floats()) and _seconds(integers) < 2 * _seconds(floats)


def _seconds(function: Callable[[], object]) -> float:
    """The minimum of three timings."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def _plain(t: Tensor) -> Tensor:
    """``t``, copied unless it is row-major or column-major.

    ``torch._int_mm`` returns garbage for some other strides: an expanded operand, or a single row with strides (1, 1).
    """
    rows, cols = t.shape
    row_stride, col_stride = t.stride()
    if (col_stride == 1 and row_stride >= cols) or (row_stride == 1 and col_stride >= max(rows, 2)):
        return t
    return t.clone(memory_format=torch.contiguous_format)
