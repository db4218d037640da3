"""``RowSteps``: the step of each row of a layer's scales, where all scales of a row are multiples of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgemm.kernels.weight_only.int8_config import MIN_ROWS_FOR_STEPS
from qgemm.numerics.groups import steps_of

_MAX_SEARCHES = 8  # of a layer, for one whose scales are others at every call


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

        While a CUDA graph is captured, and to a compiler, it is what was found before.
        """
        if torch.compiler.is_compiling():
            return self._step
        if rows < MIN_ROWS_FOR_STEPS or not scale.is_cuda:
            return None
        place = scale.data_ptr(), 0 if scale.is_inference() else scale._version
        if scale is not self._scale or place != self._place:
            if self._searches == _MAX_SEARCHES or torch.cuda.is_current_stream_capturing():
                return None
            self._scale, self._place, self._step = scale, place, found_steps(scale)
            self._searches += 1
        return self._step

    def __getstate__(self) -> dict[str, Any]:
        """Nothing."""
        return {}


def found_steps(scale: Tensor) -> Tensor | None:
    """``steps_of`` scales on a GPU, which is where they are of use."""
    if not scale.is_cuda:
        return None
    with torch.no_grad():
        return steps_of(scale.detach())
