"""Attention with a bias of its scores, against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qgemm.nn.blocks.position_bias import attend


def by_formula(q: Tensor, k: Tensor, v: Tensor, scaling: float, *added: Tensor | None) -> Tensor:
    scores = q @ k.transpose(2, 3) * scaling
    for each in added:
        scores = scores if each is None else scores + each
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_as_exact_as_the_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 8).to(dtype)
    bias, mask = torch.randn(1, 4, 9, 9).to(dtype), torch.zeros(2, 1, 1, 9, dtype=dtype)
    mask[1, ..., -4:] = torch.finfo(dtype).min
    # A row without a key has the mean of all; bools are numbers.
    nothing = torch.full_like(mask, torch.finfo(dtype).min)
    for own in (mask, nothing, mask == 0, None):
        for each in (bias, None):
            wide = [x if x is None or x.dtype == torch.bool else x.double() for x in (each, own)]
            exact = by_formula(q.double(), k.double(), v.double(), 0.3, *wide)
            out, weights = attend(nn.Module(), q, k, v, own, 0.3, each, dropout=0.0)
            assert (out.dtype, weights) == (dtype, None)
            reference = by_formula(q, k, v, 0.3, each, own).to(dtype)
            assert (out - exact).norm() <= 2 * (reference - exact).norm()
