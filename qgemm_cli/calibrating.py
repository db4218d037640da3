"""``qgemm quantize`` with a recipe, or with scales found on a text: the float model is in memory, block by block.

While it works, there is a folder ``<destination>.calibration`` beside the destination: it contains finished blocks,
from which the same command continues, and at the end the complete checkpoint, which then replaces the destination in
one step.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qgemm
from qgemm.arguments import as_new_folder
from qgemm.calibration import Calibration, Recipe
from qgemm.calibration.quantization import Quantization
from qgemm.checkpoint.disk import writing
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import parse_size
from qgemm.device import find_device
from qgemm.model.report import QuantReport
from qgemm.quantize import quantize
from qgemm.streaming.companions import find_companions_to_copy
from qgemm.streaming.workspace import check_is_free, open_work_folder
from qgemm_cli.checkpoint import FLOAT, open_checkpoint
from qgemm_cli.logits import build_float, load_float
from qgemm_cli.tokenizer import load_tokenizer, read_text

_FILES = (".yaml", ".yml", ".json")
_BLOCKS = "blocks"


@dataclass(frozen=True)
class Windows:
    """Calibration data: up to ``samples`` windows of ``length`` tokens, evenly spread over ``text``."""

    text: Path
    samples: int
    length: int


def parse_recipe(given: str) -> Recipe:
    """Parses ``--recipe``: names of methods, separated by commas, or a YAML or JSON file.

    Raises ``ValueError`` for an unknown name, or an order in which work would be lost.
    """
    if given.endswith(_FILES) or os.sep in given:
        return Recipe.load(given)
    try:
        return Recipe.from_dict({"methods": [name.strip() for name in given.split(",")]})
    except ValueError as error:
        raise ValueError(f"--recipe {given}: {error}") from error


def quantize_calibrated(
    source: Path,
    destination: Path,
    wanted: Quantization,
    windows: Windows | None,
    *,
    device: str,
    max_shard_size: int | str,
    resume: bool,
    progress: bool | None,
) -> tuple[QuantReport, int]:
    """Writes the checkpoint; returns its report, and on how many windows the model ran.

    Raises ``ValueError`` and ``OSError``, if possible before the model is loaded, with a sentence in terms of the
    command's options.
    """
    place = find_device(device)
    parse_size(max_shard_size)
    destination = as_new_folder("destination", destination).absolute()
    work = destination.with_name(destination.name + ".calibration")
    check_is_free(destination)
    checkpoint = open_checkpoint(source)
    if checkpoint.format != FLOAT:
        raise CheckpointError(f"{source} is quantized already ({checkpoint.format}): give the float model")
    companions = find_companions_to_copy(source)
    built = build_float(checkpoint)
    batches = []
    if windows is not None:
        batches = [{"input_ids": ids[None]} for ids in cut_windows(built, load_tokenizer([source]), windows)]
    with open_work_folder(work, destination), _explained(work), writing(work):
        model = load_float(checkpoint, built, torch.device("cpu"))
        if not resume:
            shutil.rmtree(work / _BLOCKS, ignore_errors=True)
        if batches:
            wanted = replace(wanted, resume_folder=work / _BLOCKS, device=None if place.type == "cpu" else place)
        quantize(model, wanted, calibration=batches or None, progress=progress)
        whole = work / "checkpoint"
        shutil.rmtree(whole, ignore_errors=True)
        qgemm.save_quantized(model, whole, max_shard_size=max_shard_size)
        for path in companions:
            (whole / path).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / path, whole / path)
        check_is_free(destination)
        os.rename(whole, destination)
        shutil.rmtree(work)
    return qgemm.report(model), len(batches)


@contextmanager
def _explained(work: Path) -> Iterator[None]:
    """After an interrupt, or on a full disk, says how the run goes on; removes a folder without finished blocks."""
    kept = f"finished blocks are kept in {work}; the same command resumes from there"
    try:
        yield
    except BaseException as error:
        if not any((work / _BLOCKS).glob("*.safetensors")):
            shutil.rmtree(work, ignore_errors=True)
        elif isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(kept) from None
        elif isinstance(error, OSError):
            place = f"{error.filename}: " if error.filename else ""
            raise OSError(error.errno, f"{place}{error.strerror or error}. What is done isn't lost: {kept}") from error
        raise


def cut_windows(model: nn.Module, tokenizer: Any, windows: Windows) -> list[Tensor]:
    """Windows of a text, int64 ``[length]``, evenly spread and without overlap, each framed as the tokenizer does.

    ``length`` is reduced to the number of positions that the model has. There are fewer than ``samples`` windows, with
    a warning, if the text is short. Raises ``ValueError`` if there is none, or if the model doesn't run on tokens
    alone.
    """
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False) or getattr(model, "main_input_name", "") != "input_ids":
        raise ValueError(
            f"{type(model).__name__} needs more input than the text of --text: calibrate it in Python, with "
            "qgemm.quantize_model(model, calibration=batches)"
        )
    limit = getattr(config, "max_position_embeddings", None)
    length = min(windows.length, limit) if isinstance(limit, int) and limit > 0 else windows.length
    start, end = _frame(tokenizer)
    inside = length - len(start) - len(end)
    content = read_text(windows.text)
    ids = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    count = min(windows.samples, len(ids) // inside) if inside > 0 else 0
    if not count:
        raise ValueError(
            f"{windows.text} has {len(ids)} tokens, and a window has {length}: give a longer text, or --length"
        )
    if count < windows.samples:
        warnings.warn(
            f"{windows.text} has {len(ids)} tokens, which make {count} windows of {length}, not {windows.samples}: "
            "give a longer text, or a smaller --samples or --length",
            stacklevel=2,
        )
    places = [place * (len(ids) - inside) // max(count - 1, 1) for place in range(count)]
    return [torch.tensor([*start, *ids[place : place + inside], *end], dtype=torch.int64) for place in places]


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and after a text."""
    framed, plain = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (True, False))
    for place in range(len(framed) - len(plain) + 1):
        if plain and framed[place : place + len(plain)] == plain:
            return framed[:place], framed[place + len(plain) :]
    return [], []


def check_text(wanted: Quantization, windows: Windows | None, calibration: Calibration | None) -> None:
    """Raises ``ValueError`` if something needs a text and there is none, or vice versa."""
    schemes = list(filter(None, wanted.schemes.values()))
    wanting = wanted.wanting_data(schemes)
    if calibration is not None:
        needing = [f"the scheme {scheme.name!r}" for scheme in schemes if scheme.needs_blocks]
        needing += ["a recipe or budget"] if wanted.goes_by_blocks(()) else []
        if needing:
            raise ValueError(f"{needing[0]} needs a text to run the model on: pass --text FILE instead of --statistics")
        if not any(scheme.is_static for scheme in schemes):
            raise ValueError("--statistics is for static schemes: pass one as --scheme, or leave it out")
    elif windows is None and wanting and wanted.input_scales is None:
        scales = ", or --statistics FILE, or --input-scales FILE" if wanted.recipe is None else ""
        raise ValueError(f"{wanting[0]} needs a text to run the model on: pass --text FILE{scales}")
    if windows is not None and not wanting and wanted.recipe is None:
        raise ValueError("--text is for static schemes and recipes: pass --recipe too, or leave --text out")
