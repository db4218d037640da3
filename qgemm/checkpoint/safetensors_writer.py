"""``SafetensorsWriter``: a safetensors file that is written in pieces, for tensors that are never whole in memory.

The file is the one that ``write_safetensors`` would write of the same tensors, byte for byte, checksums included.
"""

from __future__ import annotations

import ctypes
import json
from typing import BinaryIO

import torch
from torch import Tensor

from qgemm.checkpoint.safetensors_file import CHECKSUMS, DTYPE_CODES


class SafetensorsWriter:
    """Writes the values of tensors whose shapes and dtypes are known beforehand.

    The tensors come in any order, also in turns; the pieces of one come in the order of its values.
    """

    def __init__(self, file: BinaryIO, tensors: dict[str, Tensor]) -> None:
        """``file`` must be seekable. ``tensors`` give names, shapes and dtypes alone; they may be on meta."""
        # Widest first, as the library orders them, so that every tensor lies at a multiple of its item size.
        tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
        self._file = file
        self._checksums = {name: _Checksum() for name in tensors}
        self._header: dict[str, object] = {"__metadata__": {}}
        self._left: dict[str, int] = {}
        self._place: dict[str, int] = {}
        end = 0
        for name, tensor in tensors.items():
            start, end = end, end + tensor.nbytes
            self._header[name] = {
                "dtype": DTYPE_CODES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
            self._left[name] = tensor.nbytes
        self._begin = file.tell()
        values_begin = self._begin + self._write_header()
        self._end = values_begin + end
        for name, tensor in tensors.items():
            self._place[name] = values_begin
            values_begin += tensor.nbytes

    def write(self, name: str, piece: Tensor) -> None:
        """Writes the next values of the tensor called ``name``, from any device and in any strides."""
        values = piece.detach().to("cpu").contiguous()
        self._left[name] -= values.nbytes
        assert self._left[name] >= 0, f"{name} has more values than were announced"
        self._checksums[name].add(values)
        self._file.seek(self._place[name])
        self._file.write((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))
        self._place[name] += values.nbytes

    def finish(self) -> None:
        """Writes the checksums, which are known now, and leaves ``file`` at its end."""
        incomplete = [name for name, left in self._left.items() if left]
        assert not incomplete, f"{incomplete[0]} has fewer values than were announced"
        self._file.seek(self._begin)
        self._write_header()
        self._file.seek(self._end)

    def _write_header(self) -> int:
        # As long at the end as at the beginning: a checksum always takes 16 digits.
        checksums = {name: f"{checksum.value:016x}" for name, checksum in self._checksums.items()}
        self._header["__metadata__"] = {"format": "pt", CHECKSUMS: json.dumps(checksums)}
        text = json.dumps(self._header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return self._file.write(len(text).to_bytes(8, "little") + text)


class _Checksum:
    """The sum of bytes, taken as 8-byte little-endian numbers, modulo 2^64, of values that come in pieces."""

    def __init__(self) -> None:
        self._sum = 0
        self._rest = torch.empty(0, dtype=torch.uint8)

    def add(self, values: Tensor) -> None:
        content = values.reshape(-1).view(torch.uint8)
        if self._rest.numel():
            content = torch.cat((self._rest, content))
        elif content.storage_offset() % 8:  # a piece of a larger tensor
            content = content.clone()
        whole = content.numel() // 8 * 8
        self._sum += int(content[:whole].view(torch.int64).sum())
        self._rest = content[whole:].clone()

    @property
    def value(self) -> int:
        return (self._sum + int.from_bytes(bytes(self._rest.tolist()), "little")) % 2**64
