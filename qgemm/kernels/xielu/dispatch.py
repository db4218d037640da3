"""``xielu``: an activation with parameters (arXiv:2411.13010, Apertus), on a GPU by one kernel, else by PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.kernels.xielu.coefficients import Coefficients
from qgemm.numerics.formats import FLOAT_DTYPES


def fits(x: Tensor, coefficients: Coefficients) -> bool:
    """Whether ``xielu`` of these is one launch."""
    alike = all(each.dtype == x.dtype and each.is_cuda and each.numel() == 1 for each in coefficients)
    return x.is_cuda and alike and x.dtype in FLOAT_DTYPES and x.is_contiguous() and not x.is_neg()


def xielu(x: Tensor, coefficients: Coefficients) -> Tensor:
    """``a_p * x ** 2 + beta * x`` above 0, else ``a_n * (expm1(min(x, eps)) - x) + beta * x``.

    The kernel rounds once, PyTorch at each operator.
    """
    if not fits(x, coefficients):
        return plain(x, coefficients)
    from qgemm.kernels.xielu import launcher

    return launcher.xielu(x, coefficients)


def plain(x: Tensor, coefficients: Coefficients) -> Tensor:
    """The same as models write it."""
    alpha_p, alpha_n, beta, eps = coefficients
    above = F.softplus(alpha_p) * x * x + beta * x
    below = (torch.expm1(torch.min(x, eps)) - x) * (beta + F.softplus(alpha_n)) + beta * x
    return torch.where(x > 0, above, below)
