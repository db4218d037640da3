"""Products of asymmetrically quantized activations, by the kernels for symmetric ones.

The zero point's contribution to a product is the same for every row and has been subtracted from the bias:
``qgemm.numerics.zero_points`` has the formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgemm.kernels.checks import check_quant_linear, check_quantize_rows
from qgemm.kernels.dispatch import multiply, quantize


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

    As ``dispatch.quant_linear``, with ``zero_point``, one int8 number, and a float ``bias [N]`` from which the zero
    point's contribution has been subtracted.
    """
    check_quant_linear_asymmetric(x, weight, weight_scale, bias, input_scale, zero_point)
    return multiply(quantize(x.resolve_neg(), input_scale, zero_point), weight, weight_scale, bias, x.dtype)


def check_quant_linear_asymmetric(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor, input_scale: Tensor, zero_point: Tensor
) -> None:
    """Raises if ``quant_linear_asymmetric`` doesn't accept these."""
    x = x.resolve_neg()
    check_quant_linear(x, weight, weight_scale, bias, input_scale)
    if weight.dtype != torch.int8:
        raise TypeError(f"weight is {weight.dtype}; with a zero point it must be torch.int8")
    check_quantize_rows(x, input_scale, zero_point)
