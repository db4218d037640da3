"""``Int4Int8Linear``: a linear layer with a 4-bit weight and int8 activations, multiplied as integers."""

from __future__ import annotations

import torch

from qgemm.nn.row_steps import RowSteps
from qgemm.nn.weight_only import WeightOnlyLinear
from qgemm.scheme import INT8_TOKENS, QuantScheme


class Int4Int8Linear(WeightOnlyLinear):
    """A linear layer with an int4 weight and int8 activations: float ``[..., in_features]`` to ``[..., out_features]``.

    ``y = x_scale * sum over groups g of (x_q @ (q - z).T)[g] * s[g] + bias``. Each row of the input gets a scale at run
    time. The sums within a group are exact int32; they are scaled and added in float32. Parameters are those of
    ``WeightOnlyLinear``, with float scales. Where all scales of a row are whole multiples of one step, as in symmetric
    groups that are quantized here, a product of many rows on a GPU is one exact sum over all groups, scaled once.
    """

    default_scheme = "int4-int8"

    def make_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """As in ``WeightOnlyLinear``."""
        super().make_parameters(device, dtype)
        if self.scheme.weight.scale_dtype == "steps":
            self.steps = RowSteps()

    @classmethod
    def computes(cls, scheme: QuantScheme) -> bool:
        """Whether ``scheme`` is int4 with int8 activations per token."""
        return scheme.weight.dtype == "int4" and scheme.activation == INT8_TOKENS
