"""``AsymmetricLinear``: the zero point, the bias that makes up for it, and what both are for."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgemm.kernels.reference import quantize_rows_reference
from qgemm.nn import AsymmetricLinear, QuantLinear
from qgemm.numerics.formats import INT8
from qgemm.numerics.zero_points import range_to_scale

SCHEME = "int8-static-asymmetric"


def exact_output(layer: AsymmetricLinear, x: Tensor, bias: Tensor | None) -> Tensor:
    """What the layer is to compute, in float64."""
    q, _ = quantize_rows_reference(x, layer.input_scale, layer.input_zero_point)
    values = (q.double() - layer.input_zero_point.double()) * layer.input_scale.double()
    weight = layer.stored("weight").double() * layer.weight_scale.double()[:, None]
    return values @ weight.t() + (0.0 if bias is None else bias.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("zero", [-128, -20, 127])
def test_the_error_against_float64(dtype: torch.dtype, bias: bool, zero: int, device: torch.device) -> None:
    linear = nn.Linear(1000, 40, bias=bias, device=device, dtype=dtype)
    with torch.no_grad():
        linear.weight[3] = 0.05  # whose values, of one sign, make the largest correction
    layer = AsymmetricLinear.from_linear(linear, SCHEME, (0.02, zero))
    x = (torch.randn(64, 1000, device=device) - zero / 50).to(dtype)
    exact = exact_output(layer, x, linear.bias)
    out = layer(x)
    assert out.dtype == dtype
    taken_off = layer._correction().abs()
    limit = torch.finfo(dtype).eps * exact.abs() + 4 * 2.0**-24 * (taken_off + exact.abs())
    assert ((out.double() - exact).abs() <= limit).all()
    # The bias of a model in bfloat16 would be off by 2^-9 of the correction.
    assert layer.bias.dtype == torch.float32
    assert layer.half().bias.dtype == torch.float32
    assert torch.equal(layer(x), out)


def test_the_correction_is_taken_off_in_float64() -> None:
    linear = nn.Linear(4096, 64)
    with torch.no_grad():
        linear.weight.abs_()  # of one sign: the correction is a thousand times the bias
    layer = AsymmetricLinear.from_linear(linear, SCHEME, (0.02, -100))
    sums = layer.stored("weight").double().sum(1) * layer.weight_scale.double()
    exact = linear.bias.double() + 100 * layer.input_scale.double() * sums
    # Rounded once: not the correction, and then the difference.
    assert torch.equal(layer.bias, exact.float())


def test_values_of_one_sign_are_rounded_half_as_far(device: torch.device) -> None:
    linear = nn.Linear(512, 64, device=device)
    x = torch.randn(256, 512, device=device).relu()
    exact = linear(x).detach()
    symmetric = QuantLinear.from_linear(linear, "int8-static", x.max() / INT8.steps)
    asymmetric = AsymmetricLinear.from_linear(linear, SCHEME, range_to_scale(0.0, float(x.max())))
    assert asymmetric.input_zero_point == -128
    fine = copy.deepcopy(linear)
    fine.weight = nn.Parameter(asymmetric.dequantize().weight)
    rounded = fine(x).detach()  # so that the weight's own rounding is out of it
    errors = [float((layer(x) - rounded).norm()) for layer in (symmetric, asymmetric)]
    assert errors[1] < 0.6 * errors[0]
    assert (asymmetric(x) - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_float_layer_has_its_bias_back(dtype: torch.dtype) -> None:
    linear = nn.Linear(200, 40, dtype=dtype)
    layer = AsymmetricLinear.from_linear(linear, SCHEME, (0.02, -100))
    back = layer.dequantize(dtype)
    assert (back.bias - linear.bias).abs().max() <= 2.0**-22 * layer._correction().abs().max()
    assert AsymmetricLinear.from_linear(nn.Linear(200, 40, bias=False), SCHEME, (0.02, 3)).dequantize().bias is None


def test_from_linear_on_meta() -> None:
    layer = AsymmetricLinear.from_linear(nn.Linear(200, 40, device="meta"), SCHEME, (0.02, -100))
    assert all(p.is_meta for p in layer.parameters())
    assert layer(torch.empty(3, 200, device="meta")).shape == (3, 40)


def test_zeros_are_exact() -> None:
    # A padded row must not differ from one of zeros in the float layer.
    layer = AsymmetricLinear.from_linear(nn.Linear(200, 40, bias=False), SCHEME, (0.02, -100))
    out = layer(torch.zeros(3, 200))
    assert (out.abs() <= 3 * 2.0**-24 * layer.bias.abs()).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "scheme 'int8-static-asymmetric' needs an input_scale"),
        (0.5, "input_scale is 0.5; scheme 'int8-static-asymmetric' takes a pair, of a scale and a zero point"),
        ((0.5,), "takes a pair"),
        ((0.5, 1, 2), "takes a pair"),
        ((0.0, 1), "input_scale is 0.0; it must be finite and greater than 0"),
        ((torch.nan, 1), "input_scale is nan"),
        ((0.5, 128), "the zero point in input_scale is 128; it must be a whole number, -128 to 127"),
        ((0.5, -129), "the zero point in input_scale is -129"),
        ((0.5, 0.5), "the zero point in input_scale is 0.5"),
        ((0.5, torch.nan), "the zero point in input_scale is nan"),
        ((0.5, torch.ones(2)), r"input_scale has shape \[2\]; it must be a single number"),
    ],
)
def test_what_input_scale_may_not_be(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AsymmetricLinear.from_linear(nn.Linear(4, 4), SCHEME, given)
    if isinstance(given, tuple):
        with pytest.raises(ValueError, match=r"scheme 'int8-static' takes a single number"):
            QuantLinear.from_linear(nn.Linear(4, 4), "int8-static", given)


def test_tensors_do_for_input_scale() -> None:
    pair = (torch.tensor([0.5]), torch.tensor(3))
    layer = AsymmetricLinear.from_linear(nn.Linear(4, 4), SCHEME, pair)
    assert (layer.input_scale, layer.input_zero_point) == (0.5, 3)
    assert layer.input_zero_point.dtype == torch.int8
