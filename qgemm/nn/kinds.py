"""``linear_class``: which class of linear layer computes a scheme."""

from __future__ import annotations

from qgemm.nn.asymmetric import AsymmetricLinear
from qgemm.nn.linear import QuantLinear
from qgemm.nn.linear_layer import LinearLayer
from qgemm.nn.outliers import OutlierLinear
from qgemm.nn.packed import PackedLinear
from qgemm.nn.rotated import RotatedLinear
from qgemm.scheme import QuantScheme, resolve_scheme

KINDS: tuple[type[LinearLayer], ...] = (QuantLinear, PackedLinear, RotatedLinear, AsymmetricLinear, OutlierLinear)


def linear_class(scheme: str | QuantScheme) -> type[LinearLayer]:
    """The class whose layers compute ``scheme``; raises ``ValueError`` for an unknown scheme."""
    scheme = resolve_scheme(scheme)
    return next(kind for kind in KINDS if kind.computes(scheme))
