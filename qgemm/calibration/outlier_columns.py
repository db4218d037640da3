"""Outlier columns: the few input channels with large values stay in 16 bits, so that the others get a finer scale.

Dettmers et al. 2022, "LLM.int8()", arXiv 2208.07339: columns with a magnitude of 6 or more are multiplied separately.
That paper finds them anew for every input. Here they are found once, from calibration data, because large models have
their outliers in the same channels for all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qgemm.calibration.method import Block, LayerWork, Method, Part
from qgemm.numerics.integers import round_up

COLUMNS_AT_A_TIME = 16
"""Counts of outlier columns are multiples of this, the number that a tensor core processes at once."""

# With more than a quarter of all columns, int8 gains little for the rest.
_MIN_COLUMNS_PER_OUTLIER = 4


@dataclass(frozen=True)
class OutlierColumns(Method):
    """Keeps the columns with the largest values of every layer's input in 16 bits, if the layer's scheme allows that.

    - ``threshold``: keep columns that reach this magnitude on the calibration data; layers without any are unchanged.
    - ``count``: instead, the number of columns to keep in every layer.

    Either number is rounded up to a multiple of 16 by adding the next largest columns. It comes before methods that
    round weights. Layers without such columns, or that can't keep all of them, get a note. After Dettmers et al. 2022,
    "LLM.int8()", arXiv 2208.07339.
    """

    name: ClassVar[str] = "outlier-columns"
    settles: ClassVar[tuple[Part, ...]] = ("inputs",)
    threshold: float = 6.0
    count: int | None = None

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a setting out of range."""
        if not self.threshold > 0:
            raise ValueError(f"threshold is {self.threshold}; it must be greater than 0")
        if self.count is not None and self.count < 1:
            raise ValueError(f"count is {self.count}; it must be 1 or more, or None")

    def apply(self, block: Block) -> None:
        """Chooses columns, and changes the schemes of layers."""
        seen = block.collect()
        for name, work in block.layers.items():
            if name in seen:
                self._choose(work, seen[name].channel_amax)
            else:
                work.notes.append("outlier-columns: it saw no tokens")

    def _choose(self, work: LayerWork, channel_amax: Tensor) -> None:
        wanted = self.count or int((channel_amax >= self.threshold).sum())
        if not wanted:
            return
        most = len(channel_amax) // _MIN_COLUMNS_PER_OUTLIER // COLUMNS_AT_A_TIME * COLUMNS_AT_A_TIME
        count = min(round_up(wanted, COLUMNS_AT_A_TIME), most)
        if not count:
            work.notes.append(f"outlier-columns: it has too few columns, {len(channel_amax)}")
            return
        try:
            scheme = work.scheme.with_outliers(count)
        except ValueError:
            work.notes.append(f"outlier-columns: scheme {work.scheme.name!r} has no form with them")
            return
        if count < wanted:
            work.notes.append(f"outlier-columns: the largest {count} of {wanted}")
        work.scheme, work.outlier_columns = scheme, largest_columns(channel_amax, count)
        work.undecide()


def fill_columns(block: Block) -> None:
    """Chooses columns for layers whose scheme keeps some, if no method has: those with the largest values.

    A layer that saw no tokens, or has too few columns, gets the scheme without outlier columns, and a note.
    """
    works = {}
    for name, work in block.layers.items():
        if work.scheme.outlier_columns and work.outlier_columns is None:
            works[name] = work, work.scheme.outlier_columns
    seen = block.collect(works) if works else {}
    for name, (work, count) in works.items():
        if name in seen and count <= len(seen[name].channel_amax):
            work.outlier_columns = largest_columns(seen[name].channel_amax, count)
        else:
            why = "it saw no tokens" if name not in seen else f"it has {len(seen[name].channel_amax)} columns"
            work.notes.append(f"no columns are kept in 16 bits: {why}")
            work.scheme = work.scheme.without_outliers()


def largest_columns(channel_amax: Tensor, count: int) -> Tensor:
    """The ``count`` columns of largest magnitude, int64, ascending; of equal ones, the first."""
    return torch.sort(channel_amax, descending=True, stable=True).indices[:count].sort().values
