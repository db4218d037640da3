"""The tensors of the float model, each of which is read when its turn comes, some rows at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qgemm.nn.float_experts import FloatExperts
from qgemm.streaming.source import Source


class FloatTensor(ABC):
    """One tensor as the float model holds it: ``shape``, ``dtype``, and how its values are come by."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Nothing is read yet."""
        self.shape = shape
        self.dtype = dtype

    @property
    def row_count(self) -> int:
        """The size of the first dimension; a number alone is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        """The size of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def spans(self, step: int) -> Iterator[tuple[int, int]]:
        """Where to start and stop to read all rows, ``step`` at a time."""
        for start in range(0, self.row_count, step):
            yield start, min(start + step, self.row_count)

    @abstractmethod
    def rows(self, start: int, stop: int) -> Tensor:
        """Some rows, on the CPU."""


class StoredFloat(FloatTensor):
    """A tensor that is in a file, in whatever dtype."""

    def __init__(self, source: Source, name: str, dtype: torch.dtype) -> None:
        """``name``: in the file. ``dtype``: what to cast it to."""
        super().__init__(source.tensors[name].shape, dtype)
        self._source = source
        self._name = name

    def rows(self, start: int, stop: int) -> Tensor:
        """Reads them."""
        return self._source.read_rows(self._name, start, stop).to(self.dtype)


class BuiltFloat(FloatTensor):
    """A tensor that building the model computes, such as rotary frequencies, and that no file holds."""

    def __init__(self, value: Tensor) -> None:
        """``value``: on the CPU."""
        super().__init__(tuple(value.shape), value.dtype)
        self._value = value

    def rows(self, start: int, stop: int) -> Tensor:
        """A view of them."""
        return self._value[start:stop] if self.shape else self._value


class ConvertedFloat(FloatTensor):
    """A tensor that transformers makes of several in the files, or of a part of one."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, name: str, conversion: Conversion) -> None:
        """``name``: what ``conversion`` calls it."""
        super().__init__(shape, dtype)
        self._name = name
        self._conversion = conversion

    def rows(self, start: int, stop: int) -> Tensor:
        """A view of them: the whole tensor is in memory until another conversion takes its turn."""
        value = self._conversion.values()[self._name]
        return value[start:stop] if self.shape else value


class StackedFloat(FloatTensor):
    """Experts that files hold one by one, each of which is made when its turn comes."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[int, int], Tensor]) -> None:
        """``make``: makes some of them, given where to start and stop."""
        super().__init__(shape, dtype)
        self._make = make

    def rows(self, start: int, stop: int) -> Tensor:
        """Makes them."""
        return self._make(start, stop)


class OrderedExperts(FloatTensor):
    """A float weight or bias of experts in the layout of ``QuantExperts``, whatever the model's own is."""

    def __init__(self, tensor: FloatTensor, name: str, layout: FloatExperts) -> None:
        """``name``: what ``QuantExperts`` calls it."""
        shape = tensor.shape
        if layout.is_transposed and len(shape) == 3:
            shape = (shape[0], shape[2], shape[1])
        super().__init__(shape, tensor.dtype)
        self._tensor, self._name, self._layout = tensor, name, layout

    def rows(self, start: int, stop: int) -> Tensor:
        """Those of some experts."""
        values = self._tensor.rows(start, stop)
        if values.ndim == 2:
            return self._layout.bias_of(self._name, values)
        experts = [self._layout.rows_of(self._name, values, expert) for expert in range(stop - start)]
        return experts[0][None] if len(experts) == 1 else torch.stack(experts)


class Conversion:
    """What becomes of some tensors of the files: other ones, by name, all made at once."""

    def __init__(self, convert: Callable[[], dict[str, Tensor]], turn: ConversionTurn) -> None:
        """``turn``: shared by all conversions of a checkpoint."""
        self._convert = convert
        self._turn = turn

    def values(self) -> dict[str, Tensor]:
        """Its tensors, made now unless they were the last to be made."""
        if self._turn.holder is not self:
            self._turn.values = {}  # before the next ones take memory
            self._turn.values, self._turn.holder = self._convert(), self
        return self._turn.values


class ConversionTurn:
    """The one conversion whose tensors are in memory."""

    def __init__(self) -> None:
        """None is, yet."""
        self.holder: Conversion | None = None
        self.values: dict[str, Tensor] = {}
