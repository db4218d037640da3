"""``QuantScheme``: what a quantized layer stores and computes with.

A scheme says, for the weight and for the activation, which dtype, how finely it is scaled, and when the scale is found.
Schemes are values: they compare, print, and go through JSON (``to_dict``, ``from_dict``) into a checkpoint. ``SCHEMES``
holds those with a name; ``resolve_scheme`` takes a name or a scheme.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Granularity = Literal["tensor", "channel", "token", "group"]


@dataclass(frozen=True)
class TensorScheme:
    """How one tensor is quantized.

    - ``dtype``: what its values are stored as: ``"int8"``, or ``"int4"``, of which eight share an int32.
    - ``granularity``: what shares a scale: the whole ``"tensor"``, an output ``"channel"`` (row) of a weight, a
      ``"token"`` (row) of an activation, or a ``"group"`` of ``group_size`` values along K.
    - ``dynamic``: whether the scale is found from the values at run time.
    - ``symmetric``: whether 0 is stored as 0, with no zero point.
    - ``outlier_columns``: how many columns of an activation are kept out of it, in 16 bits, with those of the weight.
    - ``rotation``: what an activation is multiplied by before it is quantized, ``"hadamard"``, or None.
    """

    dtype: str
    granularity: Granularity
    dynamic: bool = False
    symmetric: bool = True
    group_size: int | None = None
    outlier_columns: int = 0
    rotation: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The scheme as JSON-ready values. What most schemes don't have is left out."""
        values = asdict(self)
        for name, default in (("outlier_columns", 0), ("rotation", None)):
            if values[name] == default:
                del values[name]
        return values


@dataclass(frozen=True)
class QuantScheme:
    """How a layer is quantized: its weight, and its activation (None where that stays in float)."""

    name: str
    weight: TensorScheme
    activation: TensorScheme | None

    @property
    def is_static(self) -> bool:
        """Whether activations are quantized with a scale that is given beforehand, not found at run time."""
        return self.activation is not None and not self.activation.dynamic

    def to_dict(self) -> dict[str, Any]:
        """The scheme as JSON-ready values."""
        activation = None if self.activation is None else self.activation.to_dict()
        return {"name": self.name, "weight": self.weight.to_dict(), "activation": activation}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> QuantScheme:
        """The scheme that ``to_dict`` wrote. Raises ``ValueError`` for anything else."""
        try:
            activation = values["activation"]
            return cls(
                name=values["name"],
                weight=TensorScheme(**values["weight"]),
                activation=None if activation is None else TensorScheme(**activation),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{values!r} is no quantization scheme: {error}") from error


_INT8_WEIGHT = TensorScheme("int8", "channel")

SCHEMES: dict[str, QuantScheme] = {
    scheme.name: scheme
    for scheme in (
        QuantScheme("int8", _INT8_WEIGHT, TensorScheme("int8", "token", dynamic=True)),
        QuantScheme("int8-static", _INT8_WEIGHT, TensorScheme("int8", "tensor")),
        QuantScheme("int8-static-asymmetric", _INT8_WEIGHT, TensorScheme("int8", "tensor", symmetric=False)),
        QuantScheme("int8-hadamard", _INT8_WEIGHT, TensorScheme("int8", "token", dynamic=True, rotation="hadamard")),
        QuantScheme("int8-static-hadamard", _INT8_WEIGHT, TensorScheme("int8", "tensor", rotation="hadamard")),
        QuantScheme("int4", TensorScheme("int4", "group", group_size=128), None),
        QuantScheme("int4-channel", TensorScheme("int4", "channel"), None),
    )
}
"""The schemes with a fixed name.

- ``int8``: int8 products; activations get a scale per token as they come.
- ``int8-static``: int8 products; one scale for all activations, given beforehand.
- ``int8-static-asymmetric``: as ``int8-static``, with a zero point.
- ``int8-hadamard``, ``int8-static-hadamard``: the same, with activations rotated before they are quantized.
- ``int4``: weights of 4 bits, a scale for each group of 128 along K; products are in float.
- ``int4-channel``: as ``int4``, with one scale for each output channel.

``int8-outliers-16`` and ``int8-static-outliers-16`` keep the largest 16 columns of activations in float, or any other
multiple of 16.
"""

_OUTLIERS = re.compile(r"(int8|int8-static)-outliers-([1-9][0-9]{1,4})")


def resolve_scheme(scheme: str | QuantScheme) -> QuantScheme:
    """The scheme of that name, or the scheme itself.

    Raises ``ValueError`` for one that isn't among ``SCHEMES``, ``TypeError`` for what is neither name nor scheme.
    """
    if not isinstance(scheme, str | QuantScheme):
        raise TypeError(f"scheme is {scheme!r}, a {type(scheme).__name__}; it takes a name, one of {sorted(SCHEMES)}")
    known = _find(scheme if isinstance(scheme, str) else scheme.name)
    if known is None or (isinstance(scheme, QuantScheme) and scheme != known):
        raise ValueError(
            f"scheme is {scheme!r}; it must be one of {sorted(SCHEMES)}, or as 'int8-outliers-16' or "
            "'int8-static-outliers-16' with any multiple of 16"
        )
    return known


def _find(name: str) -> QuantScheme | None:
    if (match := _OUTLIERS.fullmatch(name)) is None:
        return SCHEMES.get(name)
    base, count = SCHEMES[match[1]], int(match[2])
    if count % 16 or base.activation is None:
        return None
    return QuantScheme(name, base.weight, replace(base.activation, outlier_columns=count))
