"""``torch.ops.qgemm.scaled_mm`` and ``matmul``: gradients and tangents."""

import pytest
import torch
from torch import Tensor, nn

from ops.test_declare import int8

ops = torch.ops.qgemm


def test_tangents(device: torch.device) -> None:
    a, b = torch.randint(-9, 9, (5, 16), dtype=torch.int8), torch.randint(-9, 9, (16, 8), dtype=torch.int8)
    scales = torch.rand(5) + 0.5, torch.rand(8) + 0.5, torch.randn(8)
    along = torch.randn(5), torch.randn(8), torch.randn(8)

    def scaled(*scales: Tensor) -> Tensor:
        return ops.scaled_mm(a.to(device), b.to(device), *(each.to(device) for each in scales), torch.float32).cpu()

    def exact(a_scale: Tensor, b_scale: Tensor, bias: Tensor) -> Tensor:
        return (a.double() @ b.double()).float() * a_scale[:, None] * b_scale + bias

    torch.testing.assert_close(torch.func.jvp(scaled, scales, along), torch.func.jvp(exact, scales, along))
    for activation in (None, "relu", "gelu", "silu"):
        values = torch.randn(5, 16), torch.randn(16, 8), torch.randn(8)
        along = torch.randn(5, 16), torch.randn(16, 8), torch.randn(8)

        def float_exact(a: Tensor, b: Tensor, bias: Tensor, activation: str | None = activation) -> Tensor:
            inner = a @ b + bias
            return inner if activation is None else getattr(nn.functional, activation)(inner)

        def computed(*values: Tensor, activation: str | None = activation) -> Tensor:
            return ops.matmul(*(each.to(device) for each in values), activation, None).cpu()

        wanted = torch.func.jvp(float_exact, values, along)
        torch.testing.assert_close(torch.func.jvp(computed, values, along), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_matmul_gradients(activation: str | None, device: torch.device) -> None:
    values = [torch.randn(shape, device=device) for shape in ((5, 16), (16, 8), (8,))]
    ours = [v.clone().requires_grad_() for v in values]
    exact = [v.double().requires_grad_() for v in values]
    out = ops.matmul(*ours, activation, None)
    inner = exact[0] @ exact[1] + exact[2]
    wanted = inner if activation is None else getattr(nn.functional, activation)(inner)
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted.backward(grad.double())
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("a_shape", [(5,), (1,), ()])
@pytest.mark.parametrize("b_shape", [(8,), (1,), ()])
def test_scaled_mm_gradients(a_shape: tuple[int, ...], b_shape: tuple[int, ...], device: torch.device) -> None:
    a, b = int8(5, 16, device=device), int8(8, 16, device=device).t()
    values = [torch.rand(a_shape, device=device), torch.rand(b_shape, device=device), torch.randn(8, device=device)]
    ours = [v.clone().requires_grad_() for v in values]
    exact = [v.double().requires_grad_() for v in values]
    out = ops.scaled_mm(a, b, *ours, torch.float32)
    wanted = (a.double() @ b.double()) * exact[0].reshape(-1, 1) * exact[1] + exact[2]
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted.backward(grad.double())
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-2)
