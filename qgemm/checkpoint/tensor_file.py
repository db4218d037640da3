"""An open file with tensors, in any format: what it holds by name, and where, then values, all from one open file."""

from __future__ import annotations

import ctypes
import hashlib
import os
from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import torch
from torch import Tensor

from qgemm.checkpoint.disk import open_regular, reading
from qgemm.checkpoint.errors import CheckpointError

_Self = TypeVar("_Self", bound="TensorFile")


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


class TensorFile(AbstractContextManager["TensorFile"]):
    """An open file of a format that a subclass reads, to be closed or used in a ``with`` block.

    ``places``: its tensors by name. ``metadata``: the header's metadata. ``digest``: of the header. ``stamp``: of the
    file. ``kind``: what a file of the format is called in errors.
    """

    kind: str
    places: dict[str, Place]
    metadata: dict[str, str]

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises ``CheckpointError`` if the file is missing, truncated, or of another format."""
        self.path = path
        with reading(path):
            self._file = open_regular(path)
        try:
            self.stamp = Stamp.of(self._file)
            header = self._take_header()
            self.digest = hashlib.sha256(len(header).to_bytes(8, "little") + header).hexdigest()
        except (OSError, ValueError, RecursionError) as error:
            self.close()
            raise CheckpointError(f"{path} is truncated or no {self.kind} file: {error}") from error

    @abstractmethod
    def _take_header(self) -> bytes:
        """Reads the header's bytes, and sets ``places`` and ``metadata``; raises ``ValueError`` if it is invalid."""

    def read(self, name: str) -> Tensor:
        """Reads the bytes of a tensor into new memory. Raises ``CheckpointError`` if the file has become shorter."""
        place = self.places[name]
        return read_bytes(self._file, self.path, place.start, place.stop - place.start)

    def stamp_now(self) -> Stamp:
        """The stamp that the open file has now, which is another one than ``stamp`` if it was written to."""
        return Stamp.of(self._file)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self: _Self) -> _Self:
        """The file itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the file."""
        self.close()
