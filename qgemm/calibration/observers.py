"""Observers: statistics of a layer's inputs, and the static scale that is computed from them.

``scale = clip / 127``, and values beyond ``clip`` saturate. With a zero point, ``scale = (high - low) / 255``, where
``low`` and ``high`` are the minimum and the maximum value, limited to ``-clip`` and ``clip``. Observers differ in
``clip``:

- ``MinMax``: the largest magnitude seen, so that nothing saturates.
- ``MovingAverage``: an average of the batches' largest magnitudes, in which each counts less with every later batch.
- ``Percentile``: the magnitude that a given percentage of the values don't exceed.
- ``MeanSquaredError``: the magnitude that minimizes the squared error of int8.

An observer is a value: ``update`` and ``merge`` return a new one. All keep the minimum and the maximum of every input
column, which costs them nothing. For ``MinMax``, ``Percentile`` and ``MeanSquaredError``, merging in any order gives
the same bits as one pass over the same values, however they are divided into batches; a ``MovingAverage`` depends on
the order and on the batches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from qgemm.calibration.histogram import BINS, Histogram
from qgemm.numerics.formats import INT8, MIN_SCALE, Format
from qgemm.numerics.zero_points import range_to_scale
from qgemm.scheme import QuantScheme

Kind = TypeVar("Kind", bound="Observer")
HistogramKind = TypeVar("HistogramKind", bound="HistogramObserver")


@dataclass(frozen=True, eq=False)
class Observer(ABC):
    """Statistics of the inputs of one layer, ``[..., K]``; a new one is empty.

    - ``tokens``: the number of rows.
    - ``channel_min [K]``, ``channel_max [K]``: float32, on the CPU: the minimum and maximum in each column; None before
      the first row.
    """

    name: ClassVar[str]
    """The name that ``calibrate(observer=...)`` accepts for it."""

    tokens: int = field(default=0, kw_only=True)
    channel_min: Tensor | None = field(default=None, kw_only=True, repr=False)
    channel_max: Tensor | None = field(default=None, kw_only=True, repr=False)

    @property
    def channel_amax(self) -> Tensor | None:
        """The largest magnitude in each column."""
        if self.channel_min is None or self.channel_max is None:
            return None
        return torch.maximum(-self.channel_min, self.channel_max)

    @property
    def amax(self) -> float:
        """The largest magnitude."""
        return 0.0 if self.channel_amax is None else float(self.channel_amax.max())

    @property
    def settings(self) -> dict[str, Any]:
        """Its settings as JSON-ready values, without statistics."""
        return {each.name: getattr(self, each.name) for each in fields(self) if not each.kw_only}

    def update(self: Kind, x: Tensor) -> Kind:
        """Returns an observer with the rows of ``x [..., K]`` added, float16, bfloat16 or float32 on any device.

        Raises ``ValueError`` if ``x`` holds NaN or Inf.
        """
        rows = x.detach().reshape(-1, x.shape[-1])
        if rows.shape[0] == 0:
            return self
        low, high = (bound.float().cpu() for bound in rows.aminmax(dim=0))
        batch = replace(self._blank(), tokens=rows.shape[0], channel_min=low, channel_max=high)
        if not math.isfinite(batch.amax):
            raise ValueError("x holds NaN or Inf, so it has no scale: leave this batch out, or find their cause")
        return self._add(batch._see(rows))

    def merge(self: Kind, other: Kind) -> Kind:
        """Returns the combined statistics. Raises ``ValueError`` for different kinds, settings or widths."""
        if type(other) is not type(self) or other.settings != self.settings:
            raise ValueError(f"{_described(self)} can't be merged with {_described(other)}: both must be of one kind")
        if not other.tokens:
            return self
        if not self.tokens:
            return other
        assert self.channel_min is not None
        assert self.channel_max is not None
        assert other.channel_min is not None
        assert other.channel_max is not None
        if self.channel_min.shape != other.channel_min.shape:
            widths = f"{len(self.channel_min)} and {len(other.channel_min)}"
            raise ValueError(
                f"statistics of inputs with {widths} columns can't be merged: they belong to different layers"
            )
        merged = replace(
            self,
            tokens=self.tokens + other.tokens,
            channel_min=torch.minimum(self.channel_min, other.channel_min),
            channel_max=torch.maximum(self.channel_max, other.channel_max),
        )
        return merged._join(self, other)

    def scale(self, form: Format = INT8) -> float:
        """The scale for ``input_scales``: ``clip / 127``, at least the smallest normal float32; 1 if all values are 0.

        ``form``: the format of the values; for fp8 the scale is ``clip / 448``. Raises ``ValueError`` if no row was
        seen.
        """
        if not self.tokens:
            raise ValueError("no values were seen, so there is no scale: run the model on data first")
        clip = self._clip(form)
        return max(clip / form.steps, MIN_SCALE) if clip else 1.0

    def scale_and_zero_point(self) -> tuple[float, int]:
        """The pair for ``input_scales`` of an asymmetric scheme; raises like ``scale``."""
        if self.channel_min is None or self.channel_max is None:
            raise ValueError("no values were seen, so there is no scale: run the model on data first")
        clip = self._clip(INT8)
        low, high = float(self.channel_min.min()), float(self.channel_max.max())
        return range_to_scale(min(max(low, -clip), 0.0), max(min(high, clip), 0.0))

    def input_scale(self, scheme: QuantScheme) -> float | tuple[float, int]:
        """The value for ``input_scales`` of a layer with ``scheme``, a static one; raises like ``scale``."""
        assert scheme.activation is not None
        with torch.device("cpu"):  # transformers builds models in a context where new tensors are on meta
            return self.scale_and_zero_point() if scheme.has_zero_point else self.scale(scheme.activation.format)

    def _blank(self: Kind) -> Kind:
        return type(self)(**self.settings)

    def _add(self: Kind, batch: Kind) -> Kind:
        """Returns the observer with one more batch, which comes after everything seen so far."""
        return self.merge(batch)

    def _see(self: Kind, rows: Tensor) -> Kind:
        """Returns the observer with what it keeps of these rows ``[tokens, K]`` besides the minima and maxima."""
        return self

    def _join(self: Kind, first: Kind, second: Kind) -> Kind:
        """Returns the observer with what ``first`` and ``second`` keep besides the minima and maxima, combined."""
        return self

    @abstractmethod
    def _clip(self, form: Format) -> float:
        """The largest magnitude that shouldn't saturate."""


