"""``Int4Int8Linear``: a linear layer with a weight of 4 bits and int8 activations, multiplied as integers."""

from __future__ import annotations

import torch

from qgemm.nn.row_steps import RowSteps
from qgemm.nn.weight_only import WeightOnlyLinear
from qgemm.scheme import INT8_TOKENS, QuantScheme


class Int4Int8Linear(WeightOnlyLinear):
    """A linear layer with an int4 weight and int8 activations: float ``[..., in_features]`` to ``[..., out_features]``.

    ``y = x_scale * sum over groups g of (x_q @ (q - z).T)[g] * s[g] + bias``. Each row of the input gets a scale as it
    comes. The sums within a group are exact int32; they are scaled and added in float32. Parameters are those of
    ``WeightOnlyLinear``, with scales in floats. Where the scales of a row are whole multiples of one step, as those of
    symmetric groups that are made here, products of many rows on a GPU are one exact sum for all groups, scaled once.
    """

    default_scheme = "int4-int8"

    def make_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """As ``WeightOnlyLinear``."""
        super().make_parameters(device, dtype)
        if self.scheme.weight.scale_dtype == "steps":
            self.steps = RowSteps()

    @classmethod
    def computes(cls, scheme: QuantScheme) -> bool:
        """Whether ``scheme`` is int4 with int8 activations per token."""
        return scheme.weight.dtype == "int4" and scheme.activation == INT8_TOKENS
