"""The float checkpoint that is read: safetensors files, some rows of a tensor at a time.

Values are read into separate memory instead of mapped, because pages of a mapped file count as memory of the process,
and a file that shrinks while it is mapped ends the process. Reading may take hours, so each file is identified: values
come from the file whose header was read, and it can be checked at any time that no file has changed.

For a checkpoint larger than half of the free memory, the system is told to drop what was read from its cache: otherwise
that would displace other files, and finding room takes time.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from qgemm.checkpoint.disk import forget_bytes, open_regular, reading
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    INDEX_FILE,
    LARGEST_JSON,
    checkpoint_file,
    hub_hint,
    read_json,
    weights_file,
)
from qgemm.checkpoint.safetensors_file import StoredTensor, read_headers
from qgemm.checkpoint.safetensors_reader import SafetensorsReader
from qgemm.checkpoint.tensor_file import Stamp, read_bytes
from qgemm.device import free_memory

_JSON_FILES = (CONFIG_FILE, GENERATION_CONFIG_FILE, INDEX_FILE)


@dataclass(frozen=True)
class FileIdentity:
    """``stamp``: of a file. ``digest``: of the header of a safetensors file, or of the content of any other file."""

    stamp: Stamp
    digest: str

    @property
    def fingerprint(self) -> str:
        """Identifies the file for a later run; it leaves out the device's number, which changes after a restart."""
        return f"{self.stamp.inode} {self.stamp.size} {self.stamp.mtime_ns} {self.digest}"


class Source:
    """The tensors of the checkpoint in ``folder``, by name. ``open_source`` makes one."""

    def __init__(
        self, folder: Path, tensors: dict[str, StoredTensor], identities: dict[str, FileIdentity | None]
    ) -> None:
        """``identities``: of the files that were read, by name; None for one that doesn't exist."""
        self.folder = folder
        self.tensors = tensors
        self.identities = identities
        self._files: dict[Path, BinaryIO] = {}
        # False where the system doesn't tell its free memory.
        self._is_large = 2 * sum(tensor.nbytes for tensor in tensors.values()) > free_memory(torch.device("cpu")) > 0

    @property
    def fingerprints(self) -> dict[str, Any]:
        """JSON-ready values that identify the files, also for a later run."""
        shards = {n: i and i.fingerprint for n, i in self.identities.items() if n not in _JSON_FILES}
        return {name: (i := self.identities[name]) and i.digest for name in _JSON_FILES} | {"source": shards}

    def find_change(self, digests: bool = False) -> str | None:
        """How the files have changed since they were read; None if they haven't.

        ``digests``: whether to read the headers, the config and the index again.
        """
        for name, before in self.identities.items():
            path = self.folder / name
            try:
                if before is None:
                    change = f"{name} is there now" if os.path.lexists(path) else None
                else:
                    change = before.stamp.find_change(os.stat(path))
                    if change is None and digests and _identify(path) != before:
                        change = "has another header now" if path.suffix == ".safetensors" else "was written to"
                    change = change and f"{name} {change}"
            except FileNotFoundError:
                change = f"{name} is gone"
            except (OSError, CheckpointError) as error:
                change = f"{name} can't be read any more ({error})"
            if change is not None:
                return change
        return None

    def check_unchanged(self, digests: bool = False) -> None:
        """Raises ``CheckpointError`` if ``find_change`` finds a change."""
        if change := self.find_change(digests):
            raise CheckpointError(f"{self.folder} was changed while it was read: {change}")

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Reads some rows (indices of the first dimension) of the tensor ``name``, in its stored dtype.

        A tensor without dimensions has one row. Raises ``CheckpointError`` if the file has become shorter.
        """
        tensor = self.tensors[name]
        assert tensor.dtype is not None
        shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
        row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        count = math.prod(shape) * tensor.dtype.itemsize
        file, offset = self._open(tensor), tensor.start + start * row_bytes
        values = read_bytes(file, tensor.path, offset, count)
        if self._is_large:
            forget_bytes(file, offset, count)
        return values.view(tensor.dtype).reshape(shape)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, tensor: StoredTensor) -> BinaryIO:
        if (path := tensor.path) not in self._files:
            with reading(path):
                file = open_regular(path)
            assert tensor.stamp is not None
            if change := tensor.stamp.find_change(os.fstat(file.fileno())):
                file.close()
                raise CheckpointError(f"{path} {change}: it was changed while it was read")
            self._files[path] = file
        return self._files[path]


@contextmanager
def open_source(folder: Path) -> Iterator[Source]:
    """Opens the float checkpoint in ``folder``; raises ``CheckpointError`` if it is incomplete, or a pickle."""
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "is not a folder"
        raise CheckpointError(f"{folder} {what}; give the folder of a float model{hub_hint(folder)}")
    # Before reading, so that any later change of the files is noticed.
    identities = {name: _identify(folder / name) if (folder / name).exists() else None for name in _JSON_FILES}
    config = read_json(checkpoint_file(folder, CONFIG_FILE)) if identities[CONFIG_FILE] is not None else {}
    weights = weights_file(folder, config)
    if weights.suffix == ".json":  # an index may have a name of its own
        identities[weights.name] = _identify(weights)
    tensors = read_headers(folder, config)
    for tensor in tensors.values():
        assert tensor.stamp is not None
        identities[tensor.path.name] = FileIdentity(tensor.stamp, tensor.digest)
    with closing(Source(folder, tensors, identities)) as source:
        yield source


def _identify(path: Path) -> FileIdentity:
    if path.suffix == ".safetensors":
        with SafetensorsReader(path) as reader:
            return FileIdentity(reader.stamp, reader.digest)
    with reading(path), open_regular(path) as file:
        stamp = Stamp.of(file)
        return FileIdentity(stamp, hashlib.sha256(file.read(LARGEST_JSON)).hexdigest())
