"""``qgemm convert``: writes a quantized checkpoint in another format, with the same values or in another scheme."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn

import qgemm
from qgemm.arguments import as_new_folder
from qgemm.checkpoint.disk import make_folder, open_regular, replacing, sync_file, writing
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import check_no_adapter, checkpoint_files
from qgemm.checkpoint.locking import locked
from qgemm.nn import QuantLayer
from qgemm.streaming.companions import find_companions
from qgemm.tables import size
from qgemm.warn import warn_user
from qgemm_cli.checkpoint import FLOAT, Checkpoint, open_checkpoint
from qgemm_cli.commands.inspect import examine
from qgemm_cli.output import print_lines, printable
from qgemm_cli.tokenizer import has_tokenizer, tokenizer_of_gguf


def convert(
    source: Path, destination: Path, to: str, max_shard_size: int | str, overwrite: bool, scheme: str | None = None
) -> dict[str, Any]:
    """Writes the checkpoint and reads it again; returns the document that ``--json`` prints.

    ``scheme``: as in ``load_quantized``. Raises ``CheckpointError`` if qgemm can't load ``source``, or if the result
    isn't sound.
    """
    as_new_folder("destination", destination)
    opened = open_checkpoint(source)
    if opened.format == FLOAT:
        raise CheckpointError(f"{source} is a float checkpoint: quantize it with qgemm quantize")
    if opened.place is None:
        raise CheckpointError(f"{source} is a single file; qgemm converts a folder, with its config, or a GGUF file")
    if opened.contents is None and (opened.gguf is None or scheme is None):  # what fits its model in no other scheme
        raise CheckpointError(opened.refusal or opened.problems[0])
    if opened.folder is not None:
        check_no_adapter(opened.folder)
    if opened.folder is not None and destination.resolve() == opened.folder.resolve():
        raise ValueError(f"{destination} is the folder to read from: write to another one")
    if destination.is_dir() and (old := checkpoint_files(destination)) and not overwrite:
        raise ValueError(f"{destination} already holds {', '.join(old)}; pass --overwrite to replace them")
    model = qgemm.load_quantized(opened.place, scheme=scheme)
    with _companions(opened) as others:
        copied = _write(model, others, destination, overwrite, max_shard_size=max_shard_size, format=to)
    layers = sum(isinstance(module, QuantLayer) for module in model.modules())
    del model
    written = examine(destination, verify=True)
    if problems := written["problems"] or ([] if written["loads"] else [written["refusal"]]):
        raise CheckpointError(f"{destination} was written, but has problems: {problems[0]}")
    return {
        "source": str(source),
        "destination": str(destination),
        "from": opened.format,
        "to": to,
        "layers": layers,
        "bytes_before": sum(file.stat().st_size for file in opened.files),
        "bytes_after": written["bytes"]["disk"],
        "files": [file["name"] for file in written["files"]],
        "copied": copied,
    }


@contextmanager
def _companions(source: Checkpoint) -> Iterator[dict[Path, Path]]:
    """The files beside the weights, such as the tokenizer: where they belong in a checkpoint, and where they are.

    A GGUF file has its tokenizer inside; warns if transformers can't make it.
    """
    folder = source.folder
    found = {} if folder is None else {path: folder / path for path in find_companions(folder)[0]}
    with tempfile.TemporaryDirectory() as made:
        if source.gguf is not None and (folder is None or not has_tokenizer(folder)):
            try:
                tokenizer_of_gguf(source.gguf).save_pretrained(made)
                found |= {path: Path(made, path) for path in find_companions(Path(made))[0]}
            except ValueError as error:
                warn_user(f"{error}: save the tokenizer of the float model in the new folder")
        yield found


def _write(model: nn.Module, others: dict[Path, Path], destination: Path, overwrite: bool, **options: Any) -> list[str]:
    """Saves ``model`` together with ``others``, as ``_companions`` found them; returns what was copied.

    A folder without a checkpoint gets one only when everything is there. A folder with a checkpoint keeps it until
    there is room for everything, including the copies.
    """
    is_new = not destination.exists()
    make_folder(destination)
    targets = {path: destination / path for path in others if overwrite or not (destination / path).exists()}
    has_old = bool(checkpoint_files(destination))
    try:
        with writing(destination), ExitStack() as copies:
            for path, target in targets.items():
                make_folder(target.parent)
                with open_regular(others[path]) as original:
                    copy = copies.enter_context(replacing(target))
                    shutil.copyfileobj(original, copy)
                sync_file(copy)
            if not has_old:
                copies.close()  # puts them in place
            qgemm.save_quantized(model, destination, overwrite=overwrite, **options)
    except BaseException:
        if is_new:
            with suppress(CheckpointError, OSError):  # if another process saves there, the files are also its own
                with locked(destination):
                    if not checkpoint_files(destination):
                        _remove(targets.values())
                destination.rmdir()
        raise
    return [str(path) for path in targets]


def _remove(files: Iterable[Path]) -> None:
    """Removes ``files``, and folders that contain nothing else."""
    for file in files:
        with suppress(OSError):
            file.unlink()
            file.parent.rmdir()


def show(document: dict[str, Any]) -> None:
    """Prints the document as text."""
    sizes = f"{size(document['bytes_before'])} before, {size(document['bytes_after'])} after"
    files = ", ".join((*document["files"], "config.json"))
    others = f", and {len(document['copied'])} files of {document['source']}" if document["copied"] else ""
    print_lines(
        [
            f"{document['from']} to {document['to']}: {document['layers']} quantized layers, {sizes}",
            f"wrote {printable(document['destination'])}: {printable(files + others, 500)}",
        ]
    )
