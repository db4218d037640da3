"""Which files a checkpoint has, and how they are found again.

The names are those of transformers' ``save_pretrained``: ``config.json``, then ``model.safetensors``, or shards
``model-00001-of-00003.safetensors`` with ``model.safetensors.index.json`` saying which tensor lies where. An index is
written by anyone, so a name in it is only followed to a file that lies directly in the folder.
"""

from __future__ import annotations

import json
import os
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

from qgemm.checkpoint.disk import check_regular
from qgemm.checkpoint.errors import CheckpointError

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# The longest JSON file that is read. The largest models' index is a few MB; parsed, JSON takes several times its size.
LARGEST_JSON = 100_000_000

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMGT]?)(i?)B", re.IGNORECASE)


def checkpoint_files(folder: Path) -> list[str]:
    """The names of the files in ``folder`` that belong to a checkpoint, whole or not."""
    others = {CONFIG_FILE, GENERATION_CONFIG_FILE, INDEX_FILE}
    return sorted(path.name for path in folder.iterdir() if path.name in others or _WEIGHTS.fullmatch(path.name))


def parse_size(size: int | str, argument: str = "max_shard_size") -> int:
    """A number of bytes from an int or from text like ``"5GB"`` (10^9) or ``"5GiB"`` (2^30), given as ``argument``."""
    if isinstance(size, str) and (match := _SIZE.fullmatch(size.strip())):
        number, prefix, binary = match.groups()
        size = int(Fraction(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise ValueError(f'{argument} is {size!r}; it must be a number of bytes above 0, or text like "5GB"')
    return size


def split_into_shards(sizes: dict[str, int], max_shard_size: int) -> dict[str, list[str]]:
    """Tensor names by file, in order, each file of at most ``max_shard_size`` bytes where its tensors allow.

    A tensor that is larger gets a file of its own.
    """
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room or not shards:
            shards.append([])
            room = max_shard_size
        shards[-1].append(name)
        room -= size
    if len(shards) == 1:
        return {WEIGHTS_FILE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def checkpoint_file(folder: Path, name: str) -> Path:
    """The file ``name`` of the checkpoint in ``folder``.

    Raises ``CheckpointError`` if it isn't there, or isn't a regular file, or if the name or a link leads out of the
    folder. Links into the ``blobs`` folder of a Hugging Face cache, which is how the hub's client stores a download,
    are followed.
    """
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} is no folder; give the one that save_quantized wrote")
    # Both separators on every system, and Windows drives: what is refused shouldn't depend on where it is read.
    if name in ("", ".", "..") or any(c in name for c in "/\\:\0"):
        raise CheckpointError(f"{folder}: {name!r} is no plain file name; files must lie directly in the folder")
    path, real_folder = folder / name, folder.resolve()
    # Not Path.is_file, which before Python 3.14 raises OSError for a name that the file system finds too long.
    if not os.path.isfile(path):
        if os.path.exists(path):
            check_regular(path)
        raise CheckpointError(f"{folder} has no file {name}: the checkpoint is incomplete")
    real_path = path.resolve()
    if real_path.parent not in (real_folder, *_hub_blobs(real_folder)):
        raise CheckpointError(f"{path} is a link to {real_path}, outside of the folder")
    return path


def _hub_blobs(folder: Path) -> list[Path]:
    """Where the hub's cache has what the links in ``folder``, a snapshot or a folder in one, lead to."""
    snapshots = (ancestor.parent for ancestor in (folder, folder.parent))
    return [snapshot.parent / "blobs" for snapshot in snapshots if snapshot.name == "snapshots"]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises ``CheckpointError`` for anything else, a name that is there twice, and NaN."""
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes; JSON of up to {LARGEST_JSON} is read")
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique, parse_constant=_constant)
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}; it must be an object")
    return values


def _constant(name: str) -> float:
    # Not JSON, but older configs have infinities. NaN means nothing there, and passes every check of a range.
    if name == "NaN":
        raise ValueError("it holds NaN")
    return float(name)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Which of two is meant can't be known, and readers differ.
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return values
