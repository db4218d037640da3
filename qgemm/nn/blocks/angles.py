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
    """The form of cosines and sines: their layout, as in ``dispatch.rotary_angles``, and whether they are float32.

    Otherwise they have the dtype of the hidden states.
    """

    layout: str
    in_float: bool = False


@dataclass(frozen=True, eq=False)
class FusedAngles:
    """How a rotary embedding computes: ``cos(position * inv_freq) * attention_scaling``, and sines likewise.

    - ``tables``: their form by the type of the layers that they are for; "" stands for all types.
    - ``own``: the frequencies of an embedding that computes them in every call and doesn't read its buffer, likewise.
    """

    module: nn.Module
    tables: Mapping[str, Table]
    own: dict[str, Tensor] = field(default_factory=dict)

    @property
    def forward(self) -> Callable[..., Any]:
        """The ``forward`` of a fused rotary embedding."""
        return forward

    def separate(self) -> None:
        """Does nothing: there are no weights."""

    def __call__(self, x: Any, positions: Any, layer_type: Any = "") -> tuple[Tensor, Tensor] | None:
        """Cosines and sines in the dtype of ``x`` for ``positions [B, S]``; None if they can't be computed here."""
        if type(x) is not Tensor or type(positions) is not Tensor or positions.dim() != 2:
            return None
        table = self.tables.get(layer_type)
        frequencies, scale = angles_of(self.module, layer_type)
        if table is None or frequencies is None or not isinstance(scale, float):
            return None
        if not x.device == positions.device == frequencies.device:
            return None
        if positions.is_floating_point() or is_exporting():
            return None
        if (own := self.own.get(layer_type)) is not None:
            frequencies = self.own[layer_type] = own.to(x.device)
        dtype = torch.float32 if table.in_float else x.dtype
        cos, sin = torch.ops.qgemm.rotary_angles(positions, frequencies, scale, table.layout, dtype)
        return cos, sin


def forward(self: Any, x: Any, position_ids: Any, *args: Any, **others: Any) -> Any:
    """The ``forward`` of a fused rotary embedding, with the arguments of the class's own."""
    fused = fused_of(self)
    told = (*args, *others.values())  # empty, or the type of the layers
    known = isinstance(fused, FusedAngles) and len(told) <= 1 and set(others) <= {"layer_type"}
    out = fused(x, position_ids, *told) if known else None
    return type(self).forward(self, x, position_ids, *args, **others) if out is None else out
