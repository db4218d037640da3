"""``RowSteps``: the step of each row of a layer's scales, where all scales of a row are multiples of one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgemm.kernels.weight_only.int8_config import MIN_ROWS_FOR_STEPS
from qgemm.numerics.groups import steps_of

MAX_SEARCHES = 8
"""Per layer: if a layer's scales keep changing, no more searches are made."""


class RowSteps:
    """The result of ``steps_of`` for a layer's scales, computed once, and again when the scales have changed.

    It isn't part of the layer's state: it follows from the scales, and is neither saved nor copied.
    """

    _scale: Tensor | None = None
    _place: tuple[int, int] = (0, 0)
    _step: Tensor | None = None
    _searches: int = 0

    def of(self, scale: Tensor, rows: int) -> Tensor | None:
        """The float32 step ``[N]`` of ``scale [N, groups]`` for a product of ``rows``; None if steps are of no use.

        Under a compiler this is the last result. While a CUDA graph is captured, no search is made.
        """
        if torch.compiler.is_compiling():
            return self._step
        if rows < MIN_ROWS_FOR_STEPS or not _are_of_use(scale):
            return None
        place = scale.data_ptr(), 0 if scale.is_inference() else scale._version
        if scale is not self._scale or place != self._place:
            if self._searches == MAX_SEARCHES or torch.cuda.is_current_stream_capturing():
                return None
            self._scale, self._place, self._step = scale, place, found_steps(scale)
            self._searches += 1
        return self._step

    def __getstate__(self) -> dict[str, Any]:
        """An empty state."""
        return {}


def _are_of_use(scale: Tensor) -> bool:
    return scale.is_cuda


def found_steps(scale: Tensor) -> Tensor | None:
    """``steps_of`` the scales if they are on a GPU; else None, because only there steps are of use."""
    if not _are_of_use(scale):
        return None
    with torch.no_grad():
        return steps_of(scale.detach())
