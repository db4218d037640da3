"""``RowSteps``: the step of each row of a layer's scales, where all scales of a row are multiples of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgemm.kernels.weight_only.int8_config import MIN_ROWS_FOR_STEPS
from qgemm.numerics.groups import steps_of

MAX_SEARCHES = 8
"""Of a layer: of one whose scales are others at every call, no more are made."""


class RowSteps:
    """What ``steps_of`` finds of a layer's scales, once, and again when they are others.

    It is no state of the layer: it follows from the scales, isn't saved, and isn't copied.
    """

    _scale: Tensor | None = None
    _place: tuple[int, int] = (0, 0)
    _step: Tensor | None = None
    _searches: int = 0

    def of(self, scale: Tensor, rows: int) -> Tensor | None:
        """The float32 step ``[N]`` of ``scale [N, groups]`` for a product of ``rows``; None if none is of use.

        To a compiler it is what was found before. While a CUDA graph is captured, nothing new is looked for.
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
        """Nothing."""
        return {}


def _are_of_use(scale: Tensor) -> bool:
    return scale.is_cuda


def found_steps(scale: Tensor) -> Tensor | None:
    """``steps_of`` scales on a GPU, where they are of use."""
    if not _are_of_use(scale):
        return None
    with torch.no_grad():
        return steps_of(scale.detach())
