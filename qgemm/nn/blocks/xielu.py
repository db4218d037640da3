"""``FusedXielu``: an activation with parameters, xIELU, in one kernel instead of 18."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qgemm.kernels.xielu.coefficients import Coefficients
from qgemm.ops.rows import xielu


@dataclass(frozen=True, eq=False)
class FusedXielu:
    """``module``: the activation; its parameters are read in each call."""

    module: Any

    @property
    def coefficients(self) -> Coefficients:
        """Those of the module."""
        return Coefficients(*(getattr(self.module, name) for name in Coefficients._fields))

    def __call__(self, x: Tensor) -> Tensor:
        """The activation of ``x``."""
        return xielu(x, self.coefficients)
