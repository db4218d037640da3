"""What AMD Quark's ``quantization_config`` says about each layer, and which of qgemm's schemes that is.

A layer has one config: of the first pattern in ``layer_quant_config`` that its name matches, of its class in
``layer_type_quant_config``, or the global one. It says how ``weight``, ``input_tensors``, ``output_tensors`` and
``bias`` are quantized: each in one step or, with scales that are quantized themselves or values that are quantized
twice, in two.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from qgemm.checkpoint.packed_layers import integers_scheme
from qgemm.numerics.blocks import BLOCK

UNSIGNED = ("uint4", "uint8")
_INTEGERS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
_TENSOR, _CHANNEL, _GROUP, _BLOCKS = "per_tensor", "per_channel", "per_group", "per_block"
_A_ROW_EACH = "activations get a scale for each token, where the checkpoint asks for one for all of them"


class Unsupported(Exception):
    """What a layer's config asks for that qgemm doesn't compute; the text follows the layer's name."""


@dataclass(frozen=True)
class Step:
    """How values are quantized: to ``dtype``, with a scale for each ``grain``. ``of_scales``: of the step before it."""

    dtype: str
    grain: str
    axis: int | None
    group_size: int | None
    block: tuple[int, ...]
    symmetric: bool
    dynamic: bool
    scale_format: str | None
    of_scales: bool

    @property
    def is_by_row(self) -> bool:
        """Whether all of a weight's row has one scale."""
        return self.grain == _TENSOR or (self.grain == _CHANNEL and self.axis == 0)

    @property
    def is_by_group(self) -> bool:
        """Whether a weight's neighboring columns share a scale."""
        return self.grain == _GROUP and self.axis in (1, -1) and (self.group_size or 0) > 0

    @property
    def is_asymmetric(self) -> bool:
        """Whether values have zero points that may be other than 0."""
        return self.dtype in UNSIGNED or not self.symmetric

    def __str__(self) -> str:
        """For errors."""
        size = {_GROUP: self.group_size, _BLOCKS: list(self.block), _CHANNEL: f"axis {self.axis}"}.get(self.grain)
        return f"{self.dtype} {self.grain}" + (f" ({size})" if size is not None else "")


@dataclass(frozen=True)
class Layer:
    """How a layer is stored and computed.

    ``stored_as``: ``"integers"``, ``"fp8"``, ``"mxfp4"``, ``"nvfp4"``, or ``"twice"``: int4 with two scales.
    ``weight``: the last step of its weight. ``scheme``: the name of qgemm's. ``note``: what qgemm leaves out.
    ``unsigned_inputs``: whether a zero point of its input is in uint8.
    """

    stored_as: str
    weight: Step
    scheme: str
    note: str
    unsigned_inputs: bool


def config_of(layer: str, quantization: dict[str, Any]) -> dict[str, Any]:
    """The config of a linear layer. Raises ``Unsupported`` if it has none."""
    by_name, by_class = (quantization.get(f"layer_{key}quant_config") or {} for key in ("", "type_"))
    if not isinstance(by_name, dict) or not isinstance(by_class, dict):
        raise Unsupported("can't be found in layer_quant_config and layer_type_quant_config, which must be objects")
    found = next((own for pattern, own in by_name.items() if fnmatchcase(layer, pattern)), None)
    if found is None:
        found = by_class.get("Linear", quantization.get("global_quant_config"))
    if not isinstance(found, dict):
        raise Unsupported("has no config: neither a layer_quant_config nor a global_quant_config")
    return found


def describe(config: dict[str, Any]) -> Layer:
    """How a layer with this config is read. Raises ``Unsupported``."""
    weights = _steps(config, "weight")
    if not weights:
        raise Unsupported("has scales, but the config leaves its weight in float")
    if any(step.dynamic for step in weights):
        raise Unsupported("has a dynamic weight")
    stored_as, base = _stored(weights)
    inputs = _steps(config, "input_tensors")
    scheme, note = _with_inputs(base, weights[-1], inputs)
    return Layer(stored_as, weights[-1], scheme, note, any(step.dtype in UNSIGNED for step in inputs))


def _steps(config: dict[str, Any], part: str) -> tuple[Step, ...]:
    values = config.get(part)
    values = [] if values is None else values if isinstance(values, list) else [values]
    if not all(isinstance(each, dict) for each in values):
        raise Unsupported(f"has a {part} that is no object")
    return tuple(_step(each, part) for each in values)


