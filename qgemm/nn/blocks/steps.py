"""What lies between the products of a layer, on rows that are quantized once for all of their readers."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

from qgemm.kernels.rows import QuantizedRows
from qgemm.nn.blocks.merged import Operands
from qgemm.ops import quant_linear
from qgemm.ops.linear import multiply

Input: TypeAlias = Tensor | QuantizedRows
"""What a branch of a layer reads: floats, or rows that are quantized already."""


def quantize(x: Tensor, input_scale: Tensor | None) -> QuantizedRows:
    """``x [..., K]`` in int8."""
    return QuantizedRows(*torch.ops.qgemm.quantize_rows(x, input_scale))


def normalize(x: Tensor, norm: nn.Module | None) -> Tensor:
    """``norm(x)``, or ``x`` without one."""
    normed: Tensor = x if norm is None else norm(x)
    return normed


def linear(x: Input, operands: Operands, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """``round(x @ weight.T + bias)`` in ``dtype``, plus ``residual``, rounded again."""
    weight, weight_scale, bias, input_scale = operands
    if isinstance(x, QuantizedRows):
        return multiply(x.values, x.scale, weight, weight_scale, bias, residual, dtype)
    return quant_linear(x, weight, weight_scale, bias, input_scale, residual)
