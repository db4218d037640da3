"""Products of asymmetrically quantized activations, by the kernels for symmetric ones.

What the zero point adds to a product is the same for every row, and has been taken off in the bias:
``qgemm.numerics.zero_points`` has the formula.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qgemm.kernels.checks import check_quant_linear, check_quantize_rows
from qgemm.kernels.dispatch import quantize_rows, scaled_mm


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
