"""Measures all that is to be measured, one after another, or in several processes that share a device.

A quantization is thousands of small steps, in which a GPU waits for the processor: several processes keep it busy. Each
has its own models and its own bf16 logits, of 2.3 GB with the trained model and all held-out text. A figure is the same
with any number of processes.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.accuracy.measure import Effort, Subject, language_subjects, measure, minilm_subject
from benchmarks.accuracy.peers import PEERS
from benchmarks.accuracy.results import MINILM, Result
from benchmarks.accuracy.variants import Variant, named, variants


@dataclass(frozen=True)
class Models:
    """Which models to measure on: the ``subjects`` with these names, from a folder that training has written.

    ``device_name``: what results call the device.
    """

    subjects: frozenset[str]
    folder: Path
    effort: Effort
    device: torch.device
    device_name: str

    def load(self) -> dict[str, Subject]:
        """The subjects by name."""
        found: dict[str, Subject] = {}
        if self.subjects - {MINILM}:
            found = {one.name: one for one in language_subjects(self.folder, self.effort, self.device)}
        if MINILM in self.subjects:
            found[MINILM] = minilm_subject(self.folder, self.effort, self.device)
        return found


def measure_all(models: Models, todo: Sequence[tuple[str, Variant, int]], jobs: int) -> Iterator[Result]:
    """The results of ``todo``, as ``pending`` gives it, as they come; with several ``jobs`` in any order."""
    if jobs == 1 or not todo:
        subjects = models.load() if todo else {}
        for subject, variant, seed in todo:
            yield measure(subjects[subject], variant, seed, models.device_name)
        return
    with ProcessPoolExecutor(min(jobs, len(todo)), multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_measure, models, subject, variant.name, seed) for subject, variant, seed in todo]
        for future in as_completed(futures):
            yield future.result()


def _measure(models: Models, subject: str, variant: str, seed: int) -> Result:
    """In a process of the pool: by names, since variants hold functions that can't be sent."""
    [found] = named([*variants(), *PEERS], [variant])
    return measure(_loaded(models)[subject], found, seed, models.device_name)


@functools.cache
def _loaded(models: Models) -> dict[str, Subject]:
    return models.load()
