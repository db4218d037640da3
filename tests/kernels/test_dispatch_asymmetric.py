"""Products with a zero point, against float64."""

import pytest
import torch

from qgemm.kernels.dispatch import quant_linear_asymmetric
from qgemm.kernels.reference import quantize_rows_reference
from qgemm.numerics.zero_points import correction

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])


@DTYPES
@pytest.mark.parametrize("zero", [-128, -30, 0, 127])
@pytest.mark.parametrize("shape", [(5, 300), (300,), (2, 3, 300), (0, 300)])
def test_a_product(shape: tuple[int, ...], zero: int, dtype: torch.dtype, device: torch.device) -> None:
    weight = torch.randint(-127, 128, (40, 300), dtype=torch.int8, device=device)
    weight[3] = 127  # a row whose correction is as large as can be
    w_scale, bias = torch.rand(40, device=device) / 127, torch.randn(40, device=device)
    scale, zero_point = torch.tensor(0.02, device=device), torch.tensor(zero, dtype=torch.int8, device=device)
    x = (torch.randn(shape, device=device) + 1).to(dtype)
    taken_off = correction(weight, w_scale, scale, zero_point)
    folded = (bias.double() - taken_off).float()
    out = quant_linear_asymmetric(x, weight, w_scale, folded, scale, zero_point)
    assert out.dtype == dtype
    assert out.shape == (*shape[:-1], 40)
    q, _ = quantize_rows_reference(x, scale, zero_point)
    values = (q.double() - zero) * scale.double()
    exact = values @ (weight.double() * w_scale.double()[:, None]).t() + bias.double()
    # The sums before the correction is off are this large.
    size = taken_off.abs() + exact.abs() + bias.abs()
    assert ((out.double() - exact).abs() <= 4 * 2.0**-24 * size + torch.finfo(dtype).eps * exact.abs()).all()


def test_zeros_give_the_bias(device: torch.device) -> None:
    weight = torch.randint(-127, 128, (40, 300), dtype=torch.int8, device=device)
    w_scale, scale = torch.rand(40, device=device) / 127, torch.tensor(0.02, device=device)
    zero_point = torch.tensor(-100, dtype=torch.int8, device=device)
    folded = -correction(weight, w_scale, scale, zero_point).float()
    out = quant_linear_asymmetric(torch.zeros(2, 300, device=device), weight, w_scale, folded, scale, zero_point)
    assert (out.abs() <= 3 * 2.0**-24 * folded.abs()).all()


def test_rows_that_are_not_finite(device: torch.device) -> None:
    weight = torch.randint(-127, 128, (40, 300), dtype=torch.int8, device=device)
    x = torch.randn(4, 300, device=device)
    x[1, 7], x[2, 8], x[3, 299] = torch.nan, torch.inf, -torch.inf
    one = torch.ones(40, device=device)
    zero_point = torch.tensor(5, dtype=torch.int8, device=device)
    out = quant_linear_asymmetric(x, weight, one, one, torch.tensor(0.02, device=device), zero_point)
    assert out[0].isfinite().all()
    assert out[1:].isnan().all()
