"""``Coefficients``: the parameters of xIELU."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Coefficients(NamedTuple):
    """One value each, in the dtype of the activation's input."""

    alpha_p: Tensor
    """``softplus`` of it is the factor of ``x ** 2`` above 0."""
    alpha_n: Tensor
    """``softplus`` of it plus ``beta`` is the factor of ``expm1(x) - x`` below."""
    beta: Tensor
    """The factor of ``x``."""
    eps: Tensor
    """``expm1`` has at most this argument."""
