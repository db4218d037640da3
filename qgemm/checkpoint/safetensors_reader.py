"""Reads a safetensors file: its header, checked against the format, then values, all from one open file.

The format: 8 bytes with the header's length, the header as JSON (dtype, shape and place of each tensor), the values.

The library isn't used for reading because it maps files into memory. If a mapped file becomes shorter, the process ends
with a bus error; a pipe in the file's place would block forever; and opening a path twice may give two different files,
so that the checked header says nothing about the second.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from qgemm.checkpoint.disk import open_regular, reading
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import unique_names

LARGEST_HEADER = 100_000_000
"""In bytes: the library refuses longer headers."""

# The number of bits of a value, for every dtype of the format, including those that nothing here computes with.
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16},
    **{"I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64},
}
_METADATA = "__metadata__"


class Stamp(NamedTuple):
    """Tells a file from another one of the same name, and from its own state before a write."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, file: BinaryIO) -> Stamp:
        """The stamp of an open file."""
        status = os.fstat(file.fileno())
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def find_change(self, status: os.stat_result) -> str | None:
        """How the file, whose status is now ``status``, has changed; None if it hasn't."""
        if (status.st_dev, status.st_ino) != (self.device, self.inode):
            return "is another file now"
        if status.st_size != self.size:
            return f"has {status.st_size:,} bytes now, and had {self.size:,}"
        return None if status.st_mtime_ns == self.mtime_ns else "was written to"


def file_stamp(path: Path) -> Stamp:
    """The stamp of the file at ``path``; raises ``CheckpointError`` if there is no regular file."""
    with reading(path), open_regular(path) as file:
        return Stamp.of(file)


@dataclass(frozen=True)
class Place:
    """A tensor in a file: its dtype in the header, its shape, and the positions of its bytes in the file."""

    code: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_bytes(file: BinaryIO, path: Path, start: int, count: int) -> Tensor:
    """Reads bytes of ``file``, the one at ``path``. Raises ``CheckpointError`` if it has become shorter."""
    values = torch.empty(count, dtype=torch.uint8, device="cpu")  # explicit, because meta may be the default
    if not count:
        return values
    target = memoryview((ctypes.c_char * count).from_address(values.data_ptr())).cast("B")
    with reading(path):
        file.seek(start)
        found = file.readinto(target)  # type: ignore[attr-defined]
    if found != count:
        raise CheckpointError(f"{path} became shorter while it was read")
    return values


class SafetensorsReader(AbstractContextManager["SafetensorsReader"]):
    """An open safetensors file, to be closed or used in a ``with`` block.

    ``places``: its tensors by name. ``metadata``: the header's metadata. ``digest``: of the header. ``stamp``: of the
    file.
    """

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises ``CheckpointError`` if the file is missing, truncated, or of another format."""
        self.path = path
        with reading(path):
            self._file = open_regular(path)
        try:
            self.stamp = Stamp.of(self._file)
            header = self._read_header()
            self.digest = hashlib.sha256(len(header).to_bytes(8, "little") + header).hexdigest()
            self.places, self.metadata = _parse(header, self.stamp.size)
        except (OSError, ValueError, RecursionError) as error:
            self.close()
            raise CheckpointError(f"{path} is truncated or no safetensors file: {error}") from error

    def read(self, name: str) -> Tensor:
        """Reads the bytes of a tensor into new memory. Raises ``CheckpointError`` if the file has become shorter."""
        place = self.places[name]
        return read_bytes(self._file, self.path, place.start, place.stop - place.start)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        """Closes the file."""
        self.close()

    def _read_header(self) -> bytes:
        prefix = self._file.read(8)
        if prefix == b"version ":
            raise ValueError("it is a pointer of Git LFS, without values; fetch those with git lfs pull")
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= min(LARGEST_HEADER, self.stamp.size - 8):
            raise ValueError("its header doesn't end")
        header = self._file.read(length)
        if len(header) < length:
            raise ValueError("it became shorter while it was read")
        return header


def _parse(text: bytes, size: int) -> tuple[dict[str, Place], dict[str, str]]:
    """The tensors and the metadata in the header of a file of ``size`` bytes; raises ``ValueError`` if invalid."""
    header = json.loads(text.decode(), object_pairs_hook=unique_names)
    if not isinstance(header, dict):
        raise ValueError("its header isn't an object")
    metadata = header.pop(_METADATA, None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{_METADATA} doesn't map names to strings")
    "".join([*header, *metadata, *metadata.values()]).encode()  # raises for half a surrogate pair, which JSON allows
    places = {name: _place(name, entry, 8 + len(text)) for name, entry in header.items()}
    end = 8 + len(text)
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].stop)):
        if place.start != end:
            raise ValueError(f"there is a gap before tensor {name}, or it shares bytes with another")
        end = place.stop
    if end != size:
        raise ValueError(f"its tensors end at byte {end} of {size}")
    return places, metadata


def _place(name: str, entry: Any, begin: int) -> Place:
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name} has no dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _BITS:
        raise ValueError(f"the dtype of tensor {name} is {str(code)[:40]!r}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"shape or data_offsets of tensor {name} aren't sizes")
    if math.prod(shape) * _BITS[code] != 8 * (offsets[1] - offsets[0]):
        raise ValueError(f"tensor {name} of {code} {shape} has {offsets[1] - offsets[0]} bytes")
    return Place(code, tuple(shape), begin + offsets[0], begin + offsets[1])


def _are_sizes(values: Any) -> bool:
    # PyTorch counts with 63 bits, and supports at most as many dimensions.
    is_list = isinstance(values, list) and len(values) <= 64
    return is_list and all(type(value) is int and 0 <= value < 2**63 for value in values)
