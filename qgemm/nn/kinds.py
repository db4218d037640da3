"""``linear_class``: the class of linear layer that computes a scheme. ``meta_linear``: such a layer without values."""

from __future__ import annotations

import torch

from qgemm.nn.asymmetric import AsymmetricLinear
from qgemm.nn.block_scaled import BlockScaledLinear
from qgemm.nn.int4_int8 import Int4Int8Linear
from qgemm.nn.linear import QuantLinear
from qgemm.nn.linear_layer import LinearLayer
from qgemm.nn.outliers import OutlierLinear
from qgemm.nn.prescaled import PrescaledLinear
from qgemm.nn.rotated import RotatedLinear
from qgemm.nn.weight_only import WeightOnlyLinear
from qgemm.scheme import QuantScheme, resolve_scheme

KINDS: tuple[type[LinearLayer], ...] = (
    QuantLinear, WeightOnlyLinear, Int4Int8Linear, RotatedLinear, AsymmetricLinear, OutlierLinear, BlockScaledLinear,
    PrescaledLinear,
)  # fmt: skip


def linear_class(scheme: str | QuantScheme) -> type[LinearLayer]:
    """The class whose layers compute ``scheme``; raises ``ValueError`` for an unknown scheme."""
    scheme = resolve_scheme(scheme)
    for kind in KINDS:
        if kind.computes(scheme):
            return kind
    hint = "use one of qgemm.SCHEMES"
    if scheme.down is not None:
        hint = f"it is for experts alone, and a scheme for all layers is, for example, {scheme.parts[0].name!r}"
    raise ValueError(f"no linear layer computes the scheme {scheme.name!r}: {hint}")


def meta_linear(
    scheme: str | QuantScheme, in_features: int, out_features: int, bias: bool = False, dtype: torch.dtype | None = None
) -> LinearLayer:
    """A layer on the meta device: it shows names, shapes and dtypes of a scheme's parameters, or waits for values.

    Raises ``ValueError`` as the class does.
    """
    return linear_class(scheme)(in_features, out_features, bias, "meta", dtype, scheme)
