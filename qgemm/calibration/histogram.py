"""``Histogram``: how many values of each magnitude there were, in a fixed number of bins, whatever their range.

The bins divide ``[0, 2^e)`` evenly, where ``2^e`` is the smallest power of two above the largest magnitude. When a
larger one comes, the range is doubled as often as needed and neighbouring bins are added up. A bin's edges are powers
of two times whole numbers, so rounding never moves a value to another bin: the counts depend on the values alone, not
on their order or how they were divided, and merging histograms is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

_LOG2_BINS = 12
BINS = 1 << _LOG2_BINS
"""The largest magnitude lies in the upper half of them, so a bin is at most ``amax / 2048`` wide."""

# Below this, bins don't shrink further: their width must be a normal float32, and 2^-100 is no realistic activation.
_LEAST_EXPONENT = -100
# Values that are counted at a time, because indices take 8 bytes each.
_PIECE = 1 << 22


@dataclass(frozen=True, eq=False)
class Histogram:
    """``counts [BINS]``: int64, on the CPU. ``amax``: the largest magnitude so far."""

    counts: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64, device="cpu"))
    amax: float = 0.0

    @classmethod
    def of(cls, magnitudes: Tensor, amax: float) -> Histogram:
        """The histogram of values of 0 or more, in any shape; ``amax`` is the largest of them, finite."""
        counts = torch.zeros(BINS, dtype=torch.int64, device=magnitudes.device)
        factor = 2.0 ** (_LOG2_BINS - _exponent(amax))
        for piece in magnitudes.reshape(-1).split(_PIECE):
            counts += torch.bincount((piece.float() * factor).long(), minlength=BINS)
        return cls(counts.cpu(), amax)

    @property
    def bin_width(self) -> float:
        """The width of a bin."""
        return 2.0 ** (_exponent(self.amax) - _LOG2_BINS)

    def merge(self, other: Histogram) -> Histogram:
        """The histogram of both sets of values; the same in either order."""
        amax = max(self.amax, other.amax)
        return Histogram(self._widened(amax) + other._widened(amax), amax)

    def _widened(self, amax: float) -> Tensor:
        # From 2^12 on, everything lies in the first bin.
        doublings = min(_exponent(amax) - _exponent(self.amax), _LOG2_BINS)
        counts = torch.zeros_like(self.counts)
        counts[: BINS >> doublings] = self.counts.view(-1, 1 << doublings).sum(1)
        return counts

    def percentile(self, percentile: float) -> float:
        """A magnitude that at least ``percentile`` % of the values don't exceed: a bin's upper edge, or ``amax``."""
        wanted = math.ceil(int(self.counts.sum()) * percentile / 100)
        index = int(torch.searchsorted(self.counts.cumsum(0), wanted))
        return min((index + 1) * self.bin_width, self.amax)


def _exponent(amax: float) -> int:
    """The smallest ``e`` with ``amax < 2^e``."""
    return max(math.frexp(amax)[1], _LEAST_EXPONENT) if amax else _LEAST_EXPONENT
