"""Safetensors files, read header first.

The format: 8 bytes with the header's length, the header as JSON (dtype, shape and place of each tensor), the values.
Reading is the library's, which checks the header against the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qgemm.checkpoint.checksum import checksum, format_checksum
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import INDEX_FILE, WEIGHTS_FILE, checkpoint_file, read_json

DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
CHECKSUMS = "qgemm_checksums"
"""Where a file's metadata has the checksums of its tensors: JSON, by name, 16 hexadecimal digits each."""

_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, as its header has it. ``dtype`` is None for one that PyTorch or qgemm has no name for."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    @property
    def nbytes(self) -> int:
        """The size of its values."""
        return math.prod(self.shape) * (0 if self.dtype is None else self.dtype.itemsize)


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in ``folder``, by name, with no values read.

    Raises ``CheckpointError`` if a file is missing or damaged, or if the files and the index don't agree.
    """
    if not (folder / INDEX_FILE).exists():
        return read_header(checkpoint_file(folder, WEIGHTS_FILE))
    index_path = checkpoint_file(folder, INDEX_FILE)
    if (folder / WEIGHTS_FILE).exists():
        raise CheckpointError(
            f"{folder} holds {WEIGHTS_FILE} and {INDEX_FILE}: remove the one that is not this model's"
        )
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index_path}: weight_map must be an object of tensor names and file names")
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        for name, tensor in read_header(checkpoint_file(folder, shard)).items():
            if name in found:
                raise CheckpointError(f"tensor {name} is in two files, {found[name].path} and {tensor.path}")
            found[name] = tensor
    for name, tensor in found.items():
        if weight_map.get(name) != tensor.path.name:
            place = weight_map.get(name, "no file")
            raise CheckpointError(f"{tensor.path} holds tensor {name}, which {INDEX_FILE} puts in {place}")
    for name, shard in weight_map.items():
        if name not in found:
            raise CheckpointError(f"{folder / shard} has no tensor {name}, which {INDEX_FILE} puts there")
    return found


def read_values(stored: dict[str, StoredTensor], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Reads the tensors of ``stored``, file by file, each into memory of its own on ``device``.

    Raises ``CheckpointError`` if one differs from its checksum, in a file that has any.
    """
    for name, value, is_sound in read_and_check(stored, device):
        if is_sound is False:
            path = stored[name].path
            raise CheckpointError(f"{path}: tensor {name} doesn't have the checksum that it was saved with")
        yield name, value


def read_and_check(stored: dict[str, StoredTensor], device: torch.device) -> Iterator[tuple[str, Tensor, bool | None]]:
    """As ``read_values``, with whether a tensor has its checksum instead of an error; None in a file without any."""
    by_path: dict[Path, list[str]] = {}
    for name, tensor in stored.items():
        by_path.setdefault(tensor.path, []).append(name)
    for path, names in by_path.items():
        try:
            with safe_open(path, framework="pt") as file:
                checksums = _read_checksums(path, file.metadata())
                for name in names:
                    value = file.get_tensor(name)
                    if (tuple(value.shape), value.dtype) != (stored[name].shape, stored[name].dtype):
                        raise CheckpointError(f"{path} was changed while it was read: tensor {name} is another one now")
                    # A copy also on the CPU: the tensor may be a view of the file, which can change under it.
                    value = value.to(device, copy=True)
                    is_sound = None
                    if checksums is not None:
                        is_sound = checksums.get(name) == format_checksum(checksum(value))
                    yield name, value, is_sound
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} can't be read: {error}") from error


def has_checksums(path: Path) -> bool:
    """Whether the file at ``path`` says what the checksums of its tensors are; raises as ``read_values`` does."""
    return read_checksums(path) is not None


def read_checksums(path: Path) -> dict[str, object] | None:
    """What the file at ``path`` says its tensors' checksums are, by name; None if it doesn't. Raises as above."""
    return _read_checksums(path, read_metadata(path))


def read_metadata(path: Path) -> dict[str, str]:
    """What the file's header says beside its tensors; raises ``CheckpointError`` if it can't be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error


def _read_checksums(path: Path, metadata: dict[str, str] | None) -> dict[str, object] | None:
    # Files by other programs have none.
    text = (metadata or {}).get(CHECKSUMS)
    if text is None:
        return None
    try:
        checksums = json.loads(text)
    except (ValueError, RecursionError):
        checksums = None
    if not isinstance(checksums, dict):
        raise CheckpointError(f"{path}: {CHECKSUMS} must be an object of tensor names and checksums")
    return checksums


def read_header(path: Path) -> dict[str, StoredTensor]:
    """What one file holds, by name; raises ``CheckpointError`` if it is truncated or no safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (the file is no dict)
            return {
                name: StoredTensor(path, tuple(part.get_shape()), _DTYPES.get(part.get_dtype()))
                for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or no safetensors file: {error}") from error
