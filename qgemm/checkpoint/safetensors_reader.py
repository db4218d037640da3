"""Reads a safetensors file: its header, checked against the format, then values, all from one open file.

The format: 8 bytes with the header's length, the header as JSON (dtype, shape and place of each tensor), the values.

The library isn't used for reading because it maps files into memory. If a mapped file becomes shorter, the process ends
with a bus error; a pipe in the file's place would block forever; and opening a path twice may give two different files,
so that the checked header says nothing about the second.
"""

from __future__ import annotations

import json
import math
from typing import Any

from qgemm.checkpoint.layout import unique_names
from qgemm.checkpoint.tensor_file import Place, TensorFile

LARGEST_HEADER = 100_000_000
"""In bytes: the library refuses longer headers."""

# The number of bits of a value, for every dtype of the format, including those that nothing here computes with.
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16},
    **{"I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64},
}
_METADATA = "__metadata__"


class SafetensorsReader(TensorFile):
    """An open safetensors file; its ``metadata`` is the header's ``__metadata__``."""

    kind = "safetensors"

    def _take_header(self) -> bytes:
        header = self._read_header()
        self.places, self.metadata = _parse(header, self.stamp.size)
        return header

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
