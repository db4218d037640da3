"""``QuantScheme``: what a quantized layer stores and computes with.

A scheme says, for the weight and for the activation, which format, how finely it is scaled, and when the scale is
found. Schemes are values: they compare, print, and go through JSON (``to_dict``, ``from_dict``) into a checkpoint. What
a scheme asks for is a property of it (``is_static``, ``rotates``, ``needs_blocks``), and one is made of another by a
method (``rotated()``, ``with_outliers(16)``); its name is made from the value. ``SCHEMES`` holds those that are
computed; ``resolve_scheme`` takes a name or a scheme.
"""

from __future__ import annotations

import difflib
import re
import sys
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from qgemm.numerics.formats import FORMATS, Format
from qgemm.numerics.groups import SCALE_DTYPES

Granularity = Literal["tensor", "channel", "token", "group", "block"]
ScaleDtype = Literal["float32", "float16", "bfloat16", "steps", "e8m0", "e4m3"]


@dataclass(frozen=True)
class TensorScheme:
    """How one tensor is quantized.

    - ``dtype``: the name of its ``format``, one of ``qgemm.numerics.formats.FORMATS``.
    - ``granularity``: what shares a scale: the whole ``"tensor"``, an output ``"channel"`` (row) of a weight, a
      ``"token"`` (row) of an activation, a ``"group"`` of ``group_size`` values along K, or a ``"block"`` of a weight,
      of ``block`` rows and columns; ``group_size`` are its columns.
    - ``dynamic``: whether the scale is found from the values at run time.
    - ``symmetric``: whether 0 is stored as 0, with no zero point.
    - ``float_zeros``: whether zero points of a weight are floats, which are added after values are scaled.
    - ``outlier_columns``: how many columns of an activation are kept out of it, in 16 bits, with those of the weight.
    - ``rotation``: what an activation is multiplied by before it is quantized, ``"hadamard"``, or None.
    - ``scale_dtype``: what scales are rounded to as a weight is quantized, one of ``qgemm.numerics.groups``. Those of a
      checkpoint in float32, float16 or bfloat16 are kept as they are, multiples of a step or not.
    - ``is_ordered``: whether groups are of columns in another order than the input's, which the layer holds.
    - ``is_prescaled``: whether each column of the input is first multiplied by a factor, which the layer holds.
    """

    dtype: str
    granularity: Granularity
    dynamic: bool = False
    symmetric: bool = True
    group_size: int | None = None
    outlier_columns: int = 0
    rotation: str | None = None
    scale_dtype: ScaleDtype = "float32"
    block: tuple[int, int] | None = None
    is_ordered: bool = False
    float_zeros: bool = False
    is_prescaled: bool = False

    def __post_init__(self) -> None:
        """JSON has no tuples."""
        if isinstance(self.block, list):
            object.__setattr__(self, "block", tuple(self.block))

    @property
    def format(self) -> Format:
        """The number format of its values."""
        form = FORMATS[self.dtype]
        if self.symmetric:
            return form
        return form.with_float_zeros if self.float_zeros else form.asymmetric

    def is_stored_as(self, other: TensorScheme) -> bool:
        """Whether a tensor of the ``other`` scheme is one of this, too, as it is: scales may be of other rounding."""
        mine, others = (SCALE_DTYPES[each.scale_dtype] for each in (self, other))
        return mine == others and replace(self, scale_dtype=other.scale_dtype) == other

    def to_dict(self) -> dict[str, Any]:
        """The scheme as JSON-ready values. What most schemes don't have is left out."""
        values = asdict(self)
        for field in fields(self):
            if field.name in _RARE and values[field.name] == field.default:
                del values[field.name]
        return values


_RARE = ("outlier_columns", "rotation", "scale_dtype", "block", "is_ordered", "float_zeros", "is_prescaled")


