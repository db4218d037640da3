"""``quantize_checkpoint``: from a folder of float weights to one of quantized weights, in little memory."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from qgemm.arguments import as_new_folder, as_path, as_scales
from qgemm.checkpoint.layout import CONFIG_FILE, GENERATION_CONFIG_FILE, parse_size
from qgemm.device import find_device
from qgemm.reporting import QuantReport
from qgemm.selection import Pattern, Patterns, SchemeChoice, as_patterns, resolve_schemes
from qgemm.streaming.companions import find_companions
from qgemm.streaming.plan import Plan, make_plan
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

    Writes to the new folder ``destination`` what ``from_pretrained(source)``, ``quantize_model`` and ``save_quantized``
    would, bit for bit, and copies what else is in ``source``, such as the tokenizer; returns the report. A few rows of
    a weight, or one expert, are in memory at a time.

    - ``source``: a folder with ``config.json`` and safetensors files, of float weights.
    - ``scheme``, ``skip``, ``include``, ``input_scales``: as ``quantize_model`` has them.
    - ``drop``: names or globs of tensors in the files that the model has no place for, to go without them.
    - ``device``: where weights are quantized, a part at a time.
    - ``max_shard_size``: how large a file may be, in bytes or as text like ``"5GB"``.
    - ``resume``: whether to go on where an earlier run with the same arguments ended. It left its work in
      ``<destination>.partial``; files that it finished are verified and kept. False starts afresh.
    - ``progress``: whether to show a progress bar; None shows one on a terminal only.

    Raises ``CheckpointError`` for a source that is damaged, quantized already, a pickle, or not just what transformers'
    class of that model wants; ``ValueError`` as ``quantize_model`` does, and for a device that isn't there;
    ``FileExistsError`` if ``destination`` isn't empty; ``OSError`` if the disk is full or can't be written.
    ``destination`` is then as it was.
    """
    source, destination = as_path("source", source), as_new_folder("destination", destination).absolute()
    device = find_device(device)
    drop = _names(drop)
    input_scales = as_scales(input_scales)
    skip, include = as_patterns("skip", skip), as_patterns("include", include)
    with open_source(source) as opened:
        plan = make_plan(opened, scheme, skip, include, input_scales, drop, max_shard_size)
        companions, code = find_companions(source)
        if code:
            warnings.warn(
                f"{', '.join(code)} in {source} are not copied: qgemm runs no code of a checkpoint", stacklevel=2
            )
        job = _describe_job(opened, plan, scheme, skip, include, input_scales, max_shard_size)
        with _explained(destination), open_workspace(destination, job) as workspace:
            if not resume:
                workspace.clear()
            errors = _write_shards(plan, workspace, device, progress)
            for name, text in plan.text_files(errors).items():
                with workspace.create(name) as file:
                    file.write(text)
            for path in companions:
                with workspace.create(str(path)) as file, (source / path).open("rb") as original:
                    shutil.copyfileobj(original, file)
            workspace.publish()
    return plan.report(errors)


def _write_shards(plan: Plan, workspace: Workspace, device: torch.device, progress: bool | None) -> dict[str, float]:
    sizes = {file_name: bytes_to_read(plan, names) for file_name, names in plan.shards.items()}
    hide = None if progress is None else not progress
    with tqdm(desc="verify", unit="B", unit_scale=True, disable=hide, leave=False) as bar:
        workspace.recover(plan.shards, bar.update)
    done = sum(size for file_name, size in sizes.items() if file_name in workspace.finished)
    _check_room(plan, workspace)
    total = sum(sizes.values())
    with tqdm(total=total, initial=done, desc="quantize", unit="B", unit_scale=True, disable=hide) as bar:
        for file_name, names in plan.shards.items():
            if file_name not in workspace.finished:
                with workspace.create(file_name) as file:
                    errors = write_shard(file, plan, names, device, bar.update)
                workspace.note_finished(file_name, errors)
    return {layer: error for file in workspace.finished.values() for layer, error in file.errors.items()}


def _check_room(plan: Plan, workspace: Workspace) -> None:
    names = (name for file, names in plan.shards.items() if file not in workspace.finished for name in names)
    needed = sum(plan.tensors[name].nbytes for name in names)
    free = shutil.disk_usage(workspace.folder).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are still to be written, and the disk has {free:,}")


@contextmanager
def _explained(destination: Path) -> Iterator[None]:
    """Makes one sentence of what the system says about a disk that is full or that can't be written."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        kept = (
            ". What is finished is kept beside it; the same call goes on from there"
            if partial_folder(destination).exists()
            else ""
        )
        raise OSError(error.errno, f"{destination} can't be written: {error.strerror or error}{kept}") from error


def _names(drop: str | Iterable[str]) -> list[str]:
    names = [drop] if isinstance(drop, str) else list(drop) if isinstance(drop, Iterable) else [drop]
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"drop holds {name!r}; it takes names and globs of tensors")
    return names


def _describe_job(
    source: Source,
    plan: Plan,
    scheme: SchemeChoice,
    skip: list[Pattern],
    include: list[Pattern],
    input_scales: Mapping[str, float | Tensor] | None,
    max_shard_size: int | str,
) -> dict[str, Any]:
    """What a run makes of what, JSON-ready: only a run of which all this is the same may go on with another's work."""
    import transformers

    layout = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in plan.tensors.items()}
    scales = {name: float(scale) for name, scale in (input_scales or {}).items()}
    return {
        "source": source.fingerprints,
        **{name: _hash_file(source.folder / name) for name in (CONFIG_FILE, GENERATION_CONFIG_FILE)},
        "scheme": [[_as_text(pattern), each and each.name] for pattern, each in resolve_schemes(scheme).items()],
        "skip": [_as_text(pattern) for pattern in skip],
        "include": [_as_text(pattern) for pattern in include],
        "input_scales": scales,
        "max_shard_size": parse_size(max_shard_size),
        "layout": hashlib.sha256(json.dumps([layout, plan.shards]).encode()).hexdigest(),
        "versions": {"qgemm": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


def _as_text(pattern: Pattern) -> str:
    return pattern if isinstance(pattern, str) else repr(pattern)  # with its flags


def _hash_file(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
