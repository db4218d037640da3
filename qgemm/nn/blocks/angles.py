"""``FusedAngles``: the cosines and sines of a model's rotary embedding, in one kernel instead of twelve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qgemm.nn.blocks.binding import fused_of
from qgemm.ops.direct import is_exporting

FREQUENCIES, _SCALING = "inv_freq", "attention_scaling"


def angles_of(module: nn.Module, layer_type: str) -> tuple[Tensor | None, float | None]:
    """The frequencies of a rotary embedding, and the factor of its cosines and sines; of ``layer_type``, if given."""
    prefix = f"{layer_type}_" if layer_type else ""
    return module._buffers.get(f"{prefix}{FREQUENCIES}"), getattr(module, f"{prefix}{_SCALING}", None)


class Table(NamedTuple):
    """The form of cosines and sines.

    - ``layout``: as in ``dispatch.rotary_angles``.
    - ``in_float``: whether they are float32, instead of having the dtype of the hidden states.
    - ``axes``: the axis of each pair, if positions have several; otherwise empty.
    """

    layout: str
    in_float: bool = False
    axes: tuple[int, ...] = ()

    def of(
        self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype, axes: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines for hidden states in ``dtype``. ``axes``: those of the table, on the device."""
        dtype = torch.float32 if self.in_float else dtype
        cos, sin = torch.ops.qgemm.rotary_angles(positions, frequencies, scale, self.layout, dtype, axes)
        return cos, sin

    def axes_on(self, device: torch.device) -> Tensor | None:
        """``axes`` as a tensor, or None if there are none."""
        return torch.tensor(self.axes, dtype=torch.int32, device=device) if self.axes else None


@dataclass(frozen=True, eq=False)
class FusedAngles:
    """How a rotary embedding computes: ``cos(position * inv_freq) * attention_scaling``, and sines likewise.

    - ``tables``: their form by the type of the layers that they are for; "" stands for all types.
    - ``own``: the frequencies of an embedding that computes them in every call and doesn't read its buffer, likewise.
    - ``axes``: those of the tables that have any, likewise.
    """

    module: nn.Module
    tables: Mapping[str, Table]
    own: dict[str, Tensor] = field(default_factory=dict)
    axes: dict[str, Tensor | None] = field(default_factory=dict)

    @property
    def forward(self) -> Callable[..., Any]:
        """The ``forward`` of a fused rotary embedding."""
        return forward

    def separate(self) -> None:
        """Does nothing: there are no weights."""

    def __call__(self, x: Any, positions: Any, layer_type: Any = "") -> tuple[Tensor, Tensor] | None:
        """Cosines and sines for ``x`` at ``positions [B, S]`` or ``[A, B, S]``; None if they can't be computed here."""
        if type(x) is not Tensor or type(positions) is not Tensor:
            return None
        table = self.tables.get(layer_type)
        frequencies, scale = angles_of(self.module, layer_type)
        if table is None or frequencies is None or not isinstance(scale, float):
            return None
        if positions.dim() != 2 + bool(table.axes) or positions.shape[0] <= max(table.axes, default=-1):
            return None
        if not x.device == positions.device == frequencies.device:
            return None
        if positions.is_floating_point() or is_exporting():
            return None
        if (own := self.own.get(layer_type)) is not None:
            frequencies = self.own[layer_type] = own.to(x.device)
        if (axes := self.axes.get(layer_type)) is not None:
            axes = self.axes[layer_type] = axes.to(x.device)
        return table.of(positions, frequencies, scale, x.dtype, axes)


def forward(self: Any, x: Any, position_ids: Any, *args: Any, **others: Any) -> Any:
    """The ``forward`` of a fused rotary embedding, with the arguments of the class's own."""
    fused = fused_of(self)
    told = (*args, *others.values())  # empty, or the type of the layers
    known = isinstance(fused, FusedAngles) and len(told) <= 1 and set(others) <= {"layer_type"}
    out = fused(x, position_ids, *told) if known else None
    return type(self).forward(self, x, position_ids, *args, **others) if out is None else out
