"""``qgemm convert``: a quantized checkpoint in another format, the same int8 values in it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import qgemm
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import checkpoint_files
from qgemm.checkpoint.staging import StagedFiles
from qgemm.streaming.companions import find_companions
from qgemm_cli.commands.inspect import examine
from qgemm_cli.output import print_lines, printable, size
from qgemm_cli.reading import FLOAT, open_checkpoint


def convert(source: Path, destination: Path, to: str, max_shard_size: str, overwrite: bool) -> dict[str, Any]:
    """Writes the checkpoint and reads it again; returns the document that ``--json`` prints.

    Raises ``CheckpointError`` if qgemm doesn't load ``source``, or if what was written isn't sound.
    """
    opened = open_checkpoint(source)
    if opened.format == FLOAT:
        raise CheckpointError(f"{source} is a float checkpoint: qgemm quantize makes a quantized one of it")
    if opened.folder is None:
        raise CheckpointError(f"{source} is a single file; qgemm converts a folder, with the config that belongs to it")
    if opened.contents is None:
        raise CheckpointError(opened.refusal or opened.problems[0])
    if destination.resolve() == source.resolve():
        raise ValueError(f"{destination} is the folder to read from: write to another one")
    if destination.is_dir() and (old := checkpoint_files(destination)) and not overwrite:
        raise ValueError(f"{destination} already holds {', '.join(old)}; pass --overwrite to replace them")
    model = qgemm.load_quantized(opened.folder)
    qgemm.save_quantized(model, destination, max_shard_size=max_shard_size, overwrite=overwrite, format=to)
    del model
    copied = _copy_companions(opened.folder, destination, overwrite)
    written = examine(destination, verify=True)
    if problems := written["problems"] or ([] if written["loads"] else [written["refusal"]]):
        raise CheckpointError(f"{destination} was written, but isn't sound: {problems[0]}")
    return {
        "source": str(source),
        "destination": str(destination),
        "from": opened.format,
        "to": to,
        "layers": len(opened.contents.manifest.layers),
        "bytes_before": sum(file.stat().st_size for file in opened.files),
        "bytes_after": written["bytes"]["disk"],
        "files": [file["name"] for file in written["files"]],
        "copied": copied,
    }


def _copy_companions(source: Path, destination: Path, overwrite: bool) -> list[str]:
    """Copies what lies beside the weights, such as the tokenizer; returns what was copied."""
    copied = []
    for path in find_companions(source)[0]:
        target = destination / path
        if target.exists() and not overwrite:
            continue
        target.parent.mkdir(exist_ok=True)
        staged = StagedFiles(target.parent)
        try:
            with (source / path).open("rb") as original, staged.create(target.name) as copy:
                shutil.copyfileobj(original, copy)
            staged.publish(last=target.name, stale=())
        finally:
            staged.discard()
        copied.append(str(path))
    return copied


def show(document: dict[str, Any]) -> None:
    """Prints the document for people."""
    sizes = f"{size(document['bytes_before'])} before, {size(document['bytes_after'])} after"
    files = ", ".join((*document["files"], "config.json"))
    others = f", and {len(document['copied'])} files of {document['source']}" if document["copied"] else ""
    print_lines(
        [
            f"{document['from']} to {document['to']}: {document['layers']} quantized layers, {sizes}",
            f"wrote {printable(document['destination'])}: {printable(files + others, 500)}",
        ]
    )
