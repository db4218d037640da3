"""Measures variants: quantizes a copy of a model for every seed of calibration data, and evaluates it."""

from __future__ import annotations

import copy
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.accuracy import minilm
from benchmarks.accuracy.evaluate import evaluate, window_logits, windows_of
from benchmarks.accuracy.outliers import add_outliers
from benchmarks.accuracy.results import MINILM, OUTLIERS, PLAIN, Result
from benchmarks.accuracy.variants import Variant
from benchmarks.peers import first_line


@dataclass(frozen=True)
class Effort:
    """How much is measured: windows of ``window`` tokens, sentences, and the data and seeds of calibration."""

    window: int = 512
    windows: int | None = None
    calibration_windows: int = 128
    sentences: int = minilm.MEASURED
    calibration_sentences: int = minilm.CALIBRATION
    seeds: tuple[int, ...] = (0, 1, 2)
    batch: int = 8


QUICK = Effort(window=256, windows=32, calibration_windows=16, sentences=256, calibration_sentences=64, seeds=(0,))


@dataclass(frozen=True)
class Subject:
    """A model to quantize copies of.

    - ``calibration``: batches by seed. ``evaluate``: the figures of a quantized model, as fields of ``Result``.
    """

    name: str
    model: nn.Module
    calibration: Callable[[int], list[Any]]
    evaluate: Callable[[nn.Module, str], dict[str, float]]


def language_subjects(folder: Path, effort: Effort, device: torch.device) -> Iterator[Subject]:
    """The trained model of a folder, and the same with outlier channels. Both are compared with the first."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.to(device).eval()
    tokens = load_file(folder / "tokens.safetensors")
    windows = windows_of(tokens["held_out"], effort.window)[: effort.windows]
    reference = window_logits(model, windows, effort.batch)

    def figures(quantized: nn.Module, name: str) -> dict[str, float]:
        found = evaluate(quantized, windows, reference, batch=effort.batch, name=name)
        return {"perplexity": found.perplexity, "kl": found.kl}

    def calibration(seed: int) -> list[Any]:
        parts = draw(windows_of(tokens["calibration"], effort.window), effort.calibration_windows, seed)
        return [{"input_ids": part.to(device)} for part in parts.split(effort.batch)]

    yield Subject(PLAIN, model, calibration, figures)
    yield Subject(OUTLIERS, add_outliers(copy.deepcopy(model)), calibration, figures)


def minilm_subject(folder: Path, effort: Effort, device: torch.device) -> Subject:
    """all-MiniLM-L6-v2 on the folder's sentences; those for calibration aren't measured."""
    model, tokenizer = minilm.load_minilm(device)
    sentences = json.loads((folder / "sentences.json").read_text(encoding="utf-8"))
    measured = minilm.batches_of(tokenizer, sentences[: effort.sentences], device)
    rest = sentences[effort.sentences :]
    expected = minilm.embed(model, measured, "embed")

    def figures(quantized: nn.Module, name: str) -> dict[str, float]:
        return asdict(minilm.agreement(minilm.embed(quantized, measured, name), expected))

    def calibration(seed: int) -> list[Any]:
        chosen = draw(torch.arange(len(rest)), effort.calibration_sentences, seed)
        return minilm.batches_of(tokenizer, [rest[index] for index in chosen.tolist()], device, batch=32)

    return Subject(MINILM, model, calibration, figures)


def draw(rows: Tensor, count: int, seed: int) -> Tensor:
    """``count`` of the rows, chosen by a seed. Raises ``ValueError`` if there are fewer."""
    if len(rows) < count:
        raise ValueError(f"{count} rows of calibration data are wanted, and there are {len(rows)}")
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]]


def measure(subject: Subject, variant: Variant, seed: int, device: str = "") -> Result:
    """Quantizes a copy of the subject's model and evaluates it. A variant that raises has a result with its reason.

    ``device``: the name of what it runs on.
    """
    torch.manual_seed(seed)
    result = Result(variant.name, subject.name, seed, variant.note, device)
    try:
        batches = subject.calibration(seed)
        started = time.perf_counter()
        model = variant.build(copy.deepcopy(subject.model), batches)
        seconds = time.perf_counter() - started
        figures = subject.evaluate(model, f"{variant.name}, {subject.name}")
        size = (variant.bytes_of or weight_bytes)(model)
    except Exception as error:  # one variant that fails is a line below the table
        return replace(result, reason=first_line(error))
    finally:
        model = None
        gc.collect()
    return replace(result, **figures, bytes=size, seconds=seconds)  # type: ignore[arg-type]


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all that is in a model's state, each tensor once."""
    seen: dict[tuple[int, int], int] = {}
    for value in model.state_dict(keep_vars=True).values():
        for tensor in _plain_tensors(value):
            seen[tensor.data_ptr(), tensor.numel()] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors that a tensor subclass is made of; of any other tensor, itself."""
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value


def pending(
    subjects: Sequence[str], table: Sequence[Variant], seeds: Sequence[int], done: Sequence[Result]
) -> list[tuple[str, Variant, int]]:
    """What is still to be measured: every variant on its subjects, calibrated ones with every seed."""
    known = {(one.variant, one.subject, one.seed) for one in done if one.reason is None}
    return [
        (subject, variant, seed)
        for subject in subjects
        for variant in table
        if subject in variant.subjects
        for seed in (seeds if variant.seeded else seeds[:1])
        if (variant.name, subject, seed) not in known
    ]