@dataclass(frozen=True)
class QuantScheme:
    """How a layer is quantized: its weight, and its activation (None if that stays in float).

    ``down``: of experts, the weight of ``down_proj``, if ``weight`` is that of ``gate_up_proj`` alone.
    """

    name: str
    weight: TensorScheme
    activation: TensorScheme | None
    down: TensorScheme | None = None

    @property
    def is_static(self) -> bool:
        """Whether activations are quantized with a given scale, not with one computed at run time."""
        return self.activation is not None and not self.activation.dynamic

    @property
    def is_weight_only(self) -> bool:
        """Whether activations, and so the products, stay in float."""
        return self.activation is None

    @property
    def has_zero_point(self) -> bool:
        """Whether activations have a zero point, so that their scale is a pair."""
        return self.activation is not None and not self.activation.symmetric

    @property
    def rotates(self) -> bool:
        """Whether activations are rotated before they are quantized."""
        return self.activation is not None and self.activation.rotation is not None

    @property
    def outlier_columns(self) -> int:
        """How many columns of activations stay in float."""
        return 0 if self.activation is None else self.activation.outlier_columns

    @property
    def is_plain(self) -> bool:
        """Whether quantized operands are only multiplied: no zero point, rotation or columns in float."""
        return not (self.is_weight_only or self.has_zero_point or self.rotates or self.outlier_columns)

    @property
    def needs_data(self) -> bool:
        """Whether making a layer needs more than its weight."""
        return self.is_static or self.outlier_columns > 0

    @property
    def needs_blocks(self) -> bool:
        """Whether it needs data block by block: for outlier columns, or for scales of rotated inputs."""
        return self.outlier_columns > 0 or (self.is_static and self.rotates)

    @property
    def max_k(self) -> int:
        """The longest sum that a product's accumulator holds."""
        return sys.maxsize if self.activation is None else self.activation.format.max_k

    def rotated(self) -> QuantScheme:
        """The scheme with rotated activations. Raises ``ValueError`` if that isn't possible, or already so."""
        if self.activation is not None and not self.rotates:
            found = SCHEMES.get(_name(self.weight, replace(self.activation, rotation="hadamard")))
            if found is not None:
                return found
        raise ValueError(f"scheme {self.name!r} can't be combined with a rotation")

    def with_outliers(self, count: int) -> QuantScheme:
        """The scheme with ``count`` columns of activations kept in float, a multiple of 16.

        Raises ``ValueError`` if that isn't possible, or if it already keeps some.
        """
        if self.activation is None or self.weight != INT8_ROWS or not self.is_plain or count < 1 or count % 16:
            raise ValueError(
                f"scheme {self.name!r} can't be combined with {count} columns in float: only 'int8' and 'int8-static' "
                "can, with a multiple of 16"
            )
        return _scheme(self.weight, replace(self.activation, outlier_columns=count))

    def without_outliers(self) -> QuantScheme:
        """The scheme with no columns kept in float."""
        return self if self.activation is None else _scheme(self.weight, replace(self.activation, outlier_columns=0))

    @property
    def parts(self) -> tuple[QuantScheme, QuantScheme]:
        """The schemes of the ``gate_up_proj`` and the ``down_proj`` of experts."""
        return (self, self) if self.down is None else (_scheme(self.weight, None), _scheme(self.down, None))

    def of(self, name: str) -> QuantScheme:
        """The scheme of the parameter ``name``: for experts with two, that of its weight."""
        return self.parts[name.startswith("down_proj")]

    def with_down(self, other: QuantScheme) -> QuantScheme:
        """The scheme of experts whose ``down_proj`` has the ``other`` one.

        Raises ``ValueError`` if that isn't the same, unless activations stay in float in both.
        """
        if other == self:
            return self
        if not (self.is_weight_only and other.is_weight_only):
            raise ValueError(
                f"experts can't have {self.name!r} and {other.name!r}, as activations of one are quantized"
            )
        return _scheme(self.weight, None, other.weight)

    def for_experts(self) -> QuantScheme:
        """The scheme of fused experts in a model whose linear layers have this one.

        - ``int8`` for all schemes of int8 by int8: scales at run time, without rotation or columns in float.
        - ``fp8`` for ``fp8`` and ``fp8-static``; ``fp8-block`` is itself.
        - The weight's own, with activations in float, for all others: ``int4`` for ``int4-int8``, ``mxfp4`` itself.
          Groups are in the order of the input, which isn't multiplied by factors.
        """
        if self.down is not None:
            first, second = (part.for_experts() for part in self.parts)
            return first.with_down(second)
        if self.is_weight_only or self.weight.dtype == "int4":
            plain = replace(self.weight, scale_dtype=_scale_dtype(self.weight)) if self.activation else self.weight
            return _scheme(replace(plain, is_ordered=False, is_prescaled=False), None)
        if self.weight.granularity == "block":
            return self
        return SCHEMES[self.weight.dtype]

    def to_dict(self) -> dict[str, Any]:
        """The scheme as JSON-ready values."""
        activation = None if self.activation is None else self.activation.to_dict()
        down = {} if self.down is None else {"down": self.down.to_dict()}
        return {"name": self.name, "weight": self.weight.to_dict(), "activation": activation, **down}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> QuantScheme:
        """The scheme that ``to_dict`` wrote. Raises ``ValueError`` for anything else."""
        try:
            weight, activation = TensorScheme(**values["weight"]), values["activation"]
            if activation is not None:
                activation = TensorScheme(**activation)
                if weight.dtype == "int4":  # steps came later
                    weight = replace(weight, scale_dtype=_scale_dtype(weight, activation))
            down = TensorScheme(**values["down"]) if "down" in values else None
            return cls(name=values["name"], weight=weight, activation=activation, down=down)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{values!r} isn't a quantization scheme: {error}") from error


