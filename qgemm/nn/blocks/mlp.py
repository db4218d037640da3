"""``FusedMlp``: ``down(act(gate(x)) * up(x))`` or ``down(act(up(x)))``, with gate and up in one product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qgemm.kernels.activations import Gates
from qgemm.kernels.weight_only.few_rows_config import MAX_FEW_ROWS
from qgemm.nn.blocks.merged import MergedWeights
from qgemm.nn.blocks.operands import FloatOperands, Input, Operands
from qgemm.nn.blocks.steps import activate
from qgemm.numerics.integers import cdiv, round_up

WHOLE_TILES = 256
"""A multiple of this many rows leaves no tile of a product partly empty."""
MAX_INNER_VALUES = 2**26
"""At most this many values lie between the products, 0.13 GB in bfloat16. More rows are computed in parts of about
equal sizes, up to 2,304 rows at Llama 3 8B's sizes. A prompt of 8 x 2,048 tokens takes as long as at once (201 and 206
ms, and 206 and 209), with 0.7 GB less memory."""


@dataclass(frozen=True, eq=False)
class FusedMlp:
    """How a module of two or three linear layers computes.

    - ``first``: gate and up, or one layer that has both or isn't gated; ``down``: the last layer.
    - ``activation``: the module's own; ``activation_name``: the one of ``kernels.activations.ACTIVATIONS`` that
      computes the same, or empty. ``gated``: whether the first half of the columns is the gate of the second half;
      ``up_first``: whether it is the other way round.
    """

    first: MergedWeights
    down: MergedWeights
    activation: Callable[[Tensor], Tensor]
    activation_name: str
    gated: bool
    up_first: bool = False

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of its products."""
        return (self.first, self.down)

    def with_own_activation(self, in_float64: bool) -> FusedMlp:
        """The same, calling its module's activation, whose result is rounded once if it is computed ``in_float64``."""
        own = self.activation
        wide: Callable[[Tensor], Tensor] = lambda h: own(h.double()).to(h.dtype)  # noqa: E731
        return replace(self, activation=wide if in_float64 and self.activation_name else own, activation_name="")

    def __call__(
        self,
        x: Input,
        operands: tuple[Operands, ...],
        residual: Tensor | None,
        dtype: torch.dtype,
        context: Mapping[str, Any],
    ) -> Tensor:
        """The output of the module for ``x [..., K]``, plus ``residual``, in ``dtype``."""
        if torch.compiler.is_compiling():
            return self._compute(x, operands, residual, dtype)
        into = x if isinstance(x, Tensor) else x.values
        rows, inner = into.shape[:-1].numel(), sum(layer.out_features for layer in self.first.layers)
        most = max(MAX_INNER_VALUES // max(inner, 1) // WHOLE_TILES * WHOLE_TILES, WHOLE_TILES)
        if rows <= most:
            return self._compute(x, operands, residual, dtype)
        most = round_up(cdiv(rows, cdiv(rows, most)), WHOLE_TILES)
        shape = (*into.shape[:-1], self.down.layers[0].out_features)
        out = torch.empty(shape, dtype=dtype, device=into.device)
        flat, read = out.view(rows, -1), _flat(x)
        added = None if residual is None else residual.reshape(flat.shape)
        for start in range(0, rows, most):
            own = slice(start, start + most)
            flat[own] = self._compute(_part(read, own), operands, None if added is None else added[own], dtype)
        return out

    def _compute(self, x: Input, operands: tuple[Operands, ...], residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        into, out_of = operands
        is_known = self.gated and bool(self.activation_name) and not out_of.reads_rows
        if is_known and isinstance(into, FloatOperands) and isinstance(x, Tensor):
            if x.shape[:-1].numel() <= MAX_FEW_ROWS:
                activated = into.activated(x, Gates(self.activation_name, self.up_first))
                return out_of.product(activated, dtype, residual)
        # Nothing may hold the first product's output while the second product runs.
        how = self.activation, self.activation_name, self.gated, out_of, self.up_first
        return out_of.product(activate(into.product(x, dtype), *how), dtype, residual)


def _flat(x: Input) -> Input:
    """``x`` with one dimension of rows."""
    if isinstance(x, Tensor):
        return x.reshape(-1, x.shape[-1])
    return x._replace(values=x.values.reshape(-1, x.values.shape[-1]), scale=x.scale.flatten())


def _part(x: Input, rows: slice) -> Input:
    return x[rows] if isinstance(x, Tensor) else x._replace(values=x.values[rows], scale=x.scale[rows])
