"""The weights of a mixture's experts and what lies between their two products, as one value.

An expert is ``activation(x @ gate_up[e].T + gate_up_bias[e]) @ down[e].T + down_bias[e]``. Both values have
``tensors``, what an operator takes of them, ``of(expert)``, those of one expert, each with a dimension less, and
``float_weights``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qgemm.kernels.activations import GatedActivation
from qgemm.numerics.blocks import dequantize_blocks
from qgemm.numerics.formats import FORMATS, Format
from qgemm.numerics.groups import dequantize, dequantize_rows


class ExpertWeights(NamedTuple):
    """Those of experts whose rows are quantized before either product, in int8 or fp8.

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
        """All that isn't ``activation``."""
        return self[:6]

    @property
    def has_blocks(self) -> bool:
        """Whether scales are those of blocks, not of rows."""
        return self.gate_up_scale.ndim == self.gate_up.ndim

    def of(self, expert: int) -> ExpertWeights:
        """Those of one expert."""
        tensors = [None if tensor is None else tensor[expert] for tensor in self[:6]]
        return ExpertWeights._make((*tensors, self.activation))

    def float_weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both weights of one expert in float."""
        restore = dequantize_blocks if self.has_blocks else dequantize_rows
        first = restore(self.gate_up, self.gate_up_scale, dtype)
        return first, restore(self.down, self.down_scale, dtype)


class WeightOnlyExperts(NamedTuple):
    """Those of experts with quantized weights and products in float.

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
    format: str
    group_size: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All that are tensors."""
        return self[:10]

    @property
    def form(self) -> Format:
        """The number format of the weights."""
        return FORMATS[self.format]

    @property
    def sizes(self) -> tuple[int, int]:
        """The lengths of rows: ``hidden_size`` and ``intermediate_size``."""
        return self.down.shape[-2], self.gate_up.shape[-2] // (2 if self.activation.gated else 1)

    def of(self, expert: int) -> WeightOnlyExperts:
        """Those of one expert."""
        tensors = [None if tensor is None else tensor[expert] for tensor in self[:10]]
        return WeightOnlyExperts._make((*tensors, *self[10:]))

    def float_weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both weights of one expert in float."""
        first, second = (
            dequantize(*tensors, self.form, self.group_size or K, K, dtype)
            for tensors, K in zip((self[:4], self[5:9]), self.sizes, strict=True)
        )
        return first, second
