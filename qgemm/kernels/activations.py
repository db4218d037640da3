"""The step between the two products of an MLP: ``act(gate) * up``, or ``act(gate)`` if there is no ``up``.

- ``activated``: for a dense MLP, rounded like its float modules.
- ``GatedActivation``: for an expert, computed in float32. ``GPT_OSS`` is GPT-OSS's, which clamps both halves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: _rounded_once(x, lambda wide: wide * torch.sigmoid(1.702 * wide)),
}
"""By name; ``stages/activations.py`` has their device code. Each rounds once.

``"gelu"`` is exact (erf), ``"relu2"`` ``relu(x) ** 2``, ``"quick_gelu"`` CLIP's ``x * sigmoid(1.702 * x)``.
"""


def _rounded_once(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """``function`` of ``x`` in float32, or in float64 if ``x`` is that."""
    return function(x.float()).to(x.dtype) if x.itemsize < 4 else function(x)


MATMUL_ACTIVATIONS = ("gelu", "relu", "silu")
"""The activations that ``matmul`` applies."""


def activated(x: Tensor, activation: str, gated: bool, up_first: bool = False) -> Tensor:
    """``round(round(act(gate)) * up)`` of ``x [..., 2I]``, gates before ups: ``[..., I]`` in the dtype of ``x``.

    Without ``gated``, ``round(act(x))``. ``activation``: one of ``ACTIVATIONS``. ``up_first``: the ups are before the
    gates.
    """
    if not gated:
        return ACTIVATIONS[activation](x)
    gate, up = x.chunk(2, dim=-1)[:: -1 if up_first else 1]
    return ACTIVATIONS[activation](gate) * up


class Gates(NamedTuple):
    """Says that a layer's outputs are gates and ups: ``activated(outputs, activation, True, up_first)`` is wanted."""

    activation: str
    up_first: bool = False


@dataclass(frozen=True)
class GatedActivation:
    """``act(gate) * (up + up_offset)``; without ``gated``, ``act(gate)`` of all columns.

    ``name``: one of ``ACTIVATIONS``. ``alpha``, for ``"silu"`` only: ``gate * sigmoid(alpha * gate)``. ``limit``: the
    gate is first clamped to at most this, and ``up`` to at most this in magnitude. Raises ``ValueError`` for invalid
    values.
    """

    name: str = "silu"
    gated: bool = True
    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.name not in ACTIVATIONS:
            raise ValueError(f"name is {self.name!r}; it must be one of {sorted(ACTIVATIONS)}")
        if self.limit is not None and not 0 < self.limit < math.inf:
            raise ValueError(f"limit is {self.limit}; it must be a positive number, or None for no limit")
        if not math.isfinite(self.alpha) or (self.alpha != 1.0 and self.name != "silu"):
            raise ValueError(f"alpha is {self.alpha} for {self.name!r}; only 'silu' has one other than 1")
        if not math.isfinite(self.up_offset) or (self.up_offset != 0.0 and not self.gated):
            raise ValueError(f"up_offset is {self.up_offset} with gated={self.gated}; it needs a gate")

    def columns(self, intermediate: int) -> int:
        """How many columns the first product has for ``intermediate`` columns after the activation."""
        return 2 * intermediate if self.gated else intermediate

    def __call__(self, g: Tensor) -> Tensor:
        """The activation of ``g [..., columns(I)]``, gates before ups, as float32 ``[..., I]``."""
        gate, up = g.float().chunk(2, dim=-1) if self.gated else (g.float(), None)
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
            up = up if up is None else up.clamp(-self.limit, self.limit)
        out = gate * torch.sigmoid(self.alpha * gate) if self.alpha != 1.0 else ACTIVATIONS[self.name](gate)
        return out if up is None else out * (up + self.up_offset)


GPT_OSS = GatedActivation("silu", limit=7.0, alpha=1.702, up_offset=1.0)
"""GPT-OSS's: ``(up + 1) * gate * sigmoid(1.702 * gate)``, clamped to 7."""