@dataclass(frozen=True, eq=False)
class MinMax(Observer):
    """``clip = amax``."""

    name = "min-max"

    def _clip(self, form: Format) -> float:
        return self.amax


@dataclass(frozen=True, eq=False)
class MovingAverage(Observer):
    """``clip = momentum * clip + (1 - momentum) * amax(batch)`` for every batch; for the first one, its ``amax``.

    Merged averages are weighted by their numbers of batches.
    """

    name = "moving-average"
    momentum: float = 0.9
    average: float = field(default=0.0, kw_only=True)
    batches: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a setting out of range."""
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}; it must be 0 or more, and less than 1")

    def _see(self, rows: Tensor) -> MovingAverage:
        return replace(self, average=self.amax, batches=1)

    def _add(self, batch: MovingAverage) -> MovingAverage:
        merged = self.merge(batch)
        if not self.batches:
            return merged
        return replace(merged, average=self.momentum * self.average + (1 - self.momentum) * batch.average)

    def _join(self, first: MovingAverage, second: MovingAverage) -> MovingAverage:
        batches = first.batches + second.batches
        average = (first.average * first.batches + second.average * second.batches) / batches
        return replace(self, average=average, batches=batches)

    def _clip(self, form: Format) -> float:
        return self.average


@dataclass(frozen=True, eq=False)
class HistogramObserver(Observer):
    """An observer that keeps a histogram of magnitudes. ``counts [BINS]``: int64, over all rows."""

    counts: Tensor = field(
        default_factory=lambda: torch.zeros(BINS, dtype=torch.int64, device="cpu"), kw_only=True, repr=False
    )

    @property
    def histogram(self) -> Histogram:
        """The histogram of all values' magnitudes."""
        return Histogram(self.counts, self.amax)

    def _see(self: HistogramKind, rows: Tensor) -> HistogramKind:
        return replace(self, counts=Histogram.of(rows.abs(), self.amax).counts)

    def _join(self: HistogramKind, first: HistogramKind, second: HistogramKind) -> HistogramKind:
        return replace(self, counts=first.histogram.merge(second.histogram).counts)


