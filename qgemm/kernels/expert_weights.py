"""``ExpertWeights``: the weights of a mixture's experts and what lies between their two products, as one value."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from qgemm.kernels.activations import GatedActivation


class ExpertWeights(NamedTuple):
    """Those of ``E`` experts, ``activation(x @ gate_up[e].T + gate_up_bias[e]) @ down[e].T + down_bias[e]``.

    ``dispatch.experts`` documents shapes and dtypes.
    """

    gate_up: Tensor
    gate_up_scale: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_scale: Tensor
    down_bias: Tensor | None
    activation: GatedActivation

    def of(self, expert: int) -> ExpertWeights:
        """Those of one expert, each with a dimension less."""
        tensors = [None if tensor is None else tensor[expert] for tensor in self[:6]]
        return ExpertWeights._make((*tensors, self.activation))
