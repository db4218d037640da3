"""``Siblings``: layers that read one input, in a module that is called as it is: the first call computes them all.

The module's code calls one after the other, with the same tensor. What the first one computes for the others is kept
until they are called. Layers that are called in another way than when they were found compute by themselves from then
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
    """What was computed of ``x`` as it was at ``version``, and waits for a layer, by its place."""

    x: Tensor
    version: int
    waiting: dict[int, Tensor]


class Siblings:
    """``layers``, computed by one product, whose columns wait for their layer."""

    def __init__(self, layers: Sequence[LinearLayer]) -> None:
        """Merges the weights. Raises ``ValueError`` if they can't be."""
        self.merged = MergedWeights(layers)
        self._sizes = [layer.out_features for layer in layers]
        self._in_turn = True
        self._made: _Made | None = None

    def output(self, place: int, x: Tensor) -> Tensor | None:
        """That of layer ``place``; None if it must compute by itself."""
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
        # As they would be: the module's code may ask for another view.
        parts: list[Tensor] = [part.contiguous() for part in operands.product(x, x.dtype).split(self._sizes, dim=-1)]
        # In one assignment, since another thread may call them too.
        self._made = _Made(x, version, {i: part for i, part in enumerate(parts) if i != place})
        return parts[place]

    def have_gradients(self) -> bool:
        """Whether a parameter of a layer is trained: what the product reads has no gradient."""
        layers = self.merged.layers
        return any(own is not None and own.requires_grad for layer in layers for own in layer._parameters.values())

    def forget(self) -> None:
        """Keeps nothing for anybody."""
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
        """Gives all of them memory of their own again."""
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
    """The ``forward`` of a layer with siblings, called as the class's own."""
    fused = fused_of(self)
    out = fused(x) if isinstance(fused, FusedSibling) else None
    return type(self).forward(self, x) if out is None else out
