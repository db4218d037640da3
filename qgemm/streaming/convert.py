"""``quantize_checkpoint``: from a folder of float weights to one of quantized weights, in little memory."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from tqdm import tqdm

from qgemm.arguments import as_new_folder, as_path
from qgemm.calibration.quantization import Quantization
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import parse_size
from qgemm.checkpoint.save import Save
from qgemm.device import find_device
from qgemm.model.report import QuantReport
from qgemm.model.selection import Patterns, SchemeChoice
from qgemm.streaming.companions import copy_companion, find_companions_to_copy
from qgemm.streaming.journal import Begun
from qgemm.streaming.plan import CheckpointPlan, plan_checkpoint
from qgemm.streaming.shards import bytes_to_read, write_shard
from qgemm.streaming.source import Source, open_source
from qgemm.streaming.workspace import Workspace, open_workspace, partial_folder
from qgemm.version import __version__


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    scheme: SchemeChoice = "int8",
    *,
    skip: Patterns = None,
    include: Patterns = None,
    input_scales: Mapping[str, float | Tensor] | None = None,
    drop: str | Iterable[str] = (),
    device: torch.device | str = "cpu",
    max_shard_size: int | str = "5GB",
    resume: bool = True,
    progress: bool | None = None,
) -> QuantReport:
    """Quantizes the checkpoint of a transformers model from files to files, without building the model.

    Writes the same files to the new folder ``destination`` as ``from_pretrained(source)``, ``quantize_model`` and
    ``save_quantized``, bit for bit, and copies other files in ``source``, such as the tokenizer; returns the report. A
    few rows of a weight, or one expert, are in memory at a time.

    - ``source``: a folder with ``config.json`` and safetensors files, of float weights.
    - ``scheme``, ``skip``, ``include``, ``input_scales``: as for ``quantize_model``.
    - ``drop``: names or globs of tensors to ignore, which the model doesn't have.
    - ``device``: where weights are quantized, a part at a time.
    - ``max_shard_size``: the maximum size of a file, in bytes or as text like ``"5GB"``.
    - ``resume``: whether to continue an interrupted run with the same arguments. Its work is in
      ``<destination>.partial``; finished parts are verified and kept. False starts over.
    - ``progress``: whether to show a progress bar; None shows one on a terminal only.

    Uses one thread of PyTorch: pieces are small, and threads that wait for one another on busy cores take many times as
    long.

    Raises ``CheckpointError`` for a source that is damaged, already quantized, a pickle, or doesn't match transformers'
    class of the model, and for one that changes during the run; ``ValueError`` as ``quantize_model`` does, and for a
    device that doesn't exist; ``FileExistsError`` if ``destination`` isn't empty; ``OSError`` if the disk is full or
    can't be written. ``destination`` is unchanged then. ``KeyboardInterrupt`` has the progress and the folder.
    """
    wanted = Quantization.of(scheme, skip=skip, include=include, input_scales=input_scales)
    source, destination = as_path("source", source), as_new_folder("destination", destination).absolute()
    device = find_device(device)
    drop = _names(drop)
    with _one_thread(), open_source(source) as opened:
        plan = plan_checkpoint(opened, wanted, drop, max_shard_size)
        companions = find_companions_to_copy(source)
        job = _describe_job(opened, plan, wanted, max_shard_size)
        with _explained(destination, resume), open_workspace(destination, job) as workspace:
            if not resume:
                workspace.clear()
            # Of the job, so that a run that goes on with another's work gives its files the same one.
            save = Save(hashlib.sha256(json.dumps(job).encode()).hexdigest()[:16])
            with _watched(opened, workspace), _interruptible(plan, workspace, resume):
                errors = _write_shards(opened, plan, workspace, save, device, progress)
                for name, text in plan.text_files(errors, save).items():
                    with workspace.create(name) as file:
                        file.write(text)
                for path in companions:
                    with workspace.create(str(path)) as file:
                        copy_companion(source / path, file)
                opened.check_unchanged(digests=True)
                workspace.publish()
    return plan.report(errors)


def _write_shards(
    source: Source, plan: CheckpointPlan, workspace: Workspace, save: Save, device: torch.device, progress: bool | None
) -> dict[str, float]:
    hide = None if progress is None else not progress
    with tqdm(desc="verify", unit="B", unit_scale=True, disable=hide, leave=False) as bar:
        workspace.recover(plan.shards, bar.update)
    _check_room(plan, workspace)
    sizes = {file_name: bytes_to_read(plan, names) for file_name, names in plan.shards.items()}
    done = sum(sizes[file_name] for file_name in workspace.finished)
    with tqdm(total=sum(sizes.values()), initial=done, desc="quantize", unit="B", unit_scale=True, disable=hide) as bar:
        for file_name, names in plan.shards.items():
            if file_name not in workspace.finished:
                with workspace.open_shard(file_name) as (file, begun):
                    note = partial(_note_begun, source, workspace, file)
                    errors = write_shard(file, plan, names, device, bar.update, begun, note, save.metadata)
                source.check_unchanged()
                workspace.note_finished(file_name, errors)
    return {layer: error for file in workspace.finished.values() for layer, error in file.errors.items()}


def _note_begun(source: Source, workspace: Workspace, file: BinaryIO, begun: Begun) -> None:
    source.check_unchanged()  # so that the journal holds nothing that was made of another source
    workspace.note_begun(begun, file)


def _check_room(plan: CheckpointPlan, workspace: Workspace) -> None:
    names = (name for file, names in plan.shards.items() if file not in workspace.finished for name in names)
    needed = sum(plan.tensors[name].nbytes for name in names)
    if workspace.begun is not None:
        needed -= sum(size for size, _ in workspace.begun.written.values())
    free = shutil.disk_usage(workspace.folder).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes must still be written, but the disk has only {free:,} free")


@contextmanager
def _one_thread() -> Iterator[None]:
    # Measured on two cores, 0.4 GB in bfloat16: 1.3 s with one thread and with two; with the cores busy, 9 s with one,
    # and with two over 100 s, most of it waiting at the end of each operation.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _watched(source: Source, workspace: Workspace) -> Iterator[None]:
    """Says that the source was changed, whatever else came of that."""
    try:
        yield
    except CheckpointError as error:
        if (change := source.find_change(digests=True)) is None:
            raise
        raise CheckpointError(
            f"{source.folder} was changed while it was read: {change}. Nothing was published. The partial result is in "
            f"{workspace.folder} and belongs to the old files: when no process writes to them, pass resume=False "
            "to start over"
        ) from error


@contextmanager
def _interruptible(plan: CheckpointPlan, workspace: Workspace, resume: bool) -> Iterator[None]:
    """Says how far the work is when it is interrupted, and how it goes on."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if not workspace.content.exists():  # it is published
            raise
        sizes = {file_name: bytes_to_read(plan, names) for file_name, names in plan.shards.items()}
        done = sum(sizes[file_name] for file_name in workspace.finished)
        done += workspace.begun.read if workspace.begun else 0
        raise KeyboardInterrupt(
            f"{done / max(1, sum(sizes.values())):.0%} of the work is done, and kept in {workspace.folder}; "
            f"{_goes_on(resume)}"
        ) from interrupt


