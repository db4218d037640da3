"""``Method``: one step of a recipe, and what it gets: a ``Block`` of a model with its ``LayerWork``.

A recipe is applied block by block. Every method gets a block in float, with the inputs that reach it after all
preceding blocks are quantized, and with the changes of the methods before it. It may change the block's float weights
and biases in place, replace a layer's scheme, or decide a layer's quantized weight.
"""

from __future__ import annotations

import difflib
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from qgemm.arguments import shortened
from qgemm.calibration.hooks import hooked
from qgemm.calibration.padding import Batch, Masks
from qgemm.calibration.statistics import InputStatistics, StatisticsSum
from qgemm.scheme import QuantScheme

Kind = TypeVar("Kind", bound="Method")

Part = Literal["inputs", "weights", "biases"]

PARTS: tuple[Part, ...] = get_args(Part)
"""The parts of a layer that methods determine; each depends on those before it.

- ``"inputs"``: what is rounded: the layer's input and float weight, which are scaled, rotated or kept in part.
- ``"weights"``: the quantized weight.
- ``"biases"``: the bias, according to what was rounded and how.
"""

_UNDECIDED = "its weight was decided before a later method changed what is rounded: put that one first"
# No setting may be larger.
_MAX_NUMBER = 1 << 53


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight ``[N, K]`` that a method has quantized; it stands for ``(values - zero_point) * scale``.

    With a float zero point it stands for ``values * scale + zero_point``.

    - ``values``: ``[N, K]``, in the format of the scheme's weights.
    - ``scale``: float32 ``[N]``, or ``[N, ceil(K / group_size)]`` for a scheme with groups along K.
    - ``zero_point``: with the shape of ``scale``, for a scheme that has some: int8, or floats as they are stored.
    """

    values: Tensor
    scale: Tensor
    zero_point: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Those of the three that aren't None, in this order."""
        return (self.values, self.scale) if self.zero_point is None else (self.values, self.scale, self.zero_point)


@dataclass(eq=False)
class LayerWork:
    """One linear layer that is being quantized.

    - ``name``: its dotted name in the model.
    - ``module``: the float layer, an ``nn.Linear`` or transformers' ``Conv1D``. ``qgemm.nn.linear_layer.linear_weight``
      gives its weight as ``[N, K]``, a view of the parameter, which methods may change in place.
    - ``scheme``: how it will be quantized; a method may replace it.
    - ``weight``: the weight that a method has rounded; None rounds to nearest.
    - ``outlier_columns``: int64 ``[c]``, ascending: columns of the input that stay in 16 bits.
    - ``notes``: its notes in the report.
    - ``loss``: ``|x (W - V)^T|^2 / |x W^T|^2`` over the calibration rows, where ``V`` is the quantized weight.
    """

    name: str
    module: nn.Module
    scheme: QuantScheme
    weight: QuantizedWeight | None = None
    outlier_columns: Tensor | None = None
    notes: list[str] = field(default_factory=list)
    loss: float | None = None

    @property
    def decided(self) -> list[QuantizedWeight]:
        """The weights that a method has rounded."""
        return [] if self.weight is None else [self.weight]

    @property
    def decisions(self) -> dict[str, Any]:
        """The arguments for ``swap`` that methods have decided, apart from the scheme."""
        weight = {} if self.weight is None else {"weight": self.weight.parts}
        return weight if self.outlier_columns is None else {**weight, "outlier_columns": self.outlier_columns}

    def undecide(self, why: str = _UNDECIDED) -> None:
        """Discards the rounded weight, if there is one, because the layer's input or float weight has changed."""
        if self.weight is not None:
            self.weight = self.loss = None
            self.notes.append(why)


@dataclass(eq=False)
class ExpertsWork:
    """One module of fused experts that is being quantized.

    - ``name``: its dotted name in the model; ``module``: the float one, as ``qgemm.nn.float_experts`` describes it.
    - ``scheme``: how they will be quantized.
    - ``weights``: the weights that a method has rounded, with a leading dimension of E experts: ``"gate_up_proj"``,
      gates before ups, and ``"down_proj"``; None rounds to nearest.
    - ``notes``: its notes in the report.
    """

    name: str
    module: nn.Module
    scheme: QuantScheme
    weights: dict[str, QuantizedWeight] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def decided(self) -> list[QuantizedWeight]:
        """The weights that a method has rounded."""
        return list((self.weights or {}).values())

    @property
    def decisions(self) -> dict[str, Any]:
        """As ``LayerWork.decisions``."""
        return {"weights": {name: each.parts for name, each in (self.weights or {}).items()}}

    def undecide(self, why: str = _UNDECIDED) -> None:
        """As ``LayerWork.undecide``."""
        if self.weights is not None:
            self.weights = None
            self.notes.append(why)


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of a module's call. ``masks``: those of its batch; if None, they are taken from the arguments."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    masks: Masks | None = None


@dataclass(eq=False)
class Block:
    """A part of a model whose layers are quantized together.

    - ``name``: ``"model.layers.3"``; ``""`` for the whole model, of which perhaps only some layers remain to quantize.
    - ``module``: the block itself. ``model``: the whole model.
    - ``layers``: the block's layers to be quantized, by full name.
    - ``calls``: the block's call for each batch of calibration data; empty without such data.
    - ``experts``: the block's modules of fused experts to be quantized, by full name.
    - ``unused``: those experts that got no token in calibration, once that is known.
    - ``batch``: which input rows of the current batch are tokens.
    """

    name: str
    module: nn.Module
    model: nn.Module
    layers: dict[str, LayerWork]
    calls: Sequence[Call] = ()
    experts: dict[str, ExpertsWork] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list, init=False)
    batch: Batch = field(default_factory=Batch, init=False)

    @property
    def prefix(self) -> str:
        """The prefix of the full names of modules in the block."""
        return f"{self.name}." if self.name else ""

    def collect(
        self, names: Iterable[str] | None = None, *, second_moment: bool = False, rows: int = 0
    ) -> dict[str, InputStatistics]:
        """Collects the statistics of the inputs of the layers ``names`` (None: all of ``layers``), by name.

        Runs the block in its current state on all calibration data. Padding doesn't count. Layers without tokens are
        left out of the result. Raises ``ValueError`` if a layer's input holds NaN or Inf.
        """
        wanted = list(self.layers if names is None else names)
        sums = {name: StatisticsSum(second_moment=second_moment, rows=rows) for name in wanted}
        shared = _SharedProducts()
        for _ in self.watch(wanted, lambda name, x, tokens: shared.add(sums[name], x, tokens)):
            shared.forget()
        return {name: result for name, total in sums.items() if (result := total.result) is not None}

    def watch(self, names: Iterable[str], see: Callable[[str, Tensor, Tensor], None]) -> Iterator[Any]:
        """As ``run``; calls ``see(name, x, tokens)`` for each input ``x`` of these layers, whose rows ``tokens`` count.

        A ``ValueError`` raised by ``see`` gets the layer's name.
        """

        def observe(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            try:
                see(name, x, self.batch.tokens(x, name))
            except ValueError as error:
                raise ValueError(f"the input of {name!r}: {error}") from error

        with hooked({name: self.layers[name].module for name in names}, observe):
            yield from self.run()

    def outputs(self) -> list[Tensor]:
        """The first tensor of the block's output in its current state, for each batch."""
        return [first_tensor(output) for output in self.run()]

    def run(self) -> Iterator[Any]:
        """Yields the block's output in its current state for each batch, in order; without gradients."""
        for call in self.calls:
            self.batch.masks = call.masks or Masks.of(self.module, call.args, call.kwargs)
            with torch.no_grad():
                output = self.module(*call.args, **call.kwargs)
            yield output


class Method(ABC):
    """One step of a recipe. Subclasses are frozen dataclasses of plain settings: numbers, strings, bools, None.

    - ``name``: its key in a recipe's dictionary and in YAML.
    - ``needs_data``: whether ``apply`` runs the block, which requires calibration data.
    - ``settles``: the parts of layers that ``apply`` determines. A recipe is refused if a later method changes what
      they depend on, or determines them again. A method with none may come anywhere.
    """

    name: ClassVar[str]
    needs_data: ClassVar[bool] = True
    settles: ClassVar[tuple[Part, ...]] = ()

    def prepare(self, model: nn.Module, layers: dict[str, LayerWork]) -> None:
        """Called once, before any block, for work on the whole model. ``layers``: all that will be quantized."""
        return None

    @abstractmethod
    def apply(self, block: Block) -> None:
        """Works on one block; if it can't handle a layer, it adds the reason to that layer's ``notes``."""

    def to_dict(self) -> dict[str, Any]:
        """Its settings as JSON-ready values."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls: type[Kind], settings: Mapping[str, Any]) -> Kind:
        """Makes a method with these settings, and defaults for the others.

        Raises ``ValueError`` for an unknown setting, or one of a wrong type or range.
        """
        known = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        hints = get_type_hints(cls)
        for key, value in settings.items():
            if key not in known:
                raise ValueError(f"{cls.name} has no setting {shortened(key)}; {nearest(key, known)}")
            if not _fits(value, hints[key]):
                raise ValueError(f"{key} of {cls.name} is {shortened(value)}; it must be {_described(hints[key])}")
        numbers = {key: float(value) for key, value in settings.items() if _is_number(hints[key], value)}
        return cls(**{**settings, **numbers})


def first_tensor(output: Any) -> Tensor:
    """The first tensor in a module's output: a tensor, or a tuple, list or mapping that contains one."""
    if isinstance(output, Tensor):
        return output
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    for part in parts:
        if isinstance(part, Tensor):
            return part
    raise TypeError(f"a block returned a {type(output).__name__}; its first value must be a tensor")


def nearest(name: object, known: Iterable[str]) -> str:
    """The text of an error that suggests known names instead of an unknown one."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3) if isinstance(name, str) and len(name) < 100 else []
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"there are {', '.join(map(repr, known))}" if known else "it takes none"


class _SharedProducts:
    """Reuses the products of the last input, because parallel layers such as q, k and v read the same tensor."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, int, Tensor] | None = None

    def add(self, total: StatisticsSum, x: Tensor, tokens: Tensor) -> None:
        """``tokens``: the rows of the input ``x`` that count."""
        version = 0 if x.is_inference() else x._version
        known = self._last is not None and self._last[0] is x and self._last[1] == version
        products = total.add(tokens, self._last[2] if self._last is not None and known else None)
        self._last = None if products is None else (x, version, products)

    def forget(self) -> None:
        self._last = None


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if get_origin(hint) is Literal:
        return any(type(value) is type(each) and value == each for each in get_args(hint))
    if hint is type(None):
        return value is None
    # Numbers in JSON and YAML may be infinite, or have thousands of digits.
    if type(value) in (int, float):
        return _is_number(hint, value) or (hint is type(value) is int and abs(value) <= _MAX_NUMBER)
    return type(value) is hint


def _is_number(hint: Any, value: object) -> bool:
    """Whether ``value`` fits a float setting; a whole number also does, unless the setting may be a whole number."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if float not in kinds or (type(value) is int and int in kinds):
        return False
    return type(value) in (int, float) and abs(value) <= _MAX_NUMBER  # type: ignore[arg-type]


def _described(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_described, get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}.get(hint, "null")
