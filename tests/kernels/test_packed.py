"""``packed_linear``: the product with what packed values stand for."""

import pytest
import torch
from numerics.test_packing import DTYPES, stored

from qgemm.kernels.packed.launcher import packed_linear
from qgemm.numerics.packing import spread


@DTYPES
@pytest.mark.parametrize("shape", [(3, 70), (70,), (2, 3, 70), (0, 70)])
def test_packed_linear(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    values, packed, scale = stored(40, 70, 32, device)
    x, bias = torch.randn(shape, device=device).to(dtype), torch.randn(40, device=device)
    out = packed_linear(x, packed, scale, 70, 32, bias)
    assert out.dtype == dtype
    assert out.shape == (*shape[:-1], 40)
    weight = values.double() * spread(scale, 32, 70).double()
    exact = x.double() @ weight.t() + bias.double()
    size = x.double().abs() @ weight.abs().t() + bias.abs()
    # TF32 rounds operands to 10 bits.
    eps = 2.0**-10 if x.is_cuda and dtype == torch.float32 else torch.finfo(dtype).eps
    assert ((out.double() - exact).abs() <= 2 * eps * size).all()


def test_autocast_keeps_the_dtype_of_x(device: torch.device) -> None:
    _, packed, scale = stored(40, 70, 32, device)
    x = torch.randn(3, 70, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = packed_linear(x, packed, scale, 70, 32, None)
    assert torch.equal(out, packed_linear(x, packed, scale, 70, 32, None))


def test_what_packed_linear_refuses(device: torch.device) -> None:
    _, packed, scale = stored(40, 70, 32, device)
    x, bias = torch.randn(3, 70, device=device), torch.zeros(40, device=device)
    good = {"x": x, "weight": packed, "scale": scale, "in_features": 70, "group_size": 32, "bias": bias}
    for changes, message in (
        ({"x": x.double()}, "x is torch.float64; a quantized layer accepts"),
        ({"x": x[:, :69]}, "x has 69 columns but the layer's in_features is 70"),
        ({"x": x[0, 0]}, "x has no columns"),
        ({"weight": packed.long()}, r"weight is torch.int64 \[40, 9\]; it must be torch.int32 \[40, 9\]"),
        ({"weight": packed[:, 1:]}, r"weight is torch.int32 \[40, 8\]"),
        ({"scale": scale[:, 1:]}, r"scale is torch.float32 \[40, 2\]; it must be torch.float32 \[40, 3\]"),
        ({"scale": scale.half()}, "scale is torch.float16"),
        ({"group_size": 0}, "group_size is 0"),
        ({"bias": bias[1:]}, r"bias is \[39\]"),
        ({"scale": scale.to("meta")}, "scale is on meta"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            packed_linear(**{**good, **changes})
