"""Hopper's products with stored weights, compiled, against float64; they run on Hopper only."""

import pytest
import torch
from numerics.test_groups import stored

from kernels.test_weight_only import before_garbage
from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.quantized_weight import QuantizedWeight
from qgemm.kernels.weight_only import float_launcher
from qgemm.kernels.weight_only.dispatch import weight_only_linear
from qgemm.numerics.formats import FORMATS
from qgemm.numerics.groups import round_scale, spread, store_scale

K, N = 1040, 200  # K: of 16 bytes in any format, and no whole number of blocks
KINDS = {
    "int4": ("int4", 128, "bfloat16"),
    "int4 zero points": ("int4", 128, "float16"),
    "int4 groups of 32": ("int4", 32, "bfloat16"),
    "int4 groups of 384": ("int4", 384, "float32"),
    "int4 channel zero points": ("int4", K, "bfloat16"),
    "int8 channel": ("int8", K, "float32"),
    "int8 zero points": ("int8", 128, "bfloat16"),
    "fp8": ("fp8", K, "float32"),
    "mxfp8": ("fp8", 32, "e8m0"),
    "mxfp4": ("fp4", 32, "e8m0"),
    "nvfp4": ("fp4", 16, "e4m3"),
    "nf4": ("nf4", 64, "float32"),
}


def skip_elsewhere(device: torch.device) -> None:
    if device.type != "cuda" or not device_limits(device).hopper:
        pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("M", [1, 7, 16, 17, 100, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products(dtype: torch.dtype, M: int, kind: str, device: torch.device) -> None:
    skip_elsewhere(device)
    format, size, scale_dtype = KINDS[kind]
    form = FORMATS[format]
    values, weight, scale, zero = stored(N, K, size, device, form)
    unit = torch.tensor([1.0, 3.7], device=device) if scale_dtype == "e4m3" else None
    scale = round_scale(scale, scale_dtype, form, unit)
    zero_point = zero if "zero points" in kind else None
    exact = form.to_float(values).double() - (0 if zero_point is None else spread(zero, size, K))
    exact *= spread(scale, size, K).double()
    x, residual = torch.randn(M, K, device=device).to(dtype), torch.randn(M, N, device=device).to(dtype)
    bias = torch.randn(N, device=device).to(dtype)
    zero_point = None if zero_point is None else before_garbage(zero_point)
    stored_scale = before_garbage(store_scale(scale, scale_dtype, unit))
    layer = QuantizedWeight(weight, stored_scale, zero_point, unit, None, bias, K, format, size)
    out = weight_only_linear(x, layer, residual)
    wanted = x.double() @ exact.t() + bias.double() + residual.double()
    floats = torch.nn.functional.linear(x, exact.to(dtype), bias) + residual
    assert (out.double() - wanted).abs().max() <= 2 * (floats.double() - wanted).abs().max()
    # The same bits again: programs that share K are added in order.
    assert torch.equal(out, weight_only_linear(x, layer, residual))


def test_up_to_16_rows_are_one_launch(device: torch.device) -> None:
    skip_elsewhere(device)
    weight = torch.zeros(N, 640, dtype=torch.uint8, device=device)
    scale = torch.ones(N, 9, device=device)
    for M in (1, 16):
        x = torch.zeros(M, K, dtype=torch.bfloat16, device=device)
        plan = float_launcher._make_plan(x, weight, scale, None, None, "int4", 128, True)
        assert plan.adds is None
        assert plan.made is None
