"""``Int4Int8Linear``: a linear layer with a weight of 4 bits and int8 activations, multiplied as integers."""

from __future__ import annotations

from qgemm.nn.weight_only import WeightOnlyLinear
from qgemm.scheme import INT8_TOKENS, QuantScheme


class Int4Int8Linear(WeightOnlyLinear):
    """A linear layer with an int4 weight and int8 activations: float ``[..., in_features]`` to ``[..., out_features]``.

    ``y = x_scale * sum over groups g of (x_q @ (q - z).T)[g] * s[g] + bias``. Each row of the input gets a scale as it
    comes. The sums within a group are exact int32; they are scaled and added in float32. Parameters are those of
    ``WeightOnlyLinear``, with scales in floats.
    """

    default_scheme = "int4-int8"

    @classmethod
    def computes(cls, scheme: QuantScheme) -> bool:
        """Whether ``scheme`` is int4 with int8 activations per token."""
        return scheme.weight.dtype == "int4" and scheme.activation == INT8_TOKENS
