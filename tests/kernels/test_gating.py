"""``gate_heads``: the kernel against the formula in float64, and against PyTorch's operators."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.kernels.gating import launcher
from qgemm.kernels.gating.dispatch import GATES
from qgemm.ops.rows import gate_heads

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)


def exact(name: str, gate: Tensor) -> Tensor:
    return F.softplus(gate.double()) if name == "softplus" else GATES[name](gate.double())


@DTYPES
@pytest.mark.parametrize("function", GATES)
@pytest.mark.parametrize("width", [1, 24])
def test_values(width: int, function: str, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(3, 60, 24, device=device).to(dtype)  # 1,440 columns: more than a block
    gate = (torch.randn(3, 60, width, device=device) * 8).to(dtype)
    gate[0, 0], gate[0, 1], gate[0, 2] = 30.0, -30.0, 20.0  # where softplus becomes its argument
    out = launcher.gate_heads(x, gate, function)
    assert out.dtype == dtype
    wanted, eps = x.double() * exact(function, gate), torch.finfo(dtype).eps
    error = (out.double() - wanted).abs()
    # Two roundings, also of what is below the least normal number, and a function with float32's roundings.
    below = torch.finfo(dtype).smallest_normal * eps * (1 + x.double().abs())
    of_function = wanted.abs() * (2e-6 if dtype == torch.float32 else 2e-5) + 3e-7 * x.double().abs()
    assert (error <= wanted.abs() * 1.1 * eps + of_function + below).all()
    if dtype != torch.float32:  # the bits are PyTorch's, except in the tails of GELU, and in ties
        unlike = (out != x * GATES[function](gate)) & (gate.abs() < 3)
        assert unlike.double().mean() < 0.02


@DTYPES
def test_gates_between_other_columns(dtype: torch.dtype, device: torch.device) -> None:
    """As in Qwen3.5, whose gates follow their heads in a product."""
    product = torch.randn(2, 5, 4 * 2 * 16 + 7, device=device).to(dtype)
    gate = product[..., : 4 * 2 * 16].unflatten(-1, (4, 2, 16))[..., 1, :]
    x = torch.randn(2, 4, 5, 16, device=device).to(dtype).transpose(1, 2)
    out = launcher.gate_heads(x, gate, "sigmoid")
    assert out.is_contiguous()
    assert torch.equal(out, launcher.gate_heads(x.contiguous(), gate.contiguous(), "sigmoid"))
    assert torch.equal(launcher.gate_heads(x[..., ::2], gate[..., ::2], "sigmoid"), out[..., ::2])
    for _ in range(3):  # the last calls are recalled
        found = gate_heads(x, gate, "sigmoid")
        torch.testing.assert_close(found, out, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert launcher.gate_heads(x[:0], gate[:0], "sigmoid").shape == (0, 5, 4, 16)


def test_what_is_not_finite_stays_so(device: torch.device) -> None:
    x = torch.ones(1, 2, 2, device=device)
    gate = torch.tensor([[[torch.nan, torch.inf], [-torch.inf, 0.0]]], device=device)
    assert torch.equal(launcher.gate_heads(x, gate, "sigmoid")[0, :, 1], torch.tensor([1.0, 0.5], device=device))
    for function in ("sigmoid", "softplus"):
        out = launcher.gate_heads(x, gate, function)
        assert out[0, 0, 0].isnan()
        assert out[0, 1, 0] == 0
    assert launcher.gate_heads(x, gate, "softplus")[0, 0, 1].isposinf()


def test_gradients(device: torch.device) -> None:
    x, gate = (torch.randn(2, 3, 4, device=device, requires_grad=True) for _ in range(2))
    gate_heads(x, gate, "sigmoid").sum().backward()
    assert torch.equal(x.grad, gate.sigmoid())
    assert gate.grad is not None


def test_operands_of_other_dtypes(device: torch.device) -> None:
    x, gate = torch.randn(2, 3, 4, device=device), torch.randn(2, 3, 1, device=device).double()
    assert torch.equal(gate_heads(x, gate, "sigmoid"), x * gate.sigmoid())
