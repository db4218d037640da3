"""A quantized weight of a linear layer with all that belongs to it, as one value, for ``weight_only_linear``.

It is made where a layer or an operator is called, and passed on whole. What kernels are compiled for is in another
value, ``StoredForm``: it has no tensors, so calls of a kind share it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qgemm.numerics.blocks import BLOCK, spread_rows
from qgemm.numerics.formats import FORMATS, FP8, OPERANDS, Format
from qgemm.numerics.groups import dequantize, to_input_order_


class ScaledWeight(NamedTuple):
    """``W [N, K]`` with ``W[:, input_order] = (q - zero_point) * scale``, ``K`` being ``in_features``, and a bias.

    With a float zero point it is ``q * scale + zero_point``.
    """

    values: Tensor
    """In ``format``, as ``numerics.groups`` stores them: ``[N, K]``, or ``[N, packed_width(K)]`` for 4 bits."""
    scale: Tensor
    """``[N, ceil(K / group_size)]``: float, uint8 exponents, or float8 with a global scale."""
    zero_point: Tensor | None
    """Like the scales, int8; for 4 bits from -8 to 8: products with int8 activations keep differences in 8 bits.

    Or float, for int4 and int8 with float scales and activations.
    """
    global_scale: Tensor | None
    """float32 ``[2]``, a factor and a divisor."""
    input_order: Tensor | None
    """int32 ``[K]``: the input column that each column of the values is multiplied by."""
    bias: Tensor | None
    """float ``[N]``."""
    in_features: int
    format: str
    """The name of the number format."""
    group_size: int
    """How many values along K share a scale; ``in_features`` for one scale per row."""
    int8_activations: bool = False
    """Whether the input's rows are quantized, too, and sums of groups are exact: for int4 with float scales."""
    step: Tensor | None = None
    """float32 ``[N]``: the result of ``numerics.groups.steps_of`` for ``scale``, for products with int8 activations,
    which then compute one sum of integers for a whole row. None if there is no such step, or it wasn't looked for.
    """

    @classmethod
    def of_rows(cls, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> ScaledWeight:
        """int8 or e4m3 ``[..., N, K]`` with a scale for each row, ``[..., N]``, with all rows in one weight."""
        K = weight.shape[-1]
        rows = weight.flatten(0, -2), scale.reshape(-1, 1), None, None, None, None if bias is None else bias.flatten()
        return cls(*rows, K, OPERANDS[weight.dtype].name, K)

    @classmethod
    def of_blocks(cls, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> ScaledWeight:
        """e4m3 ``[..., N, K]`` with a scale for each block of 128 x 128, with all rows in one weight.

        ``scale``: ``[..., ceil(N / 128), ceil(K / 128)]``.
        """
        N, K = weight.shape[-2:]
        scales = spread_rows(scale, N).flatten(0, -2)
        rows = weight.flatten(0, -2), scales, None, None, None, None if bias is None else bias.flatten()
        return cls(*rows, K, FP8.name, BLOCK)

    @classmethod
    def without_bias(
        cls,
        values: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        global_scale: Tensor | None,
        input_order: Tensor | None,
        in_features: int,
        format: str,
        group_size: int,
    ) -> ScaledWeight:
        """What ``dequantize`` reads, as operators get it."""
        return cls(values, scale, zero_point, global_scale, input_order, None, in_features, format, group_size)

    @property
    def form(self) -> Format:
        """The number format of the values."""
        return FORMATS[self.format]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """``W [N, K]`` in ``dtype``, with the columns in the input's order."""
        parts = self.values, self.scale, self.zero_point, self.global_scale
        rows = dequantize(*parts, self.form, self.group_size, self.in_features, dtype)
        return rows if self.input_order is None else to_input_order_(rows, self.input_order)
