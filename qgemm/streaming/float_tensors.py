"""The tensors of the float model, which are read when they are needed, some rows at a time."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from qgemm.nn.float_experts import FloatExperts
from qgemm.streaming.source import Source


@dataclass
class FloatTensor:
    """One tensor of the float model. ``rows(start, stop)`` reads or makes some rows, on the CPU.

    ``describe``: gives JSON-ready values from which ``parse_float`` makes the same tensor in another process.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[int, int], Tensor]
    describe: Callable[[], dict[str, Any]] | None = None

    @property
    def row_count(self) -> int:
        """The size of the first dimension; a tensor without dimensions counts as one row."""
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        """The size of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def to_dict(self) -> dict[str, Any]:
        """The result of ``describe``."""
        assert self.describe is not None
        return self.describe()

    def spans(self, step: int) -> Iterator[tuple[int, int]]:
        """The starts and stops for reading all rows, ``step`` at a time."""
        for start in range(0, self.row_count, step):
            yield start, min(start + step, self.row_count)


def stored_float(source: Source, name: str, dtype: torch.dtype) -> FloatTensor:
    """The tensor ``name`` from a file, in any dtype, cast to ``dtype``."""
    return FloatTensor(
        source.tensors[name].shape,
        dtype,
        lambda start, stop: source.read_rows(name, start, stop).to(dtype),
        lambda: {"stored": name, "dtype": str(dtype)},
    )


def merged_experts(source: Source, names: list[list[str]], dim: int, dtype: torch.dtype) -> FloatTensor:
    """The stacked tensors of experts. ``names``: in the files, of those that form one expert's along ``dim``."""

    def read(name: str) -> Tensor:
        return source.read_rows(name, 0, source.tensors[name].shape[0]).to(dtype)

    def rows(start: int, stop: int) -> Tensor:
        experts = [torch.cat([read(name) for name in own], dim) for own in names[start:stop]]
        return experts[0][None] if len(experts) == 1 else torch.stack(experts)

    shape = list(source.tensors[names[0][0]].shape)
    shape[dim] = sum(source.tensors[name].shape[dim] for name in names[0])
    described = {"experts": names, "dim": dim, "dtype": str(dtype)}
    return FloatTensor((len(names), *shape), dtype, rows, lambda: described)


def made_float(like: Tensor, make: Callable[[], Tensor], describe: Callable[[], dict[str, Any]]) -> FloatTensor:
    """The tensor that ``make`` returns, with the shape and dtype of ``like``; rows are views of it."""

    def rows(start: int, stop: int) -> Tensor:
        return make()[start:stop] if like.ndim else make()

    return FloatTensor(tuple(like.shape), like.dtype, rows, describe)


def built_float(value: Tensor) -> FloatTensor:
    """A tensor on the CPU that is computed when the model is built, such as rotary frequencies; it is in no file."""

    def describe() -> dict[str, Any]:
        values = bytes(value.contiguous().flatten().view(torch.uint8).tolist())
        return {"values": base64.b64encode(values).decode(), "dtype": str(value.dtype), "shape": list(value.shape)}

    return made_float(value, lambda: value, describe)


def ordered_experts(tensor: FloatTensor, name: str, layout: FloatExperts) -> FloatTensor:
    """A float weight or bias of experts, which ``QuantExperts`` calls ``name``, in the layout of ``QuantExperts``."""

    def rows(start: int, stop: int) -> Tensor:
        values = tensor.rows(start, stop)
        if values.ndim == 2:
            return layout.bias_of(name, values)
        experts = [layout.rows_of(name, values, expert) for expert in range(stop - start)]
        return experts[0][None] if len(experts) == 1 else torch.stack(experts)

    shape = tensor.shape
    if layout.is_transposed and len(shape) == 3:
        shape = (shape[0], shape[2], shape[1])
    return FloatTensor(
        shape, tensor.dtype, rows, lambda: {"of": tensor.to_dict(), "name": name, "layout": asdict(layout)}
    )


def parse_float(values: dict[str, Any], source: Source, made: Callable[[dict[str, Any]], FloatTensor]) -> FloatTensor:
    """The tensor with the description ``values``, possibly after JSON; ``made``: for those that transformers makes."""
    if "made" in values:
        return made(values)
    if "of" in values:
        inner, layout = parse_float(values["of"], source, made), FloatExperts.from_dict(values["layout"])
        return ordered_experts(inner, values["name"], layout)
    dtype = getattr(torch, values["dtype"].removeprefix("torch."))
    if "values" in values:
        stored = torch.tensor(list(base64.b64decode(values["values"])), dtype=torch.uint8, device="cpu")
        return built_float(stored.view(dtype).reshape(values["shape"]))
    if "experts" in values:
        return merged_experts(source, values["experts"], values["dim"], dtype)
    return stored_float(source, values["stored"], dtype)


class ConversionTurn:
    """Keeps the tensors of only one conversion of a checkpoint in memory at a time."""

    def __init__(self) -> None:
        """Starts without a conversion."""
        self._convert: Callable[[], dict[str, Tensor]] | None = None
        self._values: dict[str, Tensor] = {}

    def value(self, convert: Callable[[], dict[str, Tensor]], name: str) -> Tensor:
        """One of the tensors that ``convert`` makes from files; they are made now unless they were the last ones."""
        if self._convert is not convert:
            self._values = {}  # freed before the next ones take memory
            self._values, self._convert = convert(), convert
        return self._values[name]
