"""What a model keeps between calls of ``generate``."""

from dataclasses import dataclass

import pytest
import torch
from transformers import DynamicCache
from transformers.generation import logits_process

from qgemm.integrations.transformers.generate import decoder as module
from qgemm.integrations.transformers.generate.decoder import Decoder, Decoders, bucket
from qgemm.integrations.transformers.generate.sampling import Sampler
from qgemm.integrations.transformers.generate.stopping import Stops
from qgemm.replay.graphs import GraphMemory, Replayed

CPU = torch.device("cpu")
POSITION = torch.zeros((2, 1), dtype=torch.int64)


@dataclass
class _Room:
    """A context that is nothing but its capacity."""

    capacity: int
    used: int = 1

    cache = DynamicCache()
    buffers = None

    def rewind(self, used: int) -> None:
        self.used = used


def _take(decoders: Decoders, batch: int, capacity: int) -> tuple[_Room, Decoder]:
    context, decoder = decoders.take(batch, capacity, POSITION[:batch], None, _Room)  # type: ignore[arg-type]
    assert isinstance(context, _Room)
    return context, decoder


@pytest.mark.parametrize(
    ("wanted", "rounded"),
    [(1, 128), (128, 128), (257, 384), (1024, 1024), (1025, 1152), (2048, 2048), (2049, 2304), (16384, 16384)],
)
def test_capacities_are_rounded_up(wanted: int, rounded: int) -> None:
    assert bucket(wanted) == rounded


def test_a_larger_cache_serves_smaller_calls_and_takes_their_place() -> None:
    decoders = Decoders(CPU)
    small, _ = _take(decoders, 2, 100)
    assert small.capacity == 128
    decoders.put_back(small, _)  # type: ignore[arg-type]
    large, decoder = _take(decoders, 2, 300)
    assert large.capacity == 384
    decoders.put_back(large, decoder)  # type: ignore[arg-type]
    found, same = _take(decoders, 2, 100)
    assert found is large
    assert same is decoder
    assert found.used == 0
    other, _ = _take(decoders, 2, 100)  # the first is in use
    assert other is not large


def test_only_the_last_cache_is_kept_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    decoders = Decoders(CPU)  # where the bound is zero
    one, decoder = _take(decoders, 1, 100)
    two, other = _take(decoders, 2, 100)
    monkeypatch.setattr(module, "_bytes", lambda cache: 1)
    decoders.put_back(one, decoder)  # type: ignore[arg-type]
    decoders.put_back(two, other)  # type: ignore[arg-type]
    assert _take(decoders, 1, 100)[0] is not one
    assert _take(decoders, 2, 100)[0] is two


def test_what_waits_can_be_freed() -> None:
    decoders = Decoders(CPU)
    assert not decoders.free()
    room, decoder = _take(decoders, 1, 100)
    decoders.put_back(room, decoder)  # type: ignore[arg-type]
    assert decoders.free()
    assert _take(decoders, 1, 100)[0] is not room


def _sampler(temperature: float) -> Sampler:
    return Sampler([logits_process.TemperatureLogitsWarper(temperature)], Stops([], CPU), 1, True, None)


def test_samplers_are_kept_by_what_they_do() -> None:
    decoder = Decoder(2, _Room(8), POSITION, GraphMemory(CPU))  # type: ignore[arg-type]
    first = decoder.sampler(_sampler(0.5))
    assert decoder.sampler(_sampler(0.5)) is first
    for i in range(module.MAX_SAMPLERS):
        decoder.sampler(_sampler(1.0 + i))
    assert decoder.sampler(_sampler(0.5)) is not first


def test_a_kept_sampler_takes_over_from_the_wanted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(2, _Room(8), POSITION, GraphMemory(CPU))  # type: ignore[arg-type]
    first, second = _sampler(0.5), _sampler(0.5)
    adopted: list[tuple[Sampler, Sampler]] = []
    monkeypatch.setattr(Sampler, "adopt", lambda sampler, other: adopted.append((sampler, other)))
    decoder.sampler(first)
    assert decoder.sampler(second)[0] is first
    assert adopted[-1] == (first, second)


def test_functions_run_each_time_without_graphs() -> None:
    runs: list[int] = []
    step = Replayed(GraphMemory(CPU))
    for i in range(3):
        step(lambda i=i: runs.append(i))  # type: ignore[misc]
    assert runs == [0, 1, 2]