@dataclass(frozen=True, eq=False)
class Percentile(HistogramObserver):
    """``clip``: the ``percentile``-th percentile of all magnitudes, or up to ``amax / 2048`` more."""

    name = "percentile"
    percentile: float = 99.99

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a setting out of range."""
        if not 0 < self.percentile <= 100:
            raise ValueError(f"percentile is {self.percentile}; it must be above 0, and at most 100")

    def _clip(self, form: Format) -> float:
        return self.histogram.percentile(self.percentile)


@dataclass(frozen=True, eq=False)
class MeanSquaredError(HistogramObserver):
    """``clip``: of ``amax * 2^(-i/32)`` for ``i`` up to 256, the one with the minimum expected squared error of int8.

    For fp8 it is ``amax``: clipping gains nothing in a format whose small values are closer together. Within a bin of
    the histogram, values are assumed to be evenly spread.
    """

    name = "mse"

    def _clip(self, form: Format) -> float:
        if not self.amax or form.storage.is_floating_point:
            return self.amax
        clips = self.amax * 2.0 ** (-torch.arange(257, dtype=torch.float64, device="cpu") / 32)
        errors = squared_error(self.histogram, clips)
        return float(clips[errors.argmin()])


def squared_error(histogram: Histogram, clips: Tensor) -> Tensor:
    """For each clip, float64 ``[n]``: the sum of ``(x - s * q)^2`` over all values, in units of a bin's width squared.

    ``s = clip / 127`` and ``q = min(round(x / s), 127)``. From 0 to ``t``, the integral of the error is
    ``n * s^3 / 12 + (t - n * s)^3 / 3`` with ``n = min(round(t / s), 127)``: ``s^3 / 12`` for each whole step, plus the
    part beyond the last step. The difference between a bin's edges is its mean error.
    """
    used = int(histogram.amax / histogram.bin_width) + 1
    edges = torch.arange(min(used, BINS) + 1, dtype=torch.float64, device="cpu")
    steps = clips[:, None] / INT8.steps / histogram.bin_width
    whole = (edges / steps).round().clamp(max=INT8.high)
    integral = whole * steps**3 / 12 + (edges - whole * steps) ** 3 / 3
    return integral.diff(dim=1) @ histogram.counts[: edges.numel() - 1].double()


def _described(observer: Observer) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in observer.settings.items())
    return f"{type(observer).__name__}({settings})"


OBSERVERS: dict[str, type[Observer]] = {
    observer.name: observer for observer in (MinMax, MovingAverage, Percentile, MeanSquaredError)
}
"""The observers, by name."""


def resolve_observer(observer: str | Observer) -> Observer:
    """A new observer with that name, or with the settings of ``observer``; raises ``ValueError`` for anything else."""
    if isinstance(observer, Observer):
        return observer._blank()
    if not isinstance(observer, str) or observer not in OBSERVERS:
        raise ValueError(f"observer is {observer!r}; it must be one of {sorted(OBSERVERS)}, or an Observer")
    return OBSERVERS[observer]()


def parse_observer(name: Any, settings: Any) -> Observer:
    """The observer with that name and with stored ``Observer.settings``.

    Raises ``ValueError``, ``KeyError``, ``TypeError`` or ``AttributeError`` for anything else.
    """
    kind = OBSERVERS[name]
    if set(settings) != set(kind().settings) or not all(type(value) in (int, float) for value in settings.values()):
        raise ValueError(f"{name} has no settings {settings}")
    return kind(**settings)
