"""What was measured, as values that go to JSON and back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.results import write_json

PREFILL, DECODE, SERVE, ENCODE = "prefill", "decode", "serve", "encode"
FIRST_TOKEN, FIRST_CALL = "first token", "first call"
HTTP, STREAM = "http", "http stream"


@dataclass(frozen=True)
class Figure:
    """One provider on one model.

    - ``value``: tokens a second of prefill, decode and first call, new ones of serve and http; sentences a second of
      encode; seconds to the first token, from the float model in memory on. None if it wasn't measured, and
      ``reason`` says why.
    - ``batch``, ``context``: sequences, and the tokens that each has already; of serve and http the most of a prompt.
    - ``cache``: of compiled kernels, ``"cold"`` or ``"warm"``, for first calls.
    - ``weight_bytes``, ``peak_bytes``: allocated on the GPU once the model is prepared, and at most while it was timed;
      not of serve and http, whose cache takes nearly all that is free.
    - ``cosine``: of the outputs to the float model's, the minimum.
    - ``note``: what a reader has to know, such as that the value is extrapolated.
    """

    model: str
    layers: int
    provider: str
    measure: str
    batch: int = 0
    context: int = 0
    value: float | None = None
    cache: str = ""
    weight_bytes: int | None = None
    peak_bytes: int | None = None
    cosine: float | None = None
    note: str = ""
    reason: str = ""

    @property
    def size(self) -> tuple[str, int, int, str]:
        """What is measured, for tables."""
        return self.measure, self.batch, self.context, self.cache

    @property
    def seconds(self) -> float:
        """Of one step of decode, or of one pass."""
        assert self.value is not None
        if self.measure == FIRST_TOKEN:
            return self.value
        return self.batch * (self.context if self.measure == PREFILL else 1) / self.value


@dataclass
class Run:
    """Everything that a run measured, where, and by which command."""

    environment: dict[str, Any]
    command: str
    figures: list[Figure] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Writes the run as JSON, in place of what was there."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Run:
        """A run as ``save`` wrote it."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "figures": [Figure(**figure) for figure in values["figures"]]})


def extrapolated(few: Figure, more: Figure, layers: int) -> Figure:
    """The figure of a model of ``layers`` layers, on the line through two smaller ones; its note says so.

    Only for prefill and decode: what comes before and after the layers, and every layer, takes as long as it did.
    """
    seconds = more.seconds + (more.seconds - few.seconds) / (more.layers - few.layers) * (layers - more.layers)
    work = more.seconds * (more.value or 0.0)
    note = f"extrapolated from {few.layers} and {more.layers} layers to {layers}"
    return replace(more, layers=layers, value=work / seconds, weight_bytes=None, peak_bytes=None, note=note)
