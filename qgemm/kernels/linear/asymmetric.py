"""Products of asymmetrically quantized activations, by the kernels for symmetric ones.

With ``x ~ (q - z) * s``, where ``z`` is the zero point, and a weight ``w * w_scale``:

    x @ W.T + b = (q @ w.T) * s * w_scale + (b - z * s * w_scale * sum_k w)

The last term is the same for every row of ``x``, so it is computed once and stored as the bias. It may be a thousand
times as large as the result, and much of it is taken off again: it is kept in float32 whatever dtype the model has.
There its rounding, and that of the product, come to 2^-23 of it, a small part of a step of ``q``: steps are 2^-8 of the
range of ``x``, and a sum of many has about the root of their number of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qgemm.kernels.checks import check_quant_linear, check_quantize_rows
from qgemm.kernels.dispatch import quantize_rows, scaled_mm

LOW, HIGH = -128, 127
# Temporaries are of so many values at a time.
_PIECE = 1 << 24


def range_to_scale(low: float, high: float) -> tuple[float, int]:
    """``(scale, zero point)`` for values from ``low``, 0 or less, to ``high``, 0 or more; ``(1, 0)`` for zeros alone.

    ``scale = (high - low) / 255`` and ``zero point = round(-128 - low / scale)``, so that 0 is stored exactly.
    """
    scale = max((high - low) / (HIGH - LOW), torch.finfo(torch.float32).tiny)
    if not high > low:
        return 1.0, 0
    return scale, max(LOW, min(HIGH, round(LOW - low / scale)))


def correction(weight: Tensor, weight_scale: Tensor, input_scale: Tensor, zero_point: Tensor) -> Tensor:
    """``z * s * weight_scale * sum_k weight``: float64 ``[N]``, of int8 ``[N, K]`` and float32 ``[N]``."""
    sums = torch.empty(weight.shape[0], dtype=torch.float64, device=weight.device)
    step = max(1, _PIECE // max(weight.shape[1], 1))
    for start in range(0, weight.shape[0], step):
        part = slice(start, start + step)
        sums[part] = weight[part].sum(1, dtype=torch.int64).double()
    return sums * weight_scale.double() * input_scale.double() * zero_point.double()


@torch.no_grad()
def quant_linear_asymmetric(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    input_scale: Tensor,
    zero_point: Tensor,
) -> Tensor:
    """``(q @ weight.T) * input_scale * weight_scale + bias``, in the dtype of ``x``; ``q`` is ``x`` quantized.

    As ``dispatch.quant_linear``, with ``zero_point``, one int8 number, and a float ``bias [N]`` that has the correction
    for it taken off.
    """
    check_quant_linear_asymmetric(x, weight, weight_scale, bias, input_scale, zero_point)
    rows = x.resolve_neg().reshape(math.prod(x.shape[:-1]), weight.shape[1])
    q, row_scale = quantize_rows(rows, input_scale, zero_point)
    out = scaled_mm(q, weight.t(), row_scale, weight_scale, bias, x.dtype, constant_b=True)
    # Not a view for autograd, which would forbid to change it in place.
    return torch.ops.aten._unsafe_view(out, [*x.shape[:-1], weight.shape[0]])  # type: ignore[no-any-return]


def check_quant_linear_asymmetric(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor, input_scale: Tensor, zero_point: Tensor
) -> None:
    """Raises if ``quant_linear_asymmetric`` can't take these."""
    x = x.resolve_neg()
    check_quant_linear(x, weight, weight_scale, bias, input_scale)
    check_quantize_rows(x, input_scale, zero_point)
