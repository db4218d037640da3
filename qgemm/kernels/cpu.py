"""The kernels' functions on the CPU: the numbers of ``reference.py``, at the speed of oneDNN.

Integer products go through ``torch._int_mm``, which uses a CPU's int8 dot product instructions. Processors without
them saturate at 16 bits inside oneDNN; a product that would show it is computed once per process, and there the sum is
made of float32 products short enough to be exact.
"""

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from qgemm.kernels.activations import ACTIVATIONS, activated
from qgemm.kernels.attention.cpu import decode_attention  # noqa: F401
from qgemm.kernels.expert_weights import ExpertWeights
from qgemm.kernels.norms import Norm
from qgemm.kernels.rotary.reference import rotate_reference, store_reference
from qgemm.numerics.formats import INT8, MIN_SCALE

# 2^24 / (128 * 128): float32 holds a sum of this many int8 products exactly.
_EXACT_K = 1024
_VALUES_AT_A_TIME = 2**18


@torch.no_grad()
def quantize_rows(x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``dispatch.quantize_rows`` on the CPU, a few rows at a time: temporaries stay in cache and take little memory."""
    rows = _rows(x)
    return _quantize(x, x.shape[-1], lambda block: rows[block], scale, zero_point)


@torch.no_grad()
def norm_quantize(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``dispatch.norm_quantize`` on the CPU."""
    rows = _rows(x)
    return _quantize(x, x.shape[-1], lambda block: norm(rows[block], weight, bias), input_scale)


@torch.no_grad()
def activation_quantize(
    x: Tensor, activation: str, gated: bool, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``dispatch.activation_quantize`` on the CPU."""
    rows, K = _rows(x), x.shape[-1] // 2 if gated else x.shape[-1]
    return _quantize(x, K, lambda block: activated(rows[block], activation, gated), input_scale)


@torch.no_grad()
def add_norm_quantize(
    x: Tensor,
    residual: Tensor,
    branch_weight: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    input_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dispatch.add_norm_quantize`` on the CPU."""
    total = x.new_empty(x.shape)
    rows, residuals, totals = _rows(x), _rows(residual), _rows(total)

    def values(block: slice) -> Tensor:
        branch = rows[block] if branch_weight is None else norm(rows[block], branch_weight)
        added = torch.add(residuals[block], branch, out=totals[block])
        return added if weight is None else norm(added, weight, bias)

    q, row_scale = _quantize(x, x.shape[-1], values, input_scale)
    return total, q, row_scale


@torch.no_grad()
def add_norm(
    x: Tensor,
    residual: Tensor | None,
    branch_weight: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
) -> tuple[Tensor, Tensor]:
    """``dispatch.add_norm`` on the CPU, a few rows at a time."""
    adds = residual is not None or branch_weight is not None
    total = x.new_empty(x.shape) if adds else x
    normed = total if weight is None else x.new_empty(x.shape)
    rows, totals, out = _rows(x), _rows(total), _rows(normed)
    residuals = None if residual is None else _rows(residual)
    for block in _blocks(rows, x.shape[-1]):
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


def _quantize(
    x: Tensor,
    K: int,
    values: Callable[[slice], Tensor],
    scale: Tensor | None,
    zero_point: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(q, row_scale)`` of rows of ``K`` values, as many as ``x`` has; ``values(block)`` gives some of them."""
    q = x.new_empty((*x.shape[:-1], K), dtype=torch.int8)
    row_scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if q.numel() == 0:
        return q, row_scale.copy_(x.new_ones((), dtype=torch.float32) if scale is None else scale.reshape(()))
    q_rows, row_scales = q.view(-1, K), row_scale.view(-1)
    for block in _blocks(q_rows, K):
        row_scales[block] = _quantize_block(values(block).float(), scale, zero_point, q_rows[block])
    return q, row_scale


def _rows(x: Tensor) -> Tensor:
    """``x [..., K]`` as ``[M, K]``."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _blocks(rows: Tensor, K: int) -> Iterator[slice]:
    """A few of ``rows`` at a time, where each becomes ``K`` values; none where there are none."""
    step = max(1, _VALUES_AT_A_TIME // max(1, K))
    for start in range(0, rows.shape[0], step):
        yield slice(start, start + step)


def _quantize_block(values: Tensor, scale: Tensor | None, zero_point: Tensor | None, q: Tensor) -> Tensor:
    """Writes the int8 values of float32 ``values [rows, K]`` to ``q``; returns the scales ``[rows]``."""
    # Not aminmax or a vector norm: they take ten times as long.
    amax = values.abs().amax(dim=-1)
    low, high = (bound.item() for bound in amax.aminmax())
    row_scale = amax / INT8.steps if scale is None else scale.reshape(()).expand(amax.shape).clone()
    if scale is None and not low >= INT8.steps * MIN_SCALE:
        row_scale.clamp_(min=MIN_SCALE).masked_fill_(amax == 0, 1.0)
    if not high < torch.inf:
        row_scale.masked_fill_(~amax.isfinite(), torch.nan)
    quotient = (values / row_scale[:, None]).round_()
    if zero_point is not None:
        quotient.add_(zero_point).clamp_(INT8.asymmetric.low, INT8.asymmetric.high)
    elif scale is not None:
        quotient.clamp_(INT8.low, INT8.high)
    if scale is not None or not high < torch.inf:
        quotient.nan_to_num_(0.0)
    q.copy_(quotient)
    return row_scale


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """``dispatch.int_mm`` on the CPU."""
    if not _int_mm_is_exact():
        out: Tensor = _int_mm_float(a, b)
        return out
    if 0 in (*a.shape, *b.shape):
        return a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.int32)
    return torch._int_mm(_plain(a), _plain(b))


@torch.no_grad()
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
    out = int_mm(a, b).float()
    out.mul_(a_scale.reshape(-1, 1)).mul_(b_scale)
    if bias is not None:
        out.add_(bias)
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


@torch.no_grad()
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


@torch.no_grad()
def experts(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights) -> Tensor:
    """``dispatch.experts`` on the CPU: an expert at a time, so that what lies between its products stays small."""
    (T, k), (E, H, _) = top_k_index.shape, weights.down.shape
    q, q_scale = quantize_rows(x)
    ids = top_k_index.flatten()
    pairs = ids.argsort(stable=True)
    ends = torch.searchsorted(ids[pairs], torch.arange(E + 1, device=ids.device)).tolist()
    y = x.new_zeros((T * k, H))
    for expert, (start, end) in enumerate(pairwise(ends)):
        if start == end:
            continue
        slots = pairs[start:end]
        rows, own = slots // k, weights.of(expert)
        h = scaled_mm(q[rows], own.gate_up.t(), q_scale[rows], own.gate_up_scale, own.gate_up_bias, x.dtype)
        h_q, h_scale = quantize_rows(own.activation(h).to(x.dtype))
        y[slots] = scaled_mm(h_q, own.down.t(), h_scale, own.down_scale, own.down_bias, x.dtype)
    out = x.new_zeros((T, H), dtype=torch.float32)
    inside = (top_k_index >= 0) & (top_k_index < E)
    for slot in range(k):
        # Not a product with 0: a weight may be anything where there is no expert.
        weight = top_k_weights[:, slot].float().masked_fill(~inside[:, slot], 0.0)
        out.add_(y[slot::k].float().mul_(weight[:, None]))
    return out.to(x.dtype)


@torch.no_grad()
def rotate(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``dispatch.rotate`` on the CPU."""
    return rotate_reference(*arguments)


@torch.no_grad()
def rotate_and_store(qkv: Tensor, *arguments: Any) -> Tensor:
    """``dispatch.rotate_and_store`` on the CPU."""
    q, key, value = rotate_reference(qkv, *arguments[:9])
    store_reference(key, value, *arguments[9:])
    return q


@torch.no_grad()
def store_key_value(*arguments: Any) -> None:
    """``dispatch.store_key_value`` on the CPU."""
    store_reference(*arguments)


@functools.cache
def _int_mm_is_exact() -> bool:
    """Whether ``torch._int_mm`` gives the largest sums right, where saturating instructions can't."""
    a = torch.full((32, 64), -128, dtype=torch.int8, device="cpu")
    a[1::2] = 127
    return torch.equal(torch._int_mm(a, a.t()), _int_mm_float(a, a.t()))


def _plain(t: Tensor) -> Tensor:
    """``t``, copied unless it is row-major or column-major.

    ``torch._int_mm`` answers garbage for some other strides: an expanded operand, or a single row with strides (1, 1).
    """
    rows, cols = t.shape
    row_stride, col_stride = t.stride()
    if (col_stride == 1 and row_stride >= cols) or (row_stride == 1 and col_stride >= max(rows, 2)):
        return t
    return t.clone(memory_format=torch.contiguous_format)


@torch.autocast("cpu", enabled=False)
def _int_mm_float(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.int32)
    for k in range(0, a.shape[1], _EXACT_K):
        out += (a[:, k : k + _EXACT_K].float() @ b[k : k + _EXACT_K].float()).to(torch.int32)
    return out
