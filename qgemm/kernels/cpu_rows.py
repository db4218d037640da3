"""Rows on the CPU, a few at a time: their quantization, and norms and activations ahead of it.

The numbers are those of ``reference.py``. Temporaries of a few rows stay in cache and take little memory.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from qgemm.kernels.activations import activated
from qgemm.kernels.norms import NormCall, NormOutputs, of_samples
from qgemm.numerics.blocks import BLOCK
from qgemm.numerics.formats import FP8, INT8, MIN_SCALE, OPERANDS
from qgemm.numerics.groups import grouped
from qgemm.numerics.integers import cdiv

P = ParamSpec("P")
T = TypeVar("T")

# Blocks of rows: a block's temporaries stay in cache and take little memory. Yet there are few blocks, since a call of
# an operator costs as much as some thousand values.
VALUES_AT_A_TIME = 2**19
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


@without_grad
def quantize_rows(
    x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None, dtype: torch.dtype = INT8.storage
) -> tuple[Tensor, Tensor]:
    """``dispatch.quantize_rows`` on the CPU, a few rows at a time: temporaries stay in cache and take little memory."""
    return _quantize(lambda x: x, (x,), x.shape[-1], scale, zero_point, dtype)


@without_grad
def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """``dispatch.quantize_groups`` on the CPU."""
    q, scale = quantize_rows(grouped(as_rows(x), BLOCK), dtype=FP8.storage)
    return q.flatten(1)[:, : x.shape[-1]].reshape(x.shape).contiguous(), scale.view(*x.shape[:-1], scale.shape[1])


@without_grad
def norm_rows(call: NormCall, total: bool = False, normed: bool = False) -> NormOutputs:
    """The functions of ``dispatch`` with a norm on the CPU: the floats that are wanted, and rows of ``call.dtype``."""
    x, residual, weight, bias, norm, dtype = call.x, call.residual, call.weight, call.bias, call.norm, call.dtype
    if weight is not None and weight.ndim == 2 and weight.numel():
        samples = [norm_rows(_of_sample(call, b), total, normed) for b in range(weight.shape[0])]
        made: Any = zip(*samples, strict=True)
        return tuple(None if each[0] is None else torch.cat(each) for each in made)  # type: ignore[return-value]

    by_sample = call.gate is not None and call.gate.ndim == 2

    def values(x: Tensor, residual: Tensor | None, total: Tensor | None, normed: Tensor | None) -> Tensor:
        out = x if call.branch_weight is None else norm(x, call.branch_weight)
        out = out if call.gate is None or by_sample else out * call.gate
        out = out if call.factor == 1.0 else out * call.factor
        if residual is not None:
            out = torch.add(residual, out, out=total)
        elif total is not None:
            out = total.copy_(out)
        out = out.to(call.x.dtype)  # that of a gate may be another
        out = out if call.total_factor is None else torch.mul(out, call.total_factor, out=total)
        out = out if weight is None else norm(out, weight, bias)
        return out if normed is None else normed.copy_(out)

    totals = x.new_empty(x.shape) if total else None
    out = x.new_empty(x.shape) if normed else None
    x = x * of_samples(call.gate, x) if by_sample else x  # type: ignore[arg-type]
    tensors = x, residual, totals, out
    if dtype is not None:
        return totals, out, *_quantize(values, tensors, x.shape[-1], call.input_scale, dtype=dtype)
    for block in _blocks(tensors):
        values(*block)
    return totals, out, None, None


def _of_sample(call: NormCall, sample: int) -> NormCall:
    """``call`` for one sample, whose weight and bias are those of all its rows."""
    one = slice(sample, sample + 1)
    residual, gate = (each if each is None or each.ndim == 1 else each[one] for each in (call.residual, call.gate))
    weight, bias = (each if each is None else each[sample] for each in (call.weight, call.bias))
    return call._replace(x=call.x[one], residual=residual, gate=gate, weight=weight, bias=bias)


@without_grad
def activation_quantize(
    x: Tensor,
    activation: str,
    gated: bool,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
    prefix: Tensor | None = None,
    up_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """``dispatch.activation_quantize`` on the CPU."""
    K = x.shape[-1] // 2 if gated else x.shape[-1]
    if prefix is None:
        return _quantize(lambda x: activated(x, activation, gated, up_first), (x,), K, input_scale, dtype=dtype)
    both = lambda x, prefix: torch.cat([prefix, activated(x, activation, gated, up_first)], dim=-1)  # noqa: E731
    return _quantize(both, (x, prefix), prefix.shape[-1] + K, input_scale, dtype=dtype)


@without_grad
def activate(x: Tensor, activation: str, gated: bool, up_first: bool = False) -> Tensor:
    """``dispatch.activate`` on the CPU."""
    return activated(x, activation, gated, up_first)


def _quantize(
    values: Callable[..., Tensor],
    tensors: Sequence[Any],
    K: int,
    scale: Tensor | None,
    zero_point: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
) -> tuple[Tensor, Tensor]:
    """``(q [..., K], row_scale [...])`` of ``values(*tensors)``, computed for a few rows of ``tensors`` at a time."""
    x = tensors[0]
    if 0 < x.numel() <= of_all_threads(VALUES_AT_A_TIME):
        q, row_scale = quantize_block(values(*tensors), scale, zero_point, dtype)
        return q, row_scale.squeeze(-1)
    q = x.new_empty((*x.shape[:-1], K), dtype=dtype)
    row_scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if q.numel() == 0:
        return q, row_scale.copy_(x.new_ones((), dtype=torch.float32) if scale is None else scale.reshape(()))
    for *block, q_rows, row_scales in _blocks((*tensors, q, row_scale.unsqueeze(-1))):
        row_scales.copy_(quantize_block(values(*block), scale, zero_point, dtype, q_rows)[1])
    return q, row_scale


def _blocks(tensors: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """A few rows of each of ``tensors`` at a time; None stays None."""
    limit = of_all_threads(VALUES_AT_A_TIME)
    if tensors[0].numel() <= limit:
        yield tensors
        return
    rows: list[Any] = [None if each is None else as_rows(each) for each in tensors]
    count, columns = rows[0].shape
    for block in blocks_of(count, columns, limit):
        yield [None if each is None else each[block] for each in rows]


def as_rows(x: Tensor) -> Tensor:
    """``x [..., K]`` as ``[M, K]``."""
    return x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def of_all_threads(values: int) -> int:
    """``values`` times the number of threads, at most 4: starting an operator costs as much as some thousand values."""
    return values * min(torch.get_num_threads(), 4)


def blocks_of(rows: int, columns: int, limit: int, least: int = 1) -> Iterator[slice]:
    """Slices of ``rows`` of similar length: at most ``limit`` values, but at least ``least`` rows."""
    count = max(1, min(cdiv(rows, max(1, limit // max(1, columns))), rows // least))
    step = cdiv(rows, count)
    for start in range(0, rows, max(1, step)):
        yield slice(start, start + step)


def quantize_block(
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
