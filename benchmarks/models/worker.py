"""A process of the benchmark: ``python -m benchmarks.models.worker JOB FILE`` adds a line a figure to a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.measure import Sizes, measure_decoder, measure_encoder
from benchmarks.models.providers import PROVIDERS
from benchmarks.models.results import HTTP, Figure
from benchmarks.models.shapes import MODELS, ModelShape


@dataclass(frozen=True)
class Job:
    """What a process measures: one provider of a decoder, or all that are named of an encoder."""

    model: str
    layers: int
    providers: tuple[str, ...]
    measures: tuple[str, ...]
    cache: str = ""
    sizes: Sizes = field(default_factory=Sizes)

    def to_json(self) -> str:
        """As ``from_json`` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """As ``to_json`` wrote it."""
        values: dict[str, Any] = json.loads(text)
        sizes: dict[str, Any] = values["sizes"]
        sizes = {name: tuple(value) if isinstance(value, list) else value for name, value in sizes.items()}
        lists = {name: tuple(values[name]) for name in ("providers", "measures")}
        return cls(**{**values, **lists, "sizes": Sizes(**sizes)})


def measure(job: Job, shape: ModelShape, device: torch.device) -> Iterator[Figure]:
    """The figures of a job, one by one."""
    providers = [PROVIDERS[name] for name in job.providers]
    if shape.is_decoder:
        for provider in providers:
            yield from measure_decoder(shape, provider, job.layers, job.measures, job.sizes, device, job.cache)
    else:
        yield from measure_encoder(shape, providers, job.layers, job.sizes, device)


def main() -> None:
    """Measures the job in the arguments."""
    job, path = Job.from_json(sys.argv[1]), Path(sys.argv[2])
    shape = MODELS[job.model]
    device = torch.device("cuda" if torch.cuda.is_available() and shape.is_decoder else "cpu")
    if HTTP in job.measures:
        from benchmarks.models.server import measure_server

        figures = measure_server(shape, job.providers[0], job.layers, job.sizes, device)
    elif job.providers[0].startswith("vllm"):
        from benchmarks.models.vllm_worker import measure_vllm

        figures = measure_vllm(shape, job.providers[0], job.layers, job.measures, job.sizes)
    else:
        figures = measure(job, shape, device)
    with path.open("a", encoding="utf-8") as file:
        for figure in figures:
            file.write(json.dumps(asdict(figure)) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
