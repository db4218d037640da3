"""The weights of a mixture's experts and the activation between their two products, as one value.

An expert is ``activation(x @ gate_up[e].T + gate_up_bias[e]) @ down[e].T + down_bias[e]``. Both classes have
``tensors``, the tensors that an operator gets; ``sizes``; and ``stored(first, last)``, both weights of some experts as
two values.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from qgemm.kernels.activations import GatedActivation
from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.numerics.formats import FORMATS, Format


class ExpertWeights(NamedTuple):
    """The weights of experts whose rows are quantized before each product, in int8 or fp8.

    ``dispatch.experts`` documents shapes and dtypes.
    """

    gate_up: Tensor
    gate_up_scale: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_scale: Tensor
    down_bias: Tensor | None
    activation: GatedActivation

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Everything except ``activation``."""
        return self[:6]

    @property
    def has_blocks(self) -> bool:
        """Whether scales belong to blocks instead of rows."""
        return self.gate_up_scale.ndim == self.gate_up.ndim

    def of(self, expert: int) -> ExpertWeights:
        """The weights of one expert, each with one dimension less."""
        tensors = [None if tensor is None else tensor[expert] for tensor in self[:6]]
        return ExpertWeights._make((*tensors, self.activation))

    @property
    def sizes(self) -> tuple[int, int]:
        """``hidden_size`` and ``intermediate_size``."""
        return self.gate_up.shape[-1], self.down.shape[-1]

    @property
    def may_be_stacked(self) -> bool:
        """Whether ``stored`` accepts several experts."""
        return True

    def stored(self, first: int, last: int) -> tuple[ScaledWeight, ScaledWeight]:
        """``gate_up`` and ``down`` of experts ``first`` to ``last`` (excluded), each with the rows of all of them."""
        make = ScaledWeight.of_blocks if self.has_blocks else ScaledWeight.of_rows
        some = slice(first, last)
        gate_up_bias, down_bias = (None if bias is None else bias[some] for bias in (self.gate_up_bias, self.down_bias))
        gate_up = make(self.gate_up[some], self.gate_up_scale[some], gate_up_bias)
        return gate_up, make(self.down[some], self.down_scale[some], down_bias)


class WeightOnlyPart(NamedTuple):
    """One of the two weights of all experts in ``WeightOnlyExperts``."""

    weight: Tensor
    scale: Tensor
    zero_point: Tensor | None
    global_scale: Tensor | None
    bias: Tensor | None
    format: str
    group_size: int
    """0 for a scale for each row."""
    K: int

    @property
    def form(self) -> Format:
        """The number format."""
        return FORMATS[self.format]


class WeightOnlyExperts(NamedTuple):
    """The weights of experts whose weights are quantized and whose products are in float.

    ``dispatch.weight_only_experts`` documents shapes and dtypes.
    """

    gate_up: Tensor
    gate_up_scale: Tensor
    gate_up_zero_point: Tensor | None
    gate_up_global_scale: Tensor | None
    gate_up_bias: Tensor | None
    down: Tensor
    down_scale: Tensor
    down_zero_point: Tensor | None
    down_global_scale: Tensor | None
    down_bias: Tensor | None
    activation: GatedActivation
    gate_up_format: str
    gate_up_group_size: int
    down_format: str
    down_group_size: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of its tensors."""
        return self[:10]

    @property
    def parts(self) -> tuple[WeightOnlyPart, WeightOnlyPart]:
        """``gate_up`` and ``down``, each with what belongs to it."""
        H, intermediate = self.sizes
        return WeightOnlyPart(*self[:5], *self[11:13], H), WeightOnlyPart(*self[5:10], *self[13:], intermediate)

    @property
    def sizes(self) -> tuple[int, int]:
        """The lengths of rows: ``hidden_size`` and ``intermediate_size``."""
        return self.down.shape[-2], self.gate_up.shape[-2] // (2 if self.activation.gated else 1)

    @property
    def may_be_stacked(self) -> bool:
        """Whether ``stored`` accepts several experts: not if each has a global scale."""
        return all(part.global_scale is None for part in self.parts)

    def stored(self, first: int, last: int) -> tuple[ScaledWeight, ScaledWeight]:
        """``gate_up`` and ``down`` of experts ``first`` to ``last`` (excluded), each with the rows of all of them."""
        made = []
        for *tensors, format, group_size, K in self.parts:
            *stored, bias = (None if tensor is None else tensor[first:last].flatten(0, 1) for tensor in tensors)
            made.append(ScaledWeight._make((*stored, None, bias, K, format, group_size or K, False, None)))
        return made[0], made[1]
