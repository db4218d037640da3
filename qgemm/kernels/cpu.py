"""The kernels' functions on the CPU: the numbers of ``reference.py``, at the speed of oneDNN.

Integer products go through ``torch._int_mm``, which uses a CPU's int8 dot product instructions. Processors without
them saturate at 16 bits inside oneDNN; a product that would show it is computed once per process, and there the sum is
made of float32 products short enough to be exact.
"""

import functools

import torch
from torch import Tensor

from qgemm.kernels.reference import ACTIVATIONS, MIN_SCALE, QMAX

# 2^24 / (128 * 128): float32 holds a sum of this many int8 products exactly.
_EXACT_K = 1024


@torch.no_grad()
def quantize_rows(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``dispatch.quantize_rows`` on the CPU."""
    values = x.float()
    if x.shape[-1]:
        low, high = torch.aminmax(values, dim=-1)
        amax = torch.maximum(-low, high)
    else:
        amax = values.new_zeros(x.shape[:-1])
    if scale is None:
        row_scale = (amax / QMAX).clamp_(min=MIN_SCALE).masked_fill_(amax == 0, 1.0)
    else:
        row_scale = scale.reshape(()).expand(amax.shape).clone()
    # Inf - Inf and NaN - NaN are NaN. A static scale that nobody set is NaN as well.
    row_scale.add_(amax - amax)
    all_finite = not bool(row_scale.isnan().any())
    q = (values / row_scale[..., None]).round_().clamp_(-QMAX, QMAX)
    return (q if all_finite else q.nan_to_num_(0.0)).to(torch.int8), row_scale


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """``dispatch.int_mm`` on the CPU."""
    if not _int_mm_is_exact():
        return _int_mm_float(a, b)
    if 0 in (*a.shape, *b.shape):
        return a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.int32)
    out: Tensor = torch._int_mm(_plain(a), _plain(b))
    return out


@torch.no_grad()
def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``dispatch.scaled_mm`` on the CPU."""
    out = int_mm(a, b).float()
    out.mul_(a_scale.reshape(-1, 1)).mul_(b_scale.reshape(1, -1))
    if bias is not None:
        out.add_(bias.float())
    return out.to(out_dtype)


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


@functools.cache
def _int_mm_is_exact() -> bool:
    """Whether ``torch._int_mm`` gives the largest sums right, where saturating instructions can't."""
    a = torch.full((32, 64), -128, dtype=torch.int8)
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
