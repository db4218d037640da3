"""``FusedNorm``: a norm outside of fused layers, such as a model's last, in one kernel instead of eight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qgemm.nn.blocks.binding import fused_of
from qgemm.nn.blocks.steps import NormStep
from qgemm.ops.direct import in_forward_mode, is_exporting
from qgemm.ops.norms import add_norm

_PLAIN = {Tensor, nn.Parameter, type(None)}  # and not a part of a norm that is sharded among processes


@dataclass(frozen=True, eq=False)
class FusedNorm:
    """How a norm computes: ``step`` holds the module, and says which norm it is."""

    step: NormStep

    @property
    def forward(self) -> Callable[..., Any]:
        """The ``forward`` of a fused norm."""
        return forward

    def separate(self) -> None:
        """Does nothing: it merges no weights."""

    def __call__(self, x: Any) -> Tensor | None:
        """``norm(x)`` for ``x [..., K]``; None if it can't be computed here."""
        if type(x) is not Tensor or torch.is_autocast_enabled(x.device.type) or in_forward_mode():
            return None
        vectors = self.step.vectors(x)
        if vectors is None or any(type(each) not in _PLAIN for each in vectors):
            return None
        if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, *vectors)):
            return None
        if is_exporting():
            return None
        assert self.step.norm is not None
        return add_norm(x, None, None, *vectors, self.step.norm)[1]


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The ``forward`` of a fused norm, with the arguments of the class's own."""
    fused = fused_of(self)
    out = fused(args[0]) if isinstance(fused, FusedNorm) and len(args) == 1 and not kwargs else None
    return type(self).forward(self, *args, **kwargs) if out is None else out