def _name(weight: TensorScheme, activation: TensorScheme | None) -> str:
    """What a scheme is called, by what it is."""
    if activation is None:
        return _weight_name(weight)
    if weight.dtype == "int4":
        return f"{_weight_name(weight)}-{activation.dtype}"
    parts = [weight.dtype]
    parts += ["block"] if weight.granularity == "block" else []
    parts += [] if activation.dynamic else ["static"]
    parts += [] if activation.symmetric else ["asymmetric"]
    parts += [] if activation.rotation is None else [activation.rotation]
    parts += [f"outliers-{activation.outlier_columns}"] if activation.outlier_columns else []
    return "-".join(parts)


def _weight_name(weight: TensorScheme) -> str:
    """What a scheme of this weight with activations in float is called."""
    prescaled = _PRESCALED if weight.is_prescaled else ""
    if (weight.dtype, weight.scale_dtype) in _MICROSCALED:
        return _MICROSCALED[weight.dtype, weight.scale_dtype][0] + prescaled
    parts = [weight.dtype if weight.format.bits == 4 else f"{weight.dtype}-weight"]
    if weight.granularity == "channel":
        parts += ["channel"] if weight.format.bits == 4 else []
    elif weight.group_size != _GROUP_SIZES.get(weight.dtype):
        parts.append(str(weight.group_size))
    parts += [] if weight.symmetric else ["float-zeros" if weight.float_zeros else "asymmetric"]
    parts += ["ordered"] if weight.is_ordered else []
    return "-".join(parts) + prescaled


def _scheme(weight: TensorScheme, activation: TensorScheme | None, down: TensorScheme | None = None) -> QuantScheme:
    name = _name(weight, activation) if down is None else f"{_weight_name(weight)}+{_weight_name(down)}"
    return QuantScheme(name, weight, activation, down)


_PRESCALED = "-prescaled"
# Formats whose values a table has.
_CODEBOOKS = [form.name for form in FORMATS.values() if form.has_codebook]
# The size of groups of a format that is named without one.
_GROUP_SIZES = {"int4": 128, **dict.fromkeys(_CODEBOOKS, 64)}
# By a weight's format and the dtype of its scales: the name, and the size of groups, which are fixed.
_MICROSCALED = {("fp4", "e8m0"): ("mxfp4", 32), ("fp8", "e8m0"): ("mxfp8", 32), ("fp4", "e4m3"): ("nvfp4", 16)}
# The dtype of scales of formats whose steps are coarse.
_SCALE_DTYPES: dict[str, ScaleDtype] = dict.fromkeys(("int4", *_CODEBOOKS), "bfloat16")


def _scale_dtype(weight: TensorScheme, activation: TensorScheme | None = None) -> ScaleDtype:
    """What scales of a weight are rounded to. With activations in int8, those of its groups let sums be integers."""
    if weight.dtype == "int4" and activation is not None and weight.group_size is not None and weight.symmetric:
        return "steps"
    return _SCALE_DTYPES.get(weight.dtype, "float32")


INT8_ROWS = TensorScheme("int8", "channel")
"""Weights of 8 bits with a scale a row, which all int8 schemes have."""
FP8_ROWS = TensorScheme("fp8", "channel")
"""The same in e4m3."""
INT8_TOKENS = TensorScheme("int8", "token", dynamic=True)
"""Activations of 8 bits with a scale a token, found at run time."""


def _weight(dtype: str, size: int | None) -> TensorScheme:
    """A weight with a scale for each group of ``size`` values; None for one for each channel."""
    granularity: Granularity = "channel" if size is None else "group"
    weight = TensorScheme(dtype, granularity, group_size=size)
    return replace(weight, scale_dtype=_scale_dtype(weight))


