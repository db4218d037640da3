"""The kernels' functions on the CPU: the numbers of ``reference.py``, at the speed of oneDNN.

Integer products go through ``torch._int_mm``, which uses a CPU's int8 dot product instructions. On processors without
them it saturates at 16 bits, or is a plain loop that takes 25 to 40 times as long as a float32 product. One product,
computed once per process, shows whether that is so. If it is, sums are made of float32 products short enough to be
exact, and a layer takes about as long as a float32 one. fp8 operands are multiplied in float32 everywhere.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from qgemm.device import one_thread
from qgemm.kernels.activations import ACTIVATIONS, activated
from qgemm.kernels.norms import Norm, of_samples
from qgemm.kernels.routing import Routing
from qgemm.numerics.blocks import BLOCK
from qgemm.numerics.formats import FP8, INT8, MIN_SCALE, OPERANDS
from qgemm.numerics.groups import grouped, spread
from qgemm.numerics.integers import cdiv

P = ParamSpec("P")
T = TypeVar("T")

# 2^24 / (128 * 128): float32 holds a sum of this many int8 products exactly.
_EXACT_K = 1024
# Blocks of rows: a block's temporaries stay in cache and take little memory. Yet there are few blocks, since a call of
# an operator costs as much as some thousand values.
_VALUES_AT_A_TIME = 2**19
_SUMS_AT_A_TIME = 2**20
_ROWS_OF_A_PRODUCT = 128  # the minimum: oneDNN rearranges the weight for each product
_FEW = 2**16

# glibc returns free memory at the end of its heap to the system beyond twice the size of the largest block that was
# freed so far, and each page that is allocated again costs 1 us. After a block of 31 MB, of which no page is touched,
# it keeps 62 MB.
torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


def without_grad(function: Callable[P, T]) -> Callable[P, T]:
    """``torch.no_grad()``, but only where gradients are on: it takes longer than an operator."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return run


