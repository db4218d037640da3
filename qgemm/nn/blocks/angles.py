"""``FusedAngles``: the cosines and sines of a model's rotary embedding, as one kernel in place of twelve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qgemm.nn.blocks.binding import fused_of


@dataclass(frozen=True, eq=False)
class FusedAngles:
    """How a rotary embedding computes: ``cos(position * inv_freq) * attention_scaling``, and sines likewise.

    ``layout``: as ``dispatch.rotary_angles`` has it.
    """

    module: nn.Module
    layout: str

    @property
    def forward(self) -> Callable[..., Any]:
        """The ``forward`` of a fused rotary embedding."""
        return forward

    def separate(self) -> None:
        """It multiplies with nothing."""

    def __call__(self, x: Any, positions: Any) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines in the dtype of ``x`` for ``positions [B, S]``; None if they can't be computed here."""
        if type(x) is not Tensor or type(positions) is not Tensor or positions.dim() != 2:
            return None
        frequencies, scale = self.module._buffers.get("inv_freq"), getattr(self.module, "attention_scaling", None)
        if frequencies is None or not isinstance(scale, float):
            return None
        if not x.device == positions.device == frequencies.device:
            return None
        if positions.is_floating_point() or (torch.compiler.is_compiling() and torch.compiler.is_exporting()):
            return None
        cos, sin = torch.ops.qgemm.rotary_angles(positions, frequencies, scale, self.layout, x.dtype)
        return cos, sin


def forward(self: Any, x: Any, position_ids: Any, **others: Any) -> Any:
    """The ``forward`` of a fused rotary embedding, called as the class's own."""
    fused = fused_of(self)
    out = fused(x, position_ids) if isinstance(fused, FusedAngles) and not others else None
    return type(self).forward(self, x, position_ids, **others) if out is None else out
