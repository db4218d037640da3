"""Checks of the arguments of the choice of tokens, in the form of ``kernels/checks.py``."""

import torch
from torch import Tensor

from qgemm.kernels.checks import check_same_device, names_of
from qgemm.kernels.sampling.choice import Choice
from qgemm.numerics.formats import FLOAT_DTYPES


def check_choose_tokens(choice: Choice) -> None:
    """Raises if ``choose_tokens`` doesn't accept it."""
    scores, token, rows, counters, finished, ends = choice[:6]
    if scores.dtype not in FLOAT_DTYPES:
        raise TypeError(f"scores is {scores.dtype}; choose_tokens accepts {names_of(FLOAT_DTYPES)}: cast it")
    if scores.ndim != 2 or not scores.shape[1]:
        raise ValueError(f"scores has shape {list(scores.shape)}; it must be [B, V] with one score or more")
    B, steps = scores.shape[0], rows.shape[0] if rows.ndim else 0
    _check("token", token, torch.int64, (B, 1))
    _check("rows", rows, torch.int64, (steps, B + 1))
    _check("counters", counters, torch.int64, (max(1, counters.numel()),))
    _check("finished", finished, torch.bool, (B,))
    if ends is not None:
        _check("ends", ends, torch.int64, (ends.numel(),))
    check_same_device(scores=scores, token=token, rows=rows, counters=counters, finished=finished, ends=ends)


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be contiguous {dtype} {list(shape)}")