@contextmanager
def _explained(destination: Path, resume: bool) -> Iterator[None]:
    """Makes one sentence of what the system says about a disk that is full or that can't be written."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        said = error.strerror or error
        if destination.is_dir() and any(destination.iterdir()):
            said = f"{destination} is whole, but the system couldn't see its name safely to the disk: {said}"
        else:
            said = f"{destination} can't be written: {said}"
            if (partial := partial_folder(destination)).exists():
                said += f". What is finished is kept in {partial}; {_goes_on(resume)}"
        raise OSError(error.errno, said) from error


def _goes_on(resume: bool) -> str:
    return f"run the same again{'' if resume else ', but with resume,'} to continue from there"


def _names(drop: str | Iterable[str]) -> list[str]:
    names = [drop] if isinstance(drop, str) else list(drop) if isinstance(drop, Iterable) else [drop]
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"drop holds {name!r}; it takes names and globs of tensors")
    return names


def _describe_job(
    source: Source, plan: CheckpointPlan, wanted: Quantization, max_shard_size: int | str
) -> dict[str, Any]:
    """What a run makes of what, JSON-ready: only a run of which all this is the same may go on with another's work."""
    import transformers

    layout = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in plan.tensors.items()}
    return {
        **source.fingerprints,
        **wanted.to_dict(),
        "max_shard_size": parse_size(max_shard_size),
        "layout": hashlib.sha256(json.dumps([layout, plan.shards]).encode()).hexdigest(),
        "versions": {"qgemm": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }
