"""The ``config_groups`` of compressed-tensors as values: the layers that a group means, and qgemm's scheme for it.

A group quantizes the weights of its targets, and perhaps their inputs: integers or floats of a number of bits, with a
scale per tensor, channel, token, group along K, or block. ``parse_group`` finds qgemm's scheme for it, or the reason
why there is none. If qgemm supports the weights but leaves activations in float that the file rounds, the group has a
``note``: the result is closer to the float model than the file asks for, and the user is told.

Targets are names, classes, or regular expressions from untrusted files. The latter are not evaluated: the files tell
which layers are quantized, and mostly how. One form is recognized, which qgemm writes for the layers of experts:
``target_of_experts``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from qgemm.checkpoint.packed_layers import integers_scheme
from qgemm.numerics.blocks import BLOCK
from qgemm.scheme import QuantScheme, resolve_scheme

QUANT_METHOD = "compressed-tensors"
PACKED = "pack-quantized"
INT = "int-quantized"
FLOAT = "float-quantized"
NAIVE = "naive-quantized"
NVFP4 = "nvfp4-pack-quantized"
MXFP4 = "mxfp4-pack-quantized"
MXFP8 = "mxfp8-quantized"

# Schemes whose inputs have a zero point: weights, and the inputs' format, strategy and whether they are dynamic.
_ASYMMETRIC = ("int8-weight", "int8", "tensor", False)
SUPPORTED = (
    "qgemm reads weights of int4 and int8 (pack-quantized, int-quantized), fp8 (per tensor, channel, or blocks of "
    "128 x 128), mxfp4, mxfp8 and nvfp4, with activations in float, in int8 or in fp8"
)


def target_of_experts(name: str) -> str:
    """The regular expression for the layers of the module of experts ``name``, such as ``name.0.up_proj``.

    The library and vLLM match the text after ``re:`` from the beginning.
    """
    return rf"re:{re.escape(name)}\.\d+\."


class Unsupported(Exception):
    """Something that qgemm doesn't compute. ``leaves``: the tensors by which such a layer is recognized."""

    def __init__(self, text: str, *leaves: str) -> None:
        """``text``: what it is, to follow the name of its group."""
        super().__init__(text)
        self.leaves = leaves


@dataclass(frozen=True)
class Arguments:
    """How one tensor is quantized, according to a group.

    ``kind``: ``"int"`` or ``"float"``. ``strategy``: what shares a scale. ``dynamic``: whether scales are computed at
    run time; ``"local"`` if only those within a given scale are.
    """

    kind: str
    bits: int
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    dynamic: bool | str

    @property
    def format(self) -> str:
        """``"int8"``, ``"fp4"``, ..."""
        return f"{'int' if self.kind == 'int' else 'fp'}{self.bits}"


@dataclass(frozen=True)
class Group:
    """A group: its weights and inputs, how they are stored, its targets, and the scheme that qgemm uses for it.

    ``scheme``: the scheme's name, for a layer whose groups are neighboring columns. ``note``: what qgemm leaves out.
    ``orders_columns``: whether layers should have an order of columns.
    """

    name: str
    weights: Arguments
    inputs: Arguments | None
    stored_as: str
    targets: tuple[str, ...]
    scheme: str
    note: str
    orders_columns: bool

    @property
    def is_static(self) -> bool:
        """Whether layers have an ``input_scale``."""
        return self.inputs is not None and self.inputs.dynamic is False

    @property
    def shifts_inputs(self) -> bool:
        """Whether layers have an ``input_zero_point`` that isn't 0."""
        return self.inputs is not None and not self.inputs.symmetric

    def scheme_of(self, is_ordered: bool) -> QuantScheme:
        """The scheme of a layer, whose columns have an order if ``is_ordered``. Raises ``ValueError`` if none fits."""
        weight, mark, activation = self.scheme, "-ordered" if is_ordered else "", ""
        if self.scheme.endswith("-int8"):
            weight, activation = self.scheme.removesuffix("-int8"), "-int8"
        return resolve_scheme(f"{weight}{mark}{activation}")


def parse_group(name: str, group: dict[str, Any], whole_format: object) -> Group:
    """Parses the group ``name`` in a config whose own format is ``whole_format``. Raises ``Unsupported``."""
    weights = _arguments(group.get("weights"), "weights")
    if weights is None:
        raise Unsupported("leaves the weights in float")
    if group.get("output_activations") is not None:
        raise Unsupported("quantizes output_activations", "output_scale")
    inputs = _arguments(group.get("input_activations"), "input_activations")
    stored_as = group.get("format") or whole_format
    base = _weights_name(weights, stored_as)
    if inputs is None and base == "fp8-block":
        raise Unsupported("leaves the input_activations in float, with fp8 weights in blocks", "weight_scale")
    scheme, note = (base, "") if inputs is None else _with_inputs(base, weights, inputs)
    try:
        resolve_scheme(scheme)
    except ValueError as error:
        raise Unsupported(f"has {weights.format} weights that qgemm has no scheme for ({error})") from None
    targets = group.get("targets")
    named = tuple(each for each in targets if isinstance(each, str)) if isinstance(targets, list) else ()
    # "dynamic" is a synonym of "group"; true is from the library's first versions.
    orders_columns = str(group["weights"].get("actorder")).lower() in ("group", "dynamic", "true")
    return Group(name, weights, inputs, str(stored_as), named, scheme, note, orders_columns)


def _arguments(values: Any, part: str) -> Arguments | None:
    if values is None:
        return None
    if not isinstance(values, dict):
        raise Unsupported(f"has {part} that are no object")
    kind, bits, size = values.get("type", "int"), values.get("num_bits", 8), values.get("group_size")
    if kind not in ("int", "float") or type(bits) is not int or not (size is None or type(size) is int):
        raise Unsupported(f"has {part} of {bits} bits, {kind!r}")
    strategy = values.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    symmetric, dynamic = values.get("symmetric", True), values.get("dynamic", False)
    if not isinstance(strategy, str) or not isinstance(symmetric, bool) or dynamic not in (True, False, "local"):
        raise Unsupported(f"has {part} scaled per {strategy}, symmetric {symmetric!r}, dynamic {dynamic!r}")
    return Arguments(kind, bits, strategy, size, _block(values.get("block_structure")), symmetric, dynamic)


def _block(value: Any) -> tuple[int, int] | None:
    parts = value.split("x") if isinstance(value, str) else value
    if not isinstance(parts, list) or len(parts) != 2 or not all(str(part).isdecimal() for part in parts):
        return None
    return int(parts[0]), int(parts[1])


def _weights_name(weights: Arguments, stored_as: object) -> str:
    """The scheme of these weights with activations in float, or, for weights in blocks, with activations in fp8."""
    if weights.dynamic is not False:
        raise Unsupported("has dynamic weights")
    known: dict[str, tuple[str, ...]] = {
        "int4": (PACKED, INT, NAIVE),
        "int8": (PACKED, INT, NAIVE),
        "fp8": (FLOAT, NAIVE, MXFP8, INT),  # the last one in files of the library's first versions
        "fp4": (NVFP4, MXFP4),
    }
    if weights.format not in known:
        raise Unsupported(f"has weights of {weights.bits} bits, {weights.kind!r}", "weight_packed")
    if stored_as not in known[weights.format]:
        raise Unsupported(f"is stored as {stored_as!r}", "weight_packed", "weight_scale")
    if weights.kind == "int":
        return _integers_name(weights)
    if not weights.symmetric:
        raise Unsupported("has asymmetric weights", "weight_zero_point")
    where = weights.format, weights.strategy, weights.group_size
    small: dict[object, tuple[str, str]] = {
        ("fp4", "group", 32): (MXFP4, "mxfp4"),
        ("fp4", "tensor_group", 16): (NVFP4, "nvfp4"),
        ("fp8", "group", 32): (MXFP8, "mxfp8"),
    }
    if where in small and small[where][0] == stored_as:
        return small[where][1]
    if weights.format == "fp8" and stored_as != MXFP8:
        if weights.strategy in ("channel", "tensor"):
            return "fp8-weight"
        if weights.strategy == "block" and weights.block == (BLOCK, BLOCK):
            return "fp8-block"
    raise Unsupported(f"has {weights.format} weights scaled per {_grain(weights)}, stored as {stored_as!r}")


def _integers_name(weights: Arguments) -> str:
    if weights.strategy not in ("group", "channel", "tensor"):
        raise Unsupported(f"has weights scaled per {_grain(weights)}")
    size = weights.group_size or 0 if weights.strategy == "group" else None
    try:
        return integers_scheme(weights.bits, size, weights.symmetric).name
    except ValueError as error:
        raise Unsupported(f"has {weights.format} weights that qgemm has no scheme for ({error})") from None


def _grain(arguments: Arguments) -> str:
    sizes = {"group": arguments.group_size, "tensor_group": arguments.group_size, "block": arguments.block}
    size = sizes.get(arguments.strategy)
    return f"{arguments.strategy} of {size}" if size else arguments.strategy


def _with_inputs(base: str, weights: Arguments, inputs: Arguments) -> tuple[str, str]:
    """The scheme for weights of scheme ``base`` with these inputs, and a note about what is left out."""
    if not inputs.symmetric and (base, inputs.format, inputs.strategy, inputs.dynamic) != _ASYMMETRIC:
        raise Unsupported(
            "has asymmetric input_activations, which qgemm reads with static scales and symmetric int8 weights alone",
            "input_zero_point",
        )
    per_row = weights.strategy in ("channel", "tensor")
    how = inputs.format, inputs.strategy, inputs.dynamic
    a_row_each = ""
    if how[1:] == ("tensor", True):
        # A scale for each row is at least as fine as one for all of them.
        how = inputs.format, "token", True
        a_row_each = "activations get a scale for each token, where the checkpoint asks for one for all of them"
    match how:
        case ("int8", "token", True) if base == "int8-weight":
            return "int8", a_row_each
        case ("int8", "tensor", False) if base == "int8-weight":
            return "int8-static" if inputs.symmetric else "int8-static-asymmetric", ""
        case ("int8", "token", True) if weights.format == "int4":
            return f"{base}-int8", a_row_each
        case ("fp8", "token", True) if base == "fp8-weight":
            return "fp8", a_row_each
        case ("fp8", "tensor", False) if base == "fp8-weight":
            return "fp8-static", ""
        case ("fp8", "group", True) if base == "fp8-block" and inputs.group_size == BLOCK:
            return "fp8-block", ""
        case ("fp8", "token" | "group", True) | ("fp4", "group", True) | ("fp4", "tensor_group", "local") if (
            not per_row or weights.bits == 4
        ) and base != "fp8-block":
            return base, f"activations stay in float, where the checkpoint asks for {inputs.format}"
    grain = f"{'dynamic' if inputs.dynamic else 'static'} per {_grain(inputs)}"
    kind = weights.format if weights.symmetric else f"asymmetric {weights.format}"
    raise Unsupported(f"has {inputs.format} input_activations, {grain}, with {kind} weights per {_grain(weights)}")
