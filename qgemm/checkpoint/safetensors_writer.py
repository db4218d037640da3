"""Writes safetensors files; only one tensor at a time, or a part of it, is in CPU memory.

The library isn't used for writing because its ``save_file`` needs all tensors of a file in CPU memory at once, needs
numpy, and makes files that only their owner may read.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import BinaryIO

from torch import Tensor

from qgemm.checkpoint.checksum import RunningChecksum, checksum_in_file, format_checksum
from qgemm.checkpoint.safetensors_file import CHECKSUMS, DTYPE_CODES
from qgemm.checkpoint.safetensors_reader import LARGEST_HEADER


def check_tensor_name(name: str) -> None:
    """Raises ``ValueError`` for a name that the format reserves, or that isn't text that its readers accept."""
    # "ignore" drops what UTF-8 can't encode: half of a surrogate pair.
    if name == "__metadata__" or name.encode(errors="ignore").decode() != name:
        raise ValueError(f"a tensor is called {name!r}, which a safetensors file can't hold: rename it")


def write_safetensors(
    file: BinaryIO,
    tensors: dict[str, Tensor],
    written: Callable[[int], object],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes ``tensors``, from any device and with any strides, and calls ``written`` with the bytes of each.

    Every dtype must be in ``DTYPE_CODES``. One tensor at a time is held in CPU memory. ``file`` must be seekable.
    ``metadata``: to store in the header.
    """
    writer = SafetensorsWriter(file, tensors, metadata)
    for name in writer.names:
        writer.write(name, tensors[name])
        written(tensors[name].nbytes)
    writer.finish()


class SafetensorsWriter:
    """Writes a file piece by piece; the tensors' shapes and dtypes must be known beforehand.

    Tensors may come in any order, also in turns; the pieces of one tensor come in the order of its values.
    """

    def __init__(self, file: BinaryIO, tensors: dict[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """``file`` must be seekable: the header, which comes first, contains the checksums, which are known last.

        ``tensors`` only give names, shapes and dtypes; they may be on meta. Raises ``ValueError`` for names that no
        reader accepts, or for too many tensors.
        """
        for name in tensors:
            check_tensor_name(name)
        # Widest first, as in the library's files, so that every tensor lies at a multiple of its item size.
        tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
        self._file = file
        self._metadata = {"format": "pt", **(metadata or {})}
        self._checksums = {name: RunningChecksum() for name in tensors}
        self._header: dict[str, object] = {"__metadata__": {}}
        ends = dict(zip(tensors, accumulate(tensor.nbytes for tensor in tensors.values()), strict=True))
        for name, tensor in tensors.items():
            code, offsets = DTYPE_CODES[tensor.dtype], [ends[name] - tensor.nbytes, ends[name]]
            self._header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": offsets}
        self._begin = file.tell()
        values_begin = self._begin + self._write_header()
        self._ends = {name: values_begin + end for name, end in ends.items()}
        self._starts = {name: end - tensors[name].nbytes for name, end in self._ends.items()}
        self._next = dict(self._starts)
        self._end = values_begin + sum(tensor.nbytes for tensor in tensors.values())

    @property
    def names(self) -> list[str]:
        """The names of the tensors in the order of the file."""
        return list(self._ends)

    @property
    def written(self) -> dict[str, tuple[int, str]]:
        """For each tensor that was begun, the number of bytes written and their checksum, as ``go_on`` accepts it."""
        return {
            name: (self._next[name] - start, format_checksum(self._checksums[name].value))
            for name, start in self._starts.items()
            if self._next[name] != start
        }

    def go_on(self, written: Mapping[str, tuple[int, str]]) -> bool:
        """Continues in a file that an earlier writer of these tensors left; returns False if its content is wrong.

        ``written``: that writer's, taken when the file contained these bytes. If False, nothing of the file is used.
        """
        found = {}
        for name, (size, expected) in written.items():
            if not 0 <= size <= self._ends.get(name, 0) - self._starts.get(name, 0):
                return False
            try:
                found[name] = checksum_in_file(self._file, self._starts[name], size)
            except OSError:
                return False
            if format_checksum(found[name].value) != expected:
                return False
        self._checksums.update(found)
        self._next.update((name, self._starts[name] + size) for name, (size, _) in written.items())
        return True

    def write(self, name: str, piece: Tensor) -> None:
        """Writes the next values of the tensor ``name``, from any device and with any strides."""
        values = piece.detach().to("cpu").contiguous()
        place = self._next[name]
        self._next[name] += values.nbytes
        assert self._next[name] <= self._ends[name], f"{name} has more values than its shape says"
        self._checksums[name].add(values)
        self._file.seek(place)
        self._file.write((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))

    def finish(self) -> None:
        """Writes the checksums, and leaves ``file`` positioned at its end."""
        incomplete = [name for name, end in self._ends.items() if self._next[name] != end]
        assert not incomplete, f"{incomplete[0]} has fewer values than its shape says"
        self._file.seek(self._begin)
        self._write_header()
        self._file.seek(self._end)
        self._file.truncate()

    def _write_header(self) -> int:
        # Written once at the beginning to make room: checksums always have the same length.
        checksums = {name: format_checksum(checksum.value) for name, checksum in self._checksums.items()}
        self._header["__metadata__"] = {**self._metadata, CHECKSUMS: json.dumps(checksums)}
        text = json.dumps(self._header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > LARGEST_HEADER:
            raise ValueError(
                f"a file of {len(self._checksums)} tensors needs a header of {len(text)} bytes; readers accept at most "
                f"{LARGEST_HEADER}: choose a smaller max_shard_size"
            )
        return self._file.write(len(text).to_bytes(8, "little") + text)
