"""``Siblings``: layers that read the same input, in a module that isn't fused: the first one called computes them all.

The module's code calls one layer after the other with the same tensor. The first call keeps the others' outputs until
they are called. If the layers are called in another way than when they were found, each computes by itself from then
on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qgemm.nn.blocks.binding import fused_of
from qgemm.nn.blocks.merged import MergedWeights
from qgemm.nn.linear_layer import LinearLayer
from qgemm.ops.direct import in_forward_mode


class _Made(NamedTuple):
    """Outputs computed from ``x`` as it was at ``version`` that wait for their layers, by the layer's place."""

    x: Tensor
    version: int
    waiting: dict[int, Tensor]


class Siblings:
    """``layers``, computed by one product; each layer's columns wait until it is called."""

    def __init__(self, layers: Sequence[LinearLayer]) -> None:
        """Merges the weights. Raises ``ValueError`` if that isn't possible."""
        self.merged = MergedWeights(layers)
        self._sizes = [layer.out_features for layer in layers]
        self._in_turn = True
        self._made: _Made | None = None

    def output(self, place: int, x: Tensor) -> Tensor | None:
        """The output of layer ``place``; None if it must compute by itself."""
        version, made = 0 if x.is_inference() else x._version, self._made
        if made is not None:
            out = made.waiting.pop(place, None) if made.x is x and made.version == version else None
            if out is not None:
                self._made = made if made.waiting else None
                return out
            self._in_turn = False
            self.forget()
        operands = self.merged.operands() if self._in_turn else None
        if operands is None:
            return None
        # Contiguous, as separate layers' outputs would be: the module's code may take other views of them.
        parts: list[Tensor] = [part.contiguous() for part in operands.product(x, x.dtype).split(self._sizes, dim=-1)]
        # In one assignment, because another thread may call the layers too.
        self._made = _Made(x, version, {i: part for i, part in enumerate(parts) if i != place})
        return parts[place]

    def have_gradients(self) -> bool:
        """Whether a parameter of a layer is trained: operands have no gradient."""
        layers = self.merged.layers
        return any(own is not None and own.requires_grad for layer in layers for own in layer._parameters.values())

    def forget(self) -> None:
        """Drops the outputs that are waiting."""
        self._made = None


@dataclass(frozen=True, eq=False)
class FusedSibling:
    """How a layer computes: as layer ``place`` of ``siblings``."""

    siblings: Siblings
    place: int

    @property
    def forward(self) -> Callable[..., Any]:
        """The ``forward`` of a layer with siblings."""
        return forward

    def separate(self) -> None:
        """Gives all siblings memory of their own again."""
        self.siblings.forget()
        self.siblings.merged.separate()

    def __call__(self, x: Any) -> Tensor | None:
        """The layer's output for ``x [..., K]``; None if it isn't computed here."""
        if type(x) is not Tensor or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
            return None
        if in_forward_mode() or (torch.is_grad_enabled() and (x.requires_grad or self.siblings.have_gradients())):
            return None
        return self.siblings.output(self.place, x)


def forward(self: Any, x: Any) -> Any:
    """The ``forward`` of a layer with siblings, with the arguments of the class's own."""
    fused = fused_of(self)
    out = fused(x) if isinstance(fused, FusedSibling) else None
    return type(self).forward(self, x) if out is None else out
