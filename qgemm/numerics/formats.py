"""``Format``: a number format that values are rounded to, and all that the package knows of its numbers.

With a scale, ``q = nearest(x / scale)`` is a value of the format, and ``q * scale`` stands for ``x``; halves round to
even. The scale is ``amax / steps``, in float32, at least ``MIN_SCALE``; 1 where all values are 0, NaN where one is NaN
or Inf.

A new format is a row in ``FORMATS``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

MIN_SCALE = torch.finfo(torch.float32).tiny
"""The smallest scale: the smallest normal float32. A smaller one would have lost its own precision."""


@dataclass(frozen=True)
class Format:
    """One number format.

    - ``name``: what schemes call it.
    - ``storage``: the dtype of one value; ``bits`` of it count, and packed values have no more.
    - ``low``, ``high``: the smallest and the largest value.
    - ``steps``: the scale is the largest magnitude over this; the range, where there is a zero point.
    - ``accumulator``: the dtype of sums of products of two values. ``max_k``: the longest sum that it holds whatever
      the values are.
    """

    name: str
    storage: torch.dtype
    bits: int
    low: float
    high: float
    steps: float
    accumulator: torch.dtype
    max_k: int = sys.maxsize

    @cached_property
    def asymmetric(self) -> Format:
        """The format with a zero point: one value more, as none has to have its opposite."""
        return replace(self, low=self.low - 1, steps=self.high - self.low + 1)

    def scale_of(self, amax: Tensor) -> Tensor:
        """The scales, float32, of values whose largest magnitudes are ``amax``."""
        amax = amax.float()
        # By a tensor: a GPU divides by a number with its rounded reciprocal.
        scale = (amax / torch.full_like(amax, self.steps)).clamp(min=MIN_SCALE)
        return torch.where(amax == 0, 1.0, scale).masked_fill(~amax.isfinite(), torch.nan)

    def nearest_(self, quotients: Tensor) -> Tensor:
        """Turns float ``x / scale`` into the nearest values, in place and still in float. Saturates; NaN stays."""
        if self.storage.is_floating_point:
            return quotients.copy_(quotients.clamp_(self.low, self.high).to(self.storage))
        return quotients.round_().clamp_(self.low, self.high)

    def range_of(self, values: Tensor) -> tuple[float, float]:
        """The smallest and the largest of ``values`` of ``storage``; NaN if one is."""
        low, high = (values.float() if values.is_floating_point() else values).aminmax()
        return low.item(), high.item()

    def store(self, quotients: Tensor) -> Tensor:
        """The nearest values of float ``x / scale``, whose memory is used, as ``storage``; 0 for NaN."""
        return self.nearest_(quotients).nan_to_num_(0.0).to(self.storage)


# Without -128, so that each value has its opposite.
INT8 = Format("int8", torch.int8, 8, -127, 127, 127, torch.int32, (2**31 - 1) // (128 * 128))
# 7.5 steps: the largest value errs by half a step, as any other may.
INT4 = Format("int4", torch.int8, 4, -8, 7, 7.5, torch.float32)

FORMATS: dict[str, Format] = {each.name: each for each in (INT8, INT4)}
"""The formats by name."""
