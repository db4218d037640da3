"""The tensors of the float model, each of which is read when its turn comes, some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qgemm.nn.float_experts import FloatExperts
from qgemm.streaming.source import Source


@dataclass
class FloatTensor:
    """One tensor as the float model holds it. ``rows(start, stop)`` reads or makes some rows, on the CPU."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[int, int], Tensor]

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


def stored_float(source: Source, name: str, dtype: torch.dtype) -> FloatTensor:
    """The tensor ``name`` in a file, in whatever dtype, cast to ``dtype``."""
    return FloatTensor(
        source.tensors[name].shape, dtype, lambda start, stop: source.read_rows(name, start, stop).to(dtype)
    )


def made_float(like: Tensor, make: Callable[[], Tensor]) -> FloatTensor:
    """The tensor that ``make`` returns, with shape and dtype of ``like``; rows are views of it."""
    return FloatTensor(tuple(like.shape), like.dtype, lambda start, stop: make()[start:stop] if like.ndim else make())


def built_float(value: Tensor) -> FloatTensor:
    """A tensor on the CPU that building the model computes, such as rotary frequencies, and that no file holds."""
    return made_float(value, lambda: value)


def ordered_experts(tensor: FloatTensor, name: str, layout: FloatExperts) -> FloatTensor:
    """A float weight or bias of experts in the layout of ``QuantExperts``, which calls it ``name``."""

    def rows(start: int, stop: int) -> Tensor:
        values = tensor.rows(start, stop)
        if values.ndim == 2:
            return layout.bias_of(name, values)
        experts = [layout.rows_of(name, values, expert) for expert in range(stop - start)]
        return experts[0][None] if len(experts) == 1 else torch.stack(experts)

    shape = tensor.shape
    if layout.is_transposed and len(shape) == 3:
        shape = (shape[0], shape[2], shape[1])
    return FloatTensor(shape, tensor.dtype, rows)


class ConversionTurn:
    """The one conversion whose tensors are in memory, of all those of a checkpoint."""

    def __init__(self) -> None:
        """None is, yet."""
        self._convert: Callable[[], dict[str, Tensor]] | None = None
        self._values: dict[str, Tensor] = {}

    def value(self, convert: Callable[[], dict[str, Tensor]], name: str) -> Tensor:
        """One of the tensors that ``convert`` makes of some in the files, made now unless they were the last."""
        if self._convert is not convert:
            self._values = {}  # before the next ones take memory
            self._values, self._convert = convert(), convert
        return self._values[name]
