"""Reads a GGUF file of llama.cpp: its header, checked against the format, then values, all from one open file.

The format, in little-endian numbers: ``GGUF``, its version (2 or 3), the number of tensors and of settings; the
settings, each a name, a type and a value; for each tensor its name, its dimensions (the last one first), its type, and
where its bytes are after the header. The library isn't used for reading values, for the same reasons as that of
safetensors.

Tensors of a quantized type are uint8 ``[..., bytes of a row]`` here. The weights of experts, which are one tensor
``blk.0.ffn_up_exps.weight`` in the file, are listed one by one, as ``blk.0.ffn_up_exps.3.weight``; so are biases and
scales. Those of ``blk.0.ffn_gate_up_exps`` are listed as gates, the first half of each expert's rows, and ups.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable
from typing import Any

from qgemm.checkpoint.gguf_types import TYPES, BlockType
from qgemm.checkpoint.safetensors_reader import LARGEST_HEADER
from qgemm.checkpoint.tensor_file import Place, TensorFile

GGUF_SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_EXPERTS = re.compile(r"(.*_exps)\.(weight|bias|scale|input_scale)")
_DIMENSIONS = {"weight": 3, "bias": 2}
_GATES_AND_UPS = ".ffn_gate_up_exps"
# The number formats of settings by their numbers, in the words of ``struct``.
_NUMBERS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?")))
_NUMBERS.update({10: "Q", 11: "q", 12: "d"})
_STRING, _ARRAY = 8, 9
# Far more than any model has: tensors, then with experts one by one, and values in lists, which are tokens mostly.
_MOST_STORED, _MOST_TENSORS, _MOST_LISTED = 1 << 16, 1 << 18, 1 << 22
_MOST_DIMENSIONS = 4
# Lists with one value for each layer.
_MOST_KEPT = 1 << 10
_MOST_EXPERTS = 1 << 16
_PIECE = 1 << 20
_LONG_LIST = 1 << 14


class GgufFile(TensorFile):
    """An open GGUF file. ``settings``: its numbers and texts by name, and None for lists. ``lists``: the short ones, of
    numbers. ``types``: the block type of each tensor.

    ``stored_settings``: each setting as it is in the file, but for long lists, which are empty. ``count``: the number
    of tensors, with all experts of a layer as one.
    """

    kind = "GGUF"
    count: int
    settings: dict[str, Any]
    lists: dict[str, tuple[Any, ...]]
    types: dict[str, BlockType]
    stored_settings: list[bytes]

    def _take_header(self) -> bytes:
        self._listed = 0
        self._header, self._at = bytearray(), 0
        if self._take(4) != _MAGIC:
            raise ValueError("it doesn't begin with GGUF")
        version, tensors, settings = self._unpack("IQQ")
        if version not in _VERSIONS:
            raise ValueError("it is big-endian" if version >> 24 in _VERSIONS else f"its version is {version}")
        self.metadata = {}
        self.settings, self.lists, self.stored_settings = {}, {}, []
        for _ in range(settings):
            self._take_setting()
        if tensors > _MOST_STORED:
            raise ValueError(f"it has {tensors} tensors, more than {_MOST_STORED}")
        self.count = tensors
        self._set_places([self._entry() for _ in range(tensors)])
        header = bytes(self._header[: self._at])
        del self._header
        return header

    def _take_setting(self) -> None:
        begin = self._at
        name = self._text()
        after_types = self._at + 8
        value = self._value(name, *self._unpack("I"))
        if name in self.settings:
            raise ValueError(f"it has two settings {name}")
        self.settings[name] = value
        is_long = value is None and self._at - begin > _LONG_LIST
        stored, rest = (after_types, bytes(8)) if is_long else (self._at, b"")
        self.stored_settings.append(bytes(self._header[begin:stored]) + rest)

    def _set_places(self, entries: list[tuple[str, tuple[int, ...], BlockType, int]]) -> None:
        """Sets ``places`` and ``types``. Raises ``ValueError`` if tensors share bytes, or end beyond the file."""
        alignment = self.settings.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment % 8:
            raise ValueError(f"general.alignment is {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        self.places, self.types = {}, {}
        end, before = begin, "the header"
        for name, shape, kind, offset in sorted(entries, key=lambda entry: entry[3]):
            start = begin + offset
            if start < end or offset % alignment:
                raise ValueError(f"tensor {name} shares bytes with {before}, or isn't aligned")
            end, before = start + kind.bytes_of(shape), name
            if end > self.stamp.size:
                raise ValueError(f"tensor {name} ends at byte {end} of {self.stamp.size}")
            self._place(name, shape, kind, start)

    def _entry(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        """A tensor's name, shape, type and place after the header."""
        name = self._text()
        (count,) = self._unpack("I")
        if count > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {count} dimensions")
        *lengths, number, offset = self._unpack(f"{count}QIQ")
        shape = tuple(reversed(lengths))
        kind = TYPES.get(number)
        if kind is None:
            raise ValueError(f"tensor {name} is of type {number}, which isn't known")
        if math.prod(shape) >= 2**63 or (shape[-1] if shape else 1) % kind.values:
            raise ValueError(f"tensor {name} of {kind.name} has the shape {list(shape)}")
        return name, shape, kind, offset

    def _place(self, name: str, shape: tuple[int, ...], kind: BlockType, start: int) -> None:
        names, own = _listed(name, kind.stored_shape(shape))
        nbytes = kind.bytes_of(shape) // max(len(names), 1)
        for index, each in enumerate(names):
            if each in self.places:
                raise ValueError(f"it has two tensors {each}")
            begin = start + index * nbytes
            self.places[each] = Place(kind.code, own, begin, begin + nbytes)
            self.types[each] = kind
            if len(self.places) > _MOST_TENSORS:
                raise ValueError(f"it has more than {_MOST_TENSORS} tensors, the weights of experts among them")

    def _value(self, name: str, number: int) -> Any:
        """A setting's value; None for a list, which is kept if it is a short one of numbers."""
        if number == _STRING:
            return self._text()
        if number != _ARRAY:
            return self._unpack(_number(number))[0]
        inside, count = self._unpack("IQ")
        self._listed += count
        if self._listed > _MOST_LISTED:
            raise ValueError(f"its lists have {self._listed} values, more than {_MOST_LISTED}")
        if inside == _STRING:
            for _ in range(count):
                self._take(self._unpack("Q")[0])
        else:
            layout = f"{min(count, _MOST_KEPT)}{_number(inside)}"
            values = self._take(struct.calcsize(f"<{_number(inside)}") * count)
            if count <= _MOST_KEPT:
                self.lists[name] = struct.unpack(f"<{layout}", values)
        return None

    def _text(self) -> str:
        return self._take(self._unpack("Q")[0]).decode()

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self._take(struct.calcsize(f"<{layout}")))

    def _take(self, count: int) -> bytes:
        """The next bytes of the header."""
        end = self._at + count
        if end > min(LARGEST_HEADER, self.stamp.size):
            raise ValueError("its header doesn't end")
        if end > len(self._header):
            self._header += self._file.read(max(end - len(self._header), _PIECE))
            if end > len(self._header):
                raise ValueError("it became shorter while it was read")
        found = bytes(self._header[self._at : end])
        self._at = end
        return found


