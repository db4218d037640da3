"""What a layer computes between its products: the operators that it takes, and their numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgemm.kernels.norms import Norm
from qgemm.nn.blocks.operands import FloatOperands
from qgemm.nn.blocks.steps import Factors, NormStep, add, add_and_read
from tests.operators import Operators

FLOATS: Any = (FloatOperands(None),)  # type: ignore[arg-type]
"""Those of a product that reads floats."""


def step(kind: str, device: torch.device) -> NormStep:
    """A norm of 32 values with random weights."""
    module: nn.Module = nn.LayerNorm(32, bias=False) if kind == "layer" else nn.RMSNorm(32, eps=1e-5)
    nn.init.normal_(module.get_parameter("weight"))
    return NormStep(module.to(device), Norm(kind, 1e-5))


@pytest.mark.parametrize("following", [None, "rms", "layer"])
def test_a_norm_behind_a_branch_is_no_operator_of_pytorch(following: str | None, device: torch.device) -> None:
    """Not even where no norm follows it, as in OLMo 2, or one of another kind."""
    x, residual = (torch.randn(3, 32, device=device) for _ in range(2))
    behind = step("rms", device)
    ahead = None if following is None else step(following, device)
    with torch.no_grad(), Operators() as found:
        total, into = add_and_read(x, residual, behind, ahead, FLOATS)
    assert found.names == ["qgemm.add_norm"] * (2 if following == "layer" else 1)
    wanted = residual + behind.module(x)
    torch.testing.assert_close(total, wanted)
    assert isinstance(into, Tensor)
    torch.testing.assert_close(into, wanted if ahead is None else ahead.module(wanted))


@pytest.mark.parametrize("behind", [None, "rms"])
@pytest.mark.parametrize("of_total", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("of_vector", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("number", [1.0, 0.22])
def test_factors(
    number: float,
    of_vector: torch.dtype | None,
    of_total: torch.dtype,
    behind: str | None,
    device: torch.device,
) -> None:
    """As PyTorch multiplies: by one after the other, before the norm, each product rounded to its dtype."""
    x, residual = (torch.randn(3, 32, device=device).bfloat16() for _ in range(2))
    vector = None if of_vector is None else torch.randn(32, device=device).to(of_vector)
    total = torch.tensor([1.3], device=device).to(of_total)
    norm = None if behind is None else step(behind, device)
    if norm is not None:
        norm.module.bfloat16()
    with torch.no_grad():
        found = add(x, residual, norm, Factors(number, vector, total))
        wanted = x * number if vector is None else x * number * vector
        wanted = (residual + (wanted if norm is None else norm.module(wanted))) * total
    assert found.dtype == wanted.dtype
    if norm is None:
        assert torch.equal(found, wanted)
    else:  # PyTorch's norm is rounded once
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