SCHEMES: dict[str, QuantScheme] = {
    scheme.name: scheme
    for scheme in (
        _scheme(INT8_ROWS, INT8_TOKENS),
        _scheme(INT8_ROWS, TensorScheme("int8", "tensor")),
        _scheme(INT8_ROWS, TensorScheme("int8", "tensor", symmetric=False)),
        _scheme(INT8_ROWS, TensorScheme("int8", "token", dynamic=True, rotation="hadamard")),
        _scheme(INT8_ROWS, TensorScheme("int8", "tensor", rotation="hadamard")),
        _scheme(FP8_ROWS, TensorScheme("fp8", "token", dynamic=True)),
        _scheme(FP8_ROWS, TensorScheme("fp8", "tensor")),
        _scheme(
            TensorScheme("fp8", "block", group_size=128, block=(128, 128)),
            TensorScheme("fp8", "group", dynamic=True, group_size=128),
        ),
        _scheme(_weight("int4", 128), None),
        _scheme(_weight("int4", None), None),
        _scheme(_weight("int8", None), None),
        _scheme(_weight("fp8", None), None),
        *(
            _scheme(TensorScheme(dtype, "group", group_size=size, scale_dtype=scale_dtype), None)  # type: ignore[arg-type]
            for (dtype, scale_dtype), (_, size) in _MICROSCALED.items()
        ),
        *(_scheme(_weight(dtype, _GROUP_SIZES[dtype]), None) for dtype in _CODEBOOKS),
    )
}
"""The schemes with a fixed name.

- ``int8``: int8 products; activations get a scale per token as they come.
- ``int8-static``: int8 products; one scale for all activations, given beforehand.
- ``int8-static-asymmetric``: as ``int8-static``, with a zero point.
- ``int8-hadamard``, ``int8-static-hadamard``: the same, with activations rotated before they are quantized.
- ``fp8``, ``fp8-static``: as ``int8`` and ``int8-static``, in fp8 (e4m3).
- ``fp8-block``: in fp8 as DeepSeek-V3 has it: weights with a scale for each block of 128 x 128, activations with one
  for each 128 values of a token.

The others have weights alone quantized; products are in float:

- ``int4``: 4 bits, a scale for each group of 128 along K; ``int4-channel``: one scale for each output channel.
- ``int8-weight``, ``fp8-weight``: 8 bits, a scale for each output channel.
- ``mxfp4``, ``mxfp8``: e2m1 and e4m3, with a power of two for each 32 values along K.
- ``nvfp4``: e2m1, with an e4m3 scale for each 16 values.
- ``nf4``: the 4-bit normal float of QLoRA, a scale for each 64 values; ``bnb-fp4``: the same with bitsandbytes' fp4.

Of a family: ``int8-outliers-16`` and ``int8-static-outliers-16`` keep the largest 16 columns of activations in float,
or any other multiple of 16. ``int4-32``, ``int8-weight-128``, ``nf4-32`` and ``bnb-fp4-32`` have groups of that many
values, any multiple of 16. int4 and int8-weight go on with ``-asymmetric`` for weights with zero points in whole
numbers, ``(q - z) * s``, or ``-float-zeros`` for those in floats, ``q * s + z``; and then ``-ordered`` for groups of
columns in an order of their own (act-order). int4 without float zero points goes on with ``-int8`` for int8
activations. Any scheme with activations in float may go on with ``-prescaled``: each column of the input is first
multiplied by a factor, as AWQ in some libraries' checkpoints has it.

``int4-32+int8-weight`` is for experts alone: the ``gate_up_proj`` of each in the one, ``down_proj`` in the other.
"""

_OUTLIERS = re.compile(r"(.+)-outliers-([1-9][0-9]{1,4})")
_WEIGHTS = re.compile(
    f"({'|'.join(('int4', 'int8-weight', *_CODEBOOKS))})"
    "(?:-(channel|[1-9][0-9]{1,5}))?(-asymmetric|-float-zeros)?(-ordered)?(-int8)?"
)


def resolve_scheme(scheme: str | QuantScheme) -> QuantScheme:
    """The scheme of that name, or the scheme itself.

    Raises ``ValueError`` for one that is neither among ``SCHEMES`` nor of one of its families, ``TypeError`` for what
    is neither name nor scheme.
    """
    if not isinstance(scheme, str | QuantScheme):
        raise TypeError(f"scheme is {scheme!r}, of type {type(scheme).__name__}; it takes a name: {sorted(SCHEMES)}")
    known = _find(scheme if isinstance(scheme, str) else scheme.name)
    if known is None or (isinstance(scheme, QuantScheme) and scheme != known):
        raise ValueError(
            f"scheme is {scheme!r}{_meant(scheme)} it must be one of {sorted(SCHEMES)}, or like 'int8-outliers-16' or "
            "'int8-static-outliers-16' with any multiple of 16, or like 'int4-32', 'int4-asymmetric', 'int4-int8' or "
            "'int8-weight-128' with groups of any multiple of 16"
        )
    return known


