"""What a run found, as values that are saved in JSON and read back to draw the table and the plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import write_json

PLAIN, OUTLIERS, MINILM = "plain", "outliers", "minilm"
SUBJECTS = (PLAIN, OUTLIERS, MINILM)
"""The language model as it was trained, with outlier channels, and all-MiniLM-L6-v2."""


@dataclass(frozen=True)
class Result:
    """One variant of one model, calibrated on data of one seed. Where it failed, ``reason`` says why.

    ``device``: what it ran on. ``bytes``: of all weights. ``perplexity`` and ``kl`` are of the language model, the
    cosines and ``neighbours`` of MiniLM; ``seconds``: to quantize.
    """

    variant: str
    subject: str
    seed: int
    note: str = ""
    device: str = ""
    bytes: int | None = None
    perplexity: float | None = None
    kl: float | None = None
    least_cosine: float | None = None
    mean_cosine: float | None = None
    neighbours: float | None = None
    seconds: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Mean:
    """Of one figure over the seeds: the mean, and the largest less the least."""

    mean: float
    spread: float

    def times(self, factor: float) -> Mean:
        """The same in another unit."""
        return Mean(self.mean * factor, self.spread * factor)


@dataclass
class Run:
    """Everything that one run measured, where, and on what."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    results: list[Result] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Writes the run as JSON, in place of what was there."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Run:
        """A run as ``save`` wrote it."""
        values = json.loads(path.read_text(encoding="utf-8"))
        values["results"] = [Result(**entry) for entry in values["results"]]
        return cls(**values)

    @property
    def variants(self) -> list[str]:
        """Their names, in the order of the first result of each."""
        return list(dict.fromkeys(one.variant for one in self.results))

    def of(self, variant: str, subject: str) -> list[Result]:
        """The results of one variant of one model that didn't fail."""
        return [one for one in self.results if one.variant == variant and one.subject == subject and one.reason is None]

    def mean(self, variant: str, subject: str, figure: str) -> Mean | None:
        """One figure (a field of ``Result``) over the seeds, or None if it wasn't measured."""
        return mean_of(getattr(one, figure) for one in self.of(variant, subject))


def mean_of(values: Iterable[float | None]) -> Mean | None:
    """The mean and the spread of those values that there are, or None if there are none."""
    known = [value for value in values if value is not None]
    return Mean(statistics.fmean(known), max(known) - min(known)) if known else None
