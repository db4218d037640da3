"""``xielu``: the kernel against the formula in float64, and PyTorch's operators against models'."""

import pytest
import torch
from torch import Tensor

from qgemm.kernels.xielu import launcher
from qgemm.kernels.xielu.coefficients import Coefficients
from qgemm.kernels.xielu.dispatch import plain
from qgemm.ops.rows import xielu


def coefficients(dtype: torch.dtype, device: torch.device, eps: float = -1e-6) -> Coefficients:
    values = ([0.7], [-1.3], 0.5, eps)
    return Coefficients(*(torch.tensor(each, device=device).to(dtype) for each in values))


def exact(x: Tensor, of: Coefficients) -> Tensor:
    return plain(x.double(), Coefficients(*(each.double() for each in of)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("eps", [-1e-6, -0.25])
def test_values(eps: float, dtype: torch.dtype, device: torch.device) -> None:
    x = (torch.randn(3, 2, 700, device=device) * 3).to(dtype)  # more than a block
    x[0, 0, :6] = torch.tensor([0.0, 1e-4, -1e-4, -1.0, -50.0, 30.0], device=device).to(dtype)
    given = coefficients(dtype, device, eps)
    out, wanted = launcher.xielu(x, given), exact(x, given)
    assert out.dtype == dtype
    assert out.shape == x.shape
    error = (out.double() - wanted).abs()
    assert (error <= wanted.abs() * (torch.finfo(dtype).eps / 2 + 4e-7) + 1e-6 * x.double().abs() + 1e-7).all()
    # What rounds at each operator is farther off.
    if dtype != torch.float32:
        assert error.square().mean() < (plain(x, given).double() - wanted).square().mean()
    assert torch.equal(xielu(x, given), plain(x, given) if device.type == "cpu" else out)
    assert launcher.xielu(x[:0], given).shape == (0, 2, 700)


def test_what_is_not_finite_stays_so(device: torch.device) -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf], device=device)
    out = launcher.xielu(x, coefficients(torch.float32, device))
    assert torch.equal(out.isnan(), plain(x, coefficients(torch.float32, device)).isnan())
    assert out[1].isposinf()


def test_it_is_what_models_compute(device: torch.device) -> None:
    from transformers.activations import XIELUActivation

    for dtype in (torch.bfloat16, torch.float32):
        module, x = XIELUActivation().to(device, dtype), torch.randn(1000, device=device).to(dtype)
        given = Coefficients(*(getattr(module, name) for name in Coefficients._fields))
        assert torch.equal(plain(x, given), module(x))
        module(x).sum().backward()  # with gradients
        wanted, module.alpha_p.grad = module.alpha_p.grad, None
        xielu(x, given).sum().backward()
        assert torch.equal(module.alpha_p.grad, wanted)