# Bits of weights and of activations, as other libraries name schemes.
_BITS = {"w8a8": "int8", "w8a16": "int8-weight", "w4a16": "int4", "w4a8": "int4-int8", "w8a8-fp8": "fp8"}

# What isn't a scheme here, and what to ask for.
_INSTEAD = {
    "gptq": "GPTQ decides weights of any scheme: pass scheme='int4' with recipe=[GPTQ()]",
    "awq": "AWQ decides weights of any scheme: pass scheme='int4' with recipe=[AWQ()]",
    "smoothquant": "SmoothQuant prepares for any scheme: pass scheme='int8-static' with recipe=[SmoothQuant()]",
    "fp4": "the schemes with fp4 weights are 'mxfp4' and 'nvfp4', and 'bnb-fp4' with bitsandbytes' own fp4",
    "bnb-nf4": "bitsandbytes' nf4 is 'nf4'",
    "int2": "the fewest bits are those of 'int4'",
    "int3": "the fewest bits are those of 'int4'",
}


def _meant(scheme: str | QuantScheme) -> str:
    """What goes on an error after a name: what that may stand for, if there is something near."""
    if not isinstance(scheme, str):
        return ";"
    name = scheme.lower().replace("_", "-")
    match = _WEIGHTS.fullmatch(name)
    if match is not None and match[2] is not None and match[2] == str(_GROUP_SIZES.get(match[1])):
        return f" (did you mean {name.replace('-' + match[2], '', 1)!r}, whose groups have {match[2]} values?);"
    if name in _INSTEAD:
        return f" ({_INSTEAD[name]});"
    if match is not None and match[3] == "-float-zeros" and match[5]:
        return " (float zero points are for activations in float: leave '-int8' out, or take '-asymmetric');"
    near = difflib.get_close_matches(name, [*SCHEMES, "int4-int8", *_BITS], len(SCHEMES), cutoff=0.8)
    best = max(near, key=lambda each: _likeness(name, each), default=None)
    return ";" if best is None else f" (did you mean {_BITS.get(best, best)!r}?);"


def _likeness(name: str, known: str) -> tuple[float, int]:
    """Of equal ratios, the longest part in common counts: 'int4-8' is nearer to 'int4-int8' than to 'int8'."""
    matcher = difflib.SequenceMatcher(None, known, name)
    return matcher.ratio(), matcher.find_longest_match().size


def _find(name: str) -> QuantScheme | None:
    if (known := SCHEMES.get(name)) is not None:
        return known
    if "+" in name:
        first, second = map(_find, name.split("+", 1))
        if first is None or second is None or not (first.is_weight_only and second.is_weight_only):
            return None
        pair = first.with_down(second)
        return pair if pair.name == name and pair.for_experts() == pair else None
    if name.endswith(_PRESCALED):
        plain = _find(name.removesuffix(_PRESCALED))
        if plain is None or not plain.is_weight_only or plain.down is not None or plain.weight.is_prescaled:
            return None
        return _scheme(replace(plain.weight, is_prescaled=True), None)
    if (match := _OUTLIERS.fullmatch(name)) is not None:
        base, count = SCHEMES.get(match[1]), int(match[2])
        try:
            return None if base is None else base.with_outliers(count)
        except ValueError:
            return None
    if (match := _WEIGHTS.fullmatch(name)) is None:
        return None
    base_name, finely, zeros, ordered, by_int8 = match.groups()
    dtype = base_name.removesuffix("-weight")
    size = _GROUP_SIZES.get(dtype) if finely is None else None if finely == "channel" else int(finely)
    float_zeros, activation = zeros == "-float-zeros", INT8_TOKENS if by_int8 else None
    weight = replace(_weight(dtype, size), symmetric=not zeros, float_zeros=float_zeros, is_ordered=bool(ordered))
    found = _scheme(replace(weight, scale_dtype=_scale_dtype(weight, activation)), activation)
    is_one = (size or 16) % 16 == 0 and not (dtype in _CODEBOOKS and (zeros or ordered or size is None))
    is_one = is_one and not (by_int8 and (dtype != "int4" or float_zeros))
    return found if is_one and found.name == name else None
