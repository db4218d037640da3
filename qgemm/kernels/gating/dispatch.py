"""``gate_heads``: heads times a function of their gates, on a GPU by one kernel, else by PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.kernels.activations import ACTIVATIONS
from qgemm.numerics.formats import FLOAT_DTYPES

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS,
    "sigmoid": torch.sigmoid,
    "softplus": lambda gate: F.softplus(gate.float()).to(gate.dtype),
}
"""The functions of gates, each rounded once; ``stages/activations.py`` has their device code."""


def is_one_launch(x: Tensor, gate: Tensor) -> bool:
    """Whether ``gate_heads`` of these is one launch that reads both as they are."""
    if not _fits(x, gate):
        return False
    rows = (each.reshape(-1, *each.shape[-2:]).data_ptr() == each.data_ptr() for each in (x, gate))
    return all(rows) and x.stride(-1) == gate.stride(-1) == 1


def gate_heads(x: Tensor, gate: Tensor, function: str) -> Tensor:
    """``round(x * round(function(gate)))`` of ``x [..., H, D]``, in its dtype.

    ``gate``: ``[..., H, D]``, or ``[..., H, 1]`` for a gate of each head. ``function``: one of ``GATES``.
    """
    if not _fits(x, gate):
        return x * GATES[function](gate)
    from qgemm.kernels.gating import launcher

    return launcher.gate_heads(x, gate, function)


def _fits(x: Tensor, gate: Tensor) -> bool:
    is_plain = x.is_cuda and gate.is_cuda and not x.is_neg() and not gate.is_neg()
    alike = x.dtype == gate.dtype and x.shape[:-1] == gate.shape[:-1] and gate.shape[-1] in (1, x.shape[-1])
    return is_plain and alike and x.ndim >= 2 and x.dtype in FLOAT_DTYPES