def header_of(settings: list[bytes], names: Iterable[str]) -> bytes:
    """A file with these ``stored_settings``, and tensors of these names without values."""
    entries = [
        struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 0, 0, 0) for name in map(str.encode, names)
    ]
    header = _MAGIC + struct.pack("<IQQ", _VERSIONS[-1], len(entries), len(settings)) + b"".join(settings + entries)
    return header + bytes(-len(header) % 4096)


def _listed(name: str, stored: tuple[int, ...]) -> tuple[list[str], tuple[int, ...]]:
    """The names under which a tensor is listed, in the order of their bytes, and the shape of each."""
    experts = _EXPERTS.fullmatch(name)
    if experts is None or len(stored) != _DIMENSIONS.get(experts[2], 1):
        return [name], stored
    (stem, leaf), (count, *own) = experts.groups(), stored
    if count > _MOST_EXPERTS:
        raise ValueError(f"tensor {name} has the shape {list(stored)}")
    stems = [stem]
    if stem.endswith(_GATES_AND_UPS) and own and own[0] % 2 == 0:
        stems, own[0] = [stem.replace("gate_up", part) for part in ("gate", "up")], own[0] // 2
    return [f"{each}.{index}.{leaf}" for index in range(count) for each in stems], tuple(own)


def _number(number: int) -> str:
    if number not in _NUMBERS:
        raise ValueError(f"a setting is of type {number}, which isn't known")
    return _NUMBERS[number]