def _step(values: dict[str, Any], part: str) -> Step:
    dtype, grain, axis, size = (values.get(key) for key in ("dtype", "qscheme", "ch_axis", "group_size"))
    block = values.get("block_size") or []
    # The library writes None for floats, which have no zero points.
    symmetric = values.get("symmetric") is not False
    if not isinstance(dtype, str) or not all(each is None or type(each) is int for each in (axis, size)):
        raise Unsupported(f"has a {part} of dtype {dtype!r}, ch_axis {axis!r}, group_size {size!r}")
    if not isinstance(block, list) or not all(type(each) is int for each in block):
        raise Unsupported(f"has a {part} with block_size {block!r}")
    scale_format, of_scales = values.get("scale_format"), values.get("is_scale_quant") is True
    dynamic = values.get("is_dynamic") is True
    return Step(dtype, str(grain), axis, size, tuple(block), symmetric, dynamic, scale_format, of_scales)


def _stored(weights: tuple[Step, ...]) -> tuple[str, str]:
    """How a weight is stored, and the name of its scheme with activations in float."""
    first, last = weights[0], weights[-1]
    match weights:
        case (Step("fp4", group_size=32, scale_format="e8m0"),) if first.is_by_group:
            return "mxfp4", "mxfp4"
        case (Step("fp8_e4m3"),) if first.is_by_row and not first.is_asymmetric:
            return "fp8", "fp8-weight"
        case (Step("fp8_e4m3", "per_block"),) if first.block == (BLOCK, BLOCK) and not first.is_asymmetric:
            return "fp8", "fp8-block"
        case (Step(dtype),) if dtype in _INTEGERS and (first.is_by_row or first.is_by_group):
            size = first.group_size if first.is_by_group else None
            try:
                return "integers", integers_scheme(_INTEGERS[dtype], size, not first.is_asymmetric).name
            except ValueError:
                computed = "qgemm computes groups of any multiple of 16"
                raise Unsupported(f"has groups of {size} columns; {computed}") from None
        case (Step("fp4", group_size=16, scale_format="float32"), Step("fp8_e4m3", "per_tensor", of_scales=True)):
            if first.is_by_group:
                return "nvfp4", "nvfp4"
        case (Step("fp8_e4m3", "per_tensor", of_scales=False), Step("int4", "per_channel", of_scales=False)):
            if last.is_by_row and not last.is_asymmetric:
                return "twice", "int4-channel"
    raise Unsupported(f"has a weight in {' and then '.join(map(str, weights))}")


def _with_inputs(base: str, weight: Step, inputs: tuple[Step, ...]) -> tuple[str, str]:
    """The scheme for weights of the scheme ``base`` with these inputs, and a note about what is left out."""
    if base == "fp8-block":
        match inputs:
            case (Step("fp8_e4m3", "per_group", group_size=128, dynamic=True),):
                return base, ""
        raise Unsupported("has fp8 weights in blocks, with activations other than fp8 in groups of 128")
    if not inputs:
        return base, ""
    note = f"activations stay in float, where the checkpoint asks for {inputs[0].dtype.removesuffix('_e4m3')}"
    if len(inputs) > 1:
        return base, note
    (step,) = inputs
    # A token is a row of a matrix [..., K], and those of a batch may share a scale. One each is at least as fine.
    is_by_token = step.dynamic and (step.grain == _TENSOR or (step.grain == _CHANNEL and step.axis in (0, 1, -2)))
    is_static = not step.dynamic and step.grain == _TENSOR
    note_of_rows = _A_ROW_EACH if step.grain == _TENSOR else ""
    match base, step.dtype:
        case "int8-weight", "int8" if is_by_token and not step.is_asymmetric:
            return "int8", note_of_rows
        case "int8-weight", "int8" | "uint8" if is_static:
            return "int8-static-asymmetric" if step.is_asymmetric else "int8-static", ""
        case "fp8-weight", "fp8_e4m3" if is_by_token:
            return "fp8", note_of_rows
        case "fp8-weight", "fp8_e4m3" if is_static:
            return "fp8-static", ""
        case _, "int8" if is_by_token and weight.dtype == "int4" and not (weight.is_asymmetric or step.is_asymmetric):
            return f"{base}-int8", note_of_rows
    return base, note


def dtypes_in(quantization: dict[str, Any]) -> str:
    """The dtypes of weights that the config asks for, to be shown: ``"fp4, uint4"``; empty if it names none."""
    by_name = quantization.get("layer_quant_config")
    configs = [quantization.get("global_quant_config"), *(by_name.values() if isinstance(by_name, dict) else ())]
    found: dict[str, None] = {}
    for config in configs:
        with suppress(Unsupported):
            steps = _steps(config, "weight") if isinstance(config, dict) else ()
            found.update(dict.fromkeys(step.dtype for step in steps if not step.of_scales))
    return ", ".join(found)
