"""The files beside the weights, such as the tokenizer: finds and copies those that belong to the checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import BinaryIO

from qgemm.checkpoint.disk import open_regular, reading
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import checkpoint_file, is_checkpoint_file, read_text
from qgemm.warn import warn_user

CHAT_TEMPLATES = "additional_chat_templates"
"""The only folder that transformers' tokenizers and processors write beside their files."""

_MODULES = "modules.json"
"""Where sentence-transformers lists the modules after the model, such as pooling, each with a folder of its own."""

# Weights of any library, and indices of them.
_WEIGHTS = (
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf", ".ggml", ".onnx", ".ot")
    + (".onnx_data", ".tflite", ".npz", ".npy", ".index.json")
)  # fmt: skip
# Files, besides config.json, in which libraries describe quantization: copies would be wrong for the new checkpoint.
_QUANTIZATION = ("quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json")
_CODE = (".py", ".pyc", ".so", ".dll")
_BYTES_AT_A_TIME = 1 << 20


def find_companions(folder: Path) -> tuple[list[Path], list[str]]:
    """The files of ``folder`` to copy, by their paths in it, and the code in it, which isn't copied.

    These are all files except weights, code, hidden files, JSON files that are rewritten or describe quantization, and
    folders other than ``CHAT_TEMPLATES`` and those of sentence-transformers' modules, which may have weights of their
    own. Raises ``CheckpointError`` for a link that leads out of the folder.
    """
    found: list[Path] = []
    globs = {CHAT_TEMPLATES: "*.jinja", **dict.fromkeys(_module_folders(folder), "[!.]*")}
    for path in sorted(folder.iterdir()):
        name = path.name
        is_written_anew = is_checkpoint_file(name) or name in _QUANTIZATION
        if name in globs and path.is_dir():
            if path.is_symlink():
                raise CheckpointError(f"{path} is a link; it must be a folder")
            found += [each for each in sorted(path.glob(globs[name])) if not each.is_dir()]
        elif not (path.is_dir() or name.startswith(".") or is_written_anew or name.lower().endswith(_WEIGHTS)):
            found.append(path)
    code = [path for path in found if path.name.lower().endswith(_CODE)]
    copied = [checkpoint_file(path.parent, path.name).relative_to(folder) for path in found if path not in code]
    return copied, [path.relative_to(folder).as_posix() for path in code]


def _module_folders(folder: Path) -> list[str]:
    if not (folder / _MODULES).is_file():
        return []
    try:
        return [str(module["path"]) for module in json.loads(read_text(checkpoint_file(folder, _MODULES)))]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []  # the file has another meaning, and is copied unchanged


def find_companions_to_copy(folder: Path) -> list[Path]:
    """The files that ``find_companions`` finds; warns about code, which isn't copied."""
    copied, code = find_companions(folder)
    if code:
        warn_user(f"{', '.join(code)} in {folder} are not copied: qgemm runs no code of a checkpoint")
    return copied


def copy_companion(path: Path, target: BinaryIO) -> None:
    """Copies the file at ``path``; raises ``CheckpointError`` if it no longer exists, or changes meanwhile."""
    with reading(path):
        original = open_regular(path)
    with original:
        before = os.fstat(original.fileno())
        while piece := _read(original, path):
            target.write(piece)
        after = os.fstat(original.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise CheckpointError(f"{path} changed while it was copied: try again when no process writes to it")


def _read(file: BinaryIO, path: Path) -> bytes:
    with reading(path):
        return file.read(_BYTES_AT_A_TIME)