def by_sample(place: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """For functions of ``x``, maybe a residual, and a norm: argument ``place`` is its weight, and its bias follows.

    If these have a row for each sample, samples are computed one after another.
    """

    def of(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            weight: Any = args[place]
            if weight is None or weight.ndim == 1 or not weight.numel():
                return function(*args, **kwargs)
            made: Any = [
                function(*(_of_sample(arg, b, at in (place, place + 1)) for at, arg in enumerate(args)))  # type: ignore[call-arg, arg-type]
                for b in range(weight.shape[0])
            ]
            is_one = isinstance(made[0], Tensor)
            return torch.cat(made) if is_one else tuple(map(torch.cat, zip(*made, strict=True)))  # type: ignore[return-value]

        return run

    return of


def _of_sample(argument: Any, sample: int, is_vector: bool) -> Any:
    if not isinstance(argument, Tensor) or argument.ndim < 2:
        return argument
    return argument[sample] if is_vector else argument[sample : sample + 1]


@without_grad
def quantize_rows(
    x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None, dtype: torch.dtype = INT8.storage
) -> tuple[Tensor, Tensor]:
    """``dispatch.quantize_rows`` on the CPU, a few rows at a time: temporaries stay in cache and take little memory."""
    return _quantize(lambda x: x, (x,), x.shape[-1], scale, zero_point, dtype)


@without_grad
def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """``dispatch.quantize_groups`` on the CPU."""
    q, scale = quantize_rows(grouped(_rows(x), BLOCK), dtype=FP8.storage)
    return q.flatten(1)[:, : x.shape[-1]].reshape(x.shape).contiguous(), scale.view(*x.shape[:-1], scale.shape[1])


@without_grad
@by_sample(1)
def norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
) -> tuple[Tensor, Tensor]:
    """``dispatch.norm_quantize`` on the CPU."""
    return _quantize(lambda x: norm(x, weight, bias), (x,), x.shape[-1], input_scale, dtype=dtype)


@without_grad
def activation_quantize(
    x: Tensor,
    activation: str,
    gated: bool,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
    prefix: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``dispatch.activation_quantize`` on the CPU."""
    K = x.shape[-1] // 2 if gated else x.shape[-1]
    if prefix is None:
        return _quantize(lambda x: activated(x, activation, gated), (x,), K, input_scale, dtype=dtype)
    both = lambda x, prefix: torch.cat([prefix, activated(x, activation, gated)], dim=-1)  # noqa: E731
    return _quantize(both, (x, prefix), prefix.shape[-1] + K, input_scale, dtype=dtype)


@without_grad
def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """``dispatch.activate`` on the CPU."""
    return activated(x, activation, gated)


@without_grad
@by_sample(3)
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
    """``dispatch.add_norm_quantize`` on the CPU."""
    x = x if gate is None else x * of_samples(gate, x)
    total = x.new_empty(x.shape)

    def values(x: Tensor, residual: Tensor, total: Tensor) -> Tensor:
        branch = x if branch_weight is None else norm(x, branch_weight)
        torch.add(residual, branch, out=total)
        return total if weight is None else norm(total, weight, bias)

    q, row_scale = _quantize(values, (x, residual, total), x.shape[-1], input_scale, dtype=dtype)
    return total, q, row_scale


@without_grad
@by_sample(3)
def add_norm(
    x: Tensor,
    residual: Tensor | None,
    branch_weight: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``dispatch.add_norm`` on the CPU, a few rows at a time."""
    x, adds = x if gate is None else x * of_samples(gate, x), residual is not None or branch_weight is not None
    total = x.new_empty(x.shape) if adds else x
    normed = total if weight is None else x.new_empty(x.shape)
    rows, totals, out = _rows(x), _rows(total), _rows(normed)
    residuals = None if residual is None else _rows(residual)
    for block in _blocks(rows.shape[0], x.shape[-1], _of_all_threads(_VALUES_AT_A_TIME)):
        added = rows[block]
        if branch_weight is not None:
            added = norm(added, branch_weight)
        if residuals is not None:
            added = residuals[block] + added
        if adds:
            totals[block] = added
        if weight is not None:
            out[block] = norm(added, weight, bias)
    return total, normed


@without_grad
@by_sample(2)
def post_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
) -> Tensor:
    """``dispatch.post_norm`` on the CPU, a few rows at a time."""
    normed = x.new_empty(x.shape)
    rows, residuals, out = _rows(x), _rows(residual), _rows(normed)
    for block in _blocks(rows.shape[0], x.shape[-1], _of_all_threads(_VALUES_AT_A_TIME)):
        out[block] = norm(residuals[block] + rows[block], weight, bias)
    return normed


@without_grad
@by_sample(2)
def post_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dispatch.post_norm_quantize`` on the CPU."""
    normed = x.new_empty(x.shape)

    def values(x: Tensor, residual: Tensor, normed: Tensor) -> Tensor:
        return normed.copy_(norm(residual + x, weight, bias))

    return normed, *_quantize(values, (x, residual, normed), x.shape[-1], input_scale, dtype=dtype)


def _quantize(
    values: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    K: int,
    scale: Tensor | None,
    zero_point: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
) -> tuple[Tensor, Tensor]:
    """``(q [..., K], row_scale [...])`` of ``values(*tensors)``, computed for a few rows of ``tensors`` at a time."""
    x = tensors[0]
    if 0 < x.numel() <= _of_all_threads(_VALUES_AT_A_TIME):
        q, row_scale = _quantize_block(values(*tensors), scale, zero_point, dtype)
        return q, row_scale.squeeze(-1)
    q = x.new_empty((*x.shape[:-1], K), dtype=dtype)
    row_scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if q.numel() == 0:
        return q, row_scale.copy_(x.new_ones((), dtype=torch.float32) if scale is None else scale.reshape(()))
    rows, q_rows, row_scales = [_rows(each) for each in tensors], q.view(-1, K), row_scale.view(-1, 1)
    for block in _blocks(q_rows.shape[0], x.shape[-1], _of_all_threads(_VALUES_AT_A_TIME)):
        made = values(*(each[block] for each in rows))
        _, row_scales[block] = _quantize_block(made, scale, zero_point, dtype, q_rows[block])
    return q, row_scale


def _rows(x: Tensor) -> Tensor:
    """``x [..., K]`` as ``[M, K]``."""
    return x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _of_all_threads(values: int) -> int:
    """``values`` times the number of threads, at most 4: starting an operator costs as much as some thousand values."""
    return values * min(torch.get_num_threads(), 4)


def _blocks(rows: int, columns: int, limit: int, least: int = 1) -> Iterator[slice]:
    """Slices of ``rows`` of similar length: at most ``limit`` values, but at least ``least`` rows."""
    count = max(1, min(cdiv(rows, max(1, limit // max(1, columns))), rows // least))
    step = cdiv(rows, count)
    for start in range(0, rows, max(1, step)):
        yield slice(start, start + step)


def _quantize_block(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, dtype: torch.dtype, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``x [..., K]`` quantized to ``dtype``, in ``out`` if given, and the scales ``[..., 1]``."""
    form = OPERANDS[dtype]
    values = x.float()
    # Instead of aminmax or a vector norm, which take ten times as long.
    if values.numel() <= _FEW:
        amax = values.abs().amax(-1, True)
    else:
        amax = torch.maximum(values.amax(-1, True), values.amin(-1, True).neg_())
    lowest, highest = amax.aminmax()
    is_finite = highest.item() < torch.inf
    row_scale = amax / form.steps if scale is None else scale.reshape(()).expand(amax.shape).clone()
    if scale is None and not lowest.item() >= form.steps * MIN_SCALE:
        row_scale.clamp_(min=MIN_SCALE).masked_fill_(amax == 0, 1.0)
    if not is_finite:
        row_scale.masked_fill_(~amax.isfinite(), torch.nan)
    quotient = torch.div(values, row_scale, out=None if values is x else values)
    if form is INT8:
        quotient.round_()
    if zero_point is not None:
        quotient.add_(zero_point).clamp_(INT8.asymmetric.low, INT8.asymmetric.high)
    elif scale is not None:
        quotient.clamp_(form.low, form.high)
    if scale is not None or not is_finite:
        quotient.nan_to_num_(0.0)
    return quotient.to(dtype).contiguous() if out is None else out.copy_(quotient), row_scale


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
    if 0 < x.numel() <= _of_all_threads(_VALUES_AT_A_TIME):
        q, row_scale = _quantize_block(x, input_scale, None, weight.dtype)
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
    at_a_time = _of_all_threads(_SUMS_AT_A_TIME)
    if at_a_time >= M * N or M <= _ROWS_OF_A_PRODUCT:
        sums = _sums(rows, b)
        return _scaled(sums if a.ndim == 2 else sums.view(*leading, N), a_scale, b_scale, bias, out_dtype, residual)
    out = a.new_empty((*leading, N), dtype=out_dtype)
    out_rows, scales = out.view(M, N), a_scale.reshape(-1, 1)
    residual = None if residual is None else _rows(residual)
    for block in _blocks(M, N, at_a_time, _ROWS_OF_A_PRODUCT):
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
        for part in _blocks(N, K, _VALUES_AT_A_TIME):
            out[:, part] = _mm(rows, b[:, part].float())
        return out
    out = a.new_zeros((M, N), dtype=torch.int32)
    for part in _blocks(N, _EXACT_K, _VALUES_AT_A_TIME):
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
