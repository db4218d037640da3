"""Files of a checkpoint as other programs change them, and what is in them but for the id of the save."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from qgemm.checkpoint.safetensors_file import CHECKSUMS, SAVE


@contextmanager
def edited(path: Path) -> Iterator[Any]:
    """What a JSON file holds, which is written back as the block leaves it."""
    values = json.loads(path.read_text())
    yield values
    path.write_text(json.dumps(values))


def rewrite_file(path: Path, tensors: dict[str, Tensor], **metadata: str) -> None:
    """Gives a file other tensors, as a program does that keeps the file's metadata but knows no checksums."""
    with safe_open(path, framework="pt") as file:
        known = file.metadata() or {}
    known.pop(CHECKSUMS, None)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path, metadata={"format": "pt", **known, **metadata})


def save_of(folder: Path) -> str:
    """The id of the save that wrote ``folder``."""
    return str(json.loads((folder / "config.json").read_text())["quantization_config"]["save"])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, with a row of zeros for the id of the save, if it is one's."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    save = json.loads(files.get("config.json", b"{}")).get("quantization_config", {}).get("save")
    return {name: content.replace(save.encode(), b"0" * 16) if save else content for name, content in files.items()}


def set_save(path: Path, save: str | None) -> None:
    """Writes another id, or none, into a config, an index, a report or a file with tensors."""
    if path.suffix == ".json":
        with edited(path) as values:
            place, key = values, "save"
            if path.name == "config.json":
                place = values["quantization_config"]
            elif path.name.endswith(".index.json"):
                place, key = values["metadata"], SAVE
            place.pop(key, None)
            if save is not None:
                place[key] = save
        return
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"].pop(SAVE, None)
    if save is not None:
        header["__metadata__"][SAVE] = save
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
