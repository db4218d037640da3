"""The tensors of a checkpoint in safetensors files, read header first."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.checksum import checksum, format_checksum
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.gguf_file import GGUF_SUFFIX, GgufFile
from qgemm.checkpoint.layout import CONFIG_FILE, checkpoint_file, read_json, save_id, weights_file
from qgemm.checkpoint.safetensors_reader import SafetensorsReader
from qgemm.checkpoint.tensor_file import Stamp, TensorFile

DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
CHECKSUMS = "qgemm_checksums"
"""The key in a file's metadata for the checksums of its tensors: JSON, by name, 16 hexadecimal digits each."""

SAVE = "qgemm_save"
"""The key in the metadata of a file or an index for the id of the save that wrote it."""

MOST_OPEN = 64
"""Files that stay open at a time; systems allow a process 1,024, often."""

DTYPES_BY_CODE = {code: dtype for dtype, code in DTYPE_CODES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, according to its header. ``dtype`` is None for one that PyTorch or qgemm has no name for.

    ``stamp``: the file's when its header was read; values are only read from that file. ``digest``: of the header.
    ``start``: where the values begin in the file.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    stamp: Stamp | None = field(default=None, kw_only=True, compare=False)
    digest: str = field(default="", kw_only=True, compare=False)
    start: int = field(default=0, kw_only=True, compare=False)

    def __str__(self) -> str:
        """Dtype and shape, for errors."""
        return f"{self.dtype} {list(self.shape)}"

    @property
    def nbytes(self) -> int:
        """The size of its values."""
        return math.prod(self.shape) * (0 if self.dtype is None else self.dtype.itemsize)


def unfit(path: Path, name: str, tensor: StoredTensor | None, wanted: str) -> CheckpointError:
    """The error for the tensor ``name`` that is missing, or isn't as ``wanted``."""
    found = "is missing" if tensor is None else f"is {tensor}"
    return CheckpointError(f"{path}: {name} {found}; it must be {wanted}")


def read_headers(folder: Path, config: dict[str, Any]) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in ``folder``, by name, without values.

    ``config``: the content of its ``config.json``. Raises ``CheckpointError`` if a file is missing or damaged,
    if the files and the index don't agree, or if not all of them are from one save.
    """
    wanted = save_id(config, folder / CONFIG_FILE)
    path = weights_file(folder, config)
    if path.suffix == ".safetensors":
        tensors, metadata = read_header_and_metadata(path)
        check_save(path, metadata.get(SAVE), wanted)
        return tensors
    index = read_json(path)
    about = index.get("metadata")
    if isinstance(about, dict) and SAVE in about:  # indices written by transformers have none
        check_save(path, about[SAVE], wanted)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path}: weight_map must be an object of tensor names and file names")
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        tensors, metadata = read_header_and_metadata(checkpoint_file(folder, shard))
        check_save(folder / shard, metadata.get(SAVE), wanted)
        for name, tensor in tensors.items():
            if name in found:
                raise CheckpointError(f"tensor {name} is in two files, {found[name].path} and {tensor.path}")
            found[name] = tensor
    for name, tensor in found.items():
        if weight_map.get(name) != tensor.path.name:
            place = weight_map.get(name, "no file")
            raise CheckpointError(f"{tensor.path} holds tensor {name}, which {path.name} puts in {place}")
    for name, shard in weight_map.items():
        if name not in found:
            raise CheckpointError(f"{folder / shard} has no tensor {name}, which {path.name} puts there")
    return found


def check_save(path: Path, found: object, wanted: str | None) -> None:
    """Raises ``CheckpointError`` if the file at ``path`` and the config were written by different saves."""
    if found != wanted:
        saves = [f"of the save {save}" if save else "of no save" for save in (found, wanted)]
        raise CheckpointError(
            f"{path} is {saves[0]} and {CONFIG_FILE} {saves[1]}: these are files of two checkpoints. Save the model "
            "again, or copy all files of one of them"
        )


class OpenFiles:
    """Files with tensors that stay open, for a caller that reads some tensors at a time; to be used in ``closing``."""

    def __init__(self) -> None:
        """Opens nothing yet."""
        self._files: dict[Path, tuple[TensorFile, dict[str, object] | None]] = {}

    def open(self, path: Path) -> tuple[TensorFile, dict[str, object] | None]:
        """The file at ``path``, and the checksums in it; raises as ``read_values`` does."""
        if path not in self._files:
            if len(self._files) >= MOST_OPEN:
                self._files.pop(next(iter(self._files)))[0].close()
            file = GgufFile(path) if path.suffix == GGUF_SUFFIX else SafetensorsReader(path)
            try:
                self._files[path] = file, parse_checksums(path, file.metadata)
            except CheckpointError:
                file.close()
                raise
        return self._files[path]

    def close(self) -> None:
        """Closes the files."""
        for file, _ in self._files.values():
            file.close()
        self._files.clear()


def read_values(
    stored: dict[str, StoredTensor], device: torch.device, files: OpenFiles | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Reads the tensors of ``stored``, file by file, each into memory of its own on ``device``.

    ``files``: which keeps the files open; None opens and closes each. Raises ``CheckpointError`` if a tensor differs
    from its checksum, in a file that has checksums.
    """
    for name, value, is_sound in read_and_check(stored, device, files):
        if is_sound is False:
            path = stored[name].path
            raise CheckpointError(
                f"{path}: tensor {name} doesn't have the checksum that it was saved with: copy or download it again"
            )
        yield name, value


def read_and_check(
    stored: dict[str, StoredTensor], device: torch.device, files: OpenFiles | None = None
) -> Iterator[tuple[str, Tensor, bool | None]]:
    """As ``read_values``, but yields whether each tensor matches its checksum; None in a file without checksums."""
    by_path: dict[Path, list[str]] = {}
    for name, tensor in stored.items():
        by_path.setdefault(tensor.path, []).append(name)
    for path, names in by_path.items():
        with ExitStack() as stack:
            file, checksums = (files or stack.enter_context(closing(OpenFiles()))).open(path)
            stamp = file.stamp_now()
            if any(stored[name].stamp not in (None, stamp) for name in names):
                raise CheckpointError(f"{path} was replaced while the checkpoint was read: load it again")
            for name in names:
                place, wanted = file.places.get(name), stored[name]
                if place is None or (place.shape, DTYPES_BY_CODE.get(place.code)) != (wanted.shape, wanted.dtype):
                    raise CheckpointError(f"{path} was changed while it was read: tensor {name} has changed")
                if wanted.dtype is None:
                    raise CheckpointError(f"{path}: tensor {name} is {place.code}, which qgemm doesn't support")
                value = file.read(name).view(wanted.dtype).reshape(wanted.shape).to(device)
                is_sound = None
                if checksums is not None:
                    is_sound = checksums.get(name) == format_checksum(checksum(value))
                yield name, value, is_sound


def has_checksums(path: Path) -> bool:
    """Whether the file at ``path`` contains checksums of its tensors; raises as ``read_values`` does."""
    with closing(OpenFiles()) as files:
        return files.open(path)[1] is not None


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata in the file's header; raises ``CheckpointError`` if it can't be read."""
    with SafetensorsReader(path) as file:
        return file.metadata


def parse_checksums(path: Path, metadata: Mapping[str, str] | None) -> dict[str, object] | None:
    """The checksums, by name, in the ``metadata`` of the file at ``path``; None if another program wrote none."""
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
    """The tensors of one file, by name; raises ``CheckpointError`` if it is truncated or isn't a safetensors file."""
    return read_header_and_metadata(path)[0]


def read_header_and_metadata(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of one file, by name, and its metadata; raises as ``read_header`` does."""
    with SafetensorsReader(path) as file:
        tensors = {
            name: StoredTensor(
                path,
                place.shape,
                DTYPES_BY_CODE.get(place.code),
                stamp=file.stamp,
                digest=file.digest,
                start=place.start,
            )
            for name, place in file.places.items()
        }
        return tensors, file.metadata
