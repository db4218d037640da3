"""``FusedLayerInput``: ``projection(act(gate(x)) * own)``, for a separate input ``own`` of a layer, as in Gemma 4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qgemm.nn.blocks.merged import MergedWeights
from qgemm.nn.blocks.operands import Input, Operands
from qgemm.ops.rows import gate_heads

LAYER_INPUT = "per_layer_input"
"""The name of that input among the layer's arguments."""


@dataclass(frozen=True, eq=False)
class FusedLayerInput:
    """``gate``, ``projection``: its layers; ``activation``, ``activation_name``: as in ``FusedMlp``."""

    gate: MergedWeights
    projection: MergedWeights
    activation: Callable[[Tensor], Tensor]
    activation_name: str

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of its products."""
        return (self.gate, self.projection)

    def __call__(
        self,
        x: Input,
        operands: tuple[Operands, ...],
        residual: Tensor | None,
        dtype: torch.dtype,
        context: Mapping[str, Any],
    ) -> Tensor:
        """The branch's output for ``x [..., K]``, plus ``residual``, in ``dtype``."""
        into, out_of = operands
        h, own = into.product(x, dtype), context[LAYER_INPUT]
        if self.activation_name:
            h = gate_heads(own[..., None, :], h[..., None, :], self.activation_name)[..., 0, :]
        else:
            h = self.activation(h) * own
        return out_of.product(h, dtype, residual)
