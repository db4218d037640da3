"""The float checkpoint that is read: safetensors files, some rows of a tensor at a time.

Values are read into memory of their own, not mapped: pages of a mapped file count as memory that the process uses, and
a file that shrinks while it is mapped ends the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import INDEX_FILE, LARGEST_JSON, WEIGHTS_FILE
from qgemm.checkpoint.safetensors_file import StoredTensor, read_headers

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class SourceTensor(StoredTensor):
    """A tensor in a file, and where in it its values begin."""

    offset: int


class Source:
    """The tensors of the checkpoint in ``folder``, by name. ``open_source`` makes one."""

    def __init__(self, folder: Path, tensors: dict[str, SourceTensor], fingerprints: dict[str, str]) -> None:
        """``fingerprints``: by file, what tells it from another one of its name."""
        self.folder = folder
        self.tensors = tensors
        self.fingerprints = fingerprints
        self._files: dict[Path, BinaryIO] = {}

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Some rows (indices of the first dimension) of the tensor ``name``, in the dtype that it is stored in.

        A tensor without dimensions has one row, the number. Raises ``CheckpointError`` if the file has become shorter.
        """
        tensor = self.tensors[name]
        assert tensor.dtype is not None
        shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
        row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        values = torch.empty(math.prod(shape) * tensor.dtype.itemsize, dtype=torch.uint8)
        if values.nbytes:
            target = memoryview((ctypes.c_char * values.nbytes).from_address(values.data_ptr())).cast("B")
            file = self._open(tensor.path)
            file.seek(tensor.offset + start * row_bytes)
            try:
                count = file.readinto(target)  # type: ignore[attr-defined]
            except OSError as error:
                raise CheckpointError(f"{tensor.path} can't be read: {error}") from error
            if count != values.nbytes:
                raise CheckpointError(f"{tensor.path} became shorter while it was read")
        return values.view(tensor.dtype).reshape(shape)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, path: Path) -> BinaryIO:
        if path not in self._files:
            try:
                self._files[path] = path.open("rb")
            except OSError as error:
                raise CheckpointError(f"{path} can't be read: {error}") from error
        return self._files[path]


@contextmanager
def open_source(folder: Path) -> Iterator[Source]:
    """The float checkpoint in ``folder``; raises ``CheckpointError`` if it isn't whole, or is a pickle."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder. To quantize a model of the Hugging Face hub, download it first: "
            f"hf download {folder} --local-dir {folder.name}"
        )
    if not (folder / INDEX_FILE).exists() and not (folder / WEIGHTS_FILE).exists():
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        if pickles:
            raise CheckpointError(
                f"{folder} holds {pickles[0]}, a pickle, and no {WEIGHTS_FILE}. Loading a pickle runs the code in it, "
                "so qgemm doesn't: convert it to safetensors first (load it with transformers, then save_pretrained)"
            )
    stored = read_headers(folder)
    layouts = {path: read_layout(path) for path in sorted({tensor.path for tensor in stored.values()})}
    tensors = {}
    for name, tensor in stored.items():
        layout = layouts[tensor.path]
        try:
            offset = layout.begin + layout.header[name]["data_offsets"][0]
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{tensor.path} was changed while it was read") from error
        tensors[name] = SourceTensor(tensor.path, tensor.shape, tensor.dtype, offset)
    fingerprints = {path.name: f"{file.size} {file.mtime_ns} {file.digest}" for path, file in layouts.items()}
    source = Source(folder, tensors, fingerprints)
    try:
        yield source
    finally:
        source.close()


@dataclass(frozen=True)
class FileLayout:
    """Where things lie in a safetensors file.

    ``header``: as parsed. ``begin``: of the values, from the start of the file. ``digest``: of the header's text.
    """

    header: dict[str, Any]
    begin: int
    digest: str
    size: int
    mtime_ns: int


def read_layout(path: Path) -> FileLayout:
    """The layout of a file; raises ``CheckpointError`` if it has none. It isn't checked further."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            prefix = file.read(8)
            text = file.read(min(int.from_bytes(prefix, "little"), LARGEST_JSON))
        header = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is no safetensors file")
    digest = hashlib.sha256(prefix + text).hexdigest()
    return FileLayout(header, 8 + len(text), digest, status.st_size, status.st_mtime_ns)
