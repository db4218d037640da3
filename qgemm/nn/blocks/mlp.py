"""``FusedMlp``: ``down(act(gate(x)) * up(x))`` or ``down(act(up(x)))``, with gate and up in one product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qgemm.nn.blocks.merged import MergedWeights
from qgemm.nn.blocks.operands import Input, Operands
from qgemm.nn.blocks.steps import activate


@dataclass(frozen=True, eq=False)
class FusedMlp:
    """How a module of two or three linear layers computes.

    - ``first``: gate and up, or one layer that has both or is not gated; ``down``: the last.
    - ``activation``: the module's own; ``activation_name``: which of ``kernels.activations.ACTIVATIONS`` has its bits,
      or empty. ``gated``: whether the first half of the columns is the gate of the second.
    """

    first: MergedWeights
    down: MergedWeights
    activation: Callable[[Tensor], Tensor]
    activation_name: str
    gated: bool

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """What it multiplies with."""
        return (self.first, self.down)

    def __call__(
        self,
        x: Input,
        operands: tuple[Operands, ...],
        residual: Tensor | None,
        dtype: torch.dtype,
        context: Mapping[str, Any],
    ) -> Tensor:
        """The output of the module for ``x [..., K]``, plus ``residual``, in ``dtype``."""
        into, out_of = operands
        h = into.product(x, dtype)
        activated = activate(h, self.activation, self.activation_name, self.gated, out_of)
        return out_of.product(activated, dtype, residual)
