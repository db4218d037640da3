"""``RotatedLinear``: the rotation that it computes, and what it is for."""

import pytest
import torch
from numerics.test_hadamard import definition
from torch import nn

from qgemm.kernels.reference import quantize_rows_reference, scaled_mm_reference
from qgemm.nn import QuantLinear, RotatedLinear
from qgemm.nn.rotated import rotate_rows
from qgemm.numerics.formats import INT8
from qgemm.numerics.hadamard import hadamard


@pytest.mark.parametrize("K", [1, 3, 24, 96, 512, 1536])
@pytest.mark.parametrize("scheme", ["int8-hadamard", "int8-static-hadamard"])
def test_forward(K: int, scheme: str, device: torch.device) -> None:
    linear = nn.Linear(K, 40, device=device)
    layer = RotatedLinear.from_linear(linear, scheme, 4 / INT8.steps if "static" in scheme else None)
    x, H = torch.randn(5, K, device=device), definition(K).to(device)
    # Written out: both sides rotated by the matrix itself, then int8.
    q, q_scale = quantize_rows_reference((x.double() @ H).float(), layer.input_scale)
    w, w_scale = quantize_rows_reference((linear.weight.detach().double() @ H).float())
    wanted = scaled_mm_reference(q, w.t(), q_scale, w_scale, layer.bias, x.dtype)
    # A sum of H's own may round a value to the next step.
    assert (layer.weight.int() - w.int()).abs().max() <= 1
    torch.testing.assert_close(layer.weight_scale, w_scale, rtol=1e-6, atol=0)
    step = (q_scale[:, None] * w_scale * INT8.steps).max().item()
    torch.testing.assert_close(layer(x), wanted, rtol=0, atol=4 * step)


def test_odd_widths_have_nothing_to_rotate() -> None:
    linear, x = nn.Linear(33, 8), torch.randn(3, 33)
    assert torch.equal(
        RotatedLinear.from_linear(linear, "int8-hadamard")(x), QuantLinear.from_linear(linear, "int8")(x)
    )


def test_weights_are_rotated_in_float64() -> None:
    rows = torch.randn(3, 1024)
    assert torch.equal(rotate_rows(rows, torch.float64), hadamard(rows.double()))


def test_outliers_cost_less() -> None:
    linear, x = nn.Linear(512, 64), torch.randn(128, 512)
    x[:, [7, 300]] *= 100
    exact = linear(x).detach()
    errors = {}
    for scheme, kind in (("int8", QuantLinear), ("int8-hadamard", RotatedLinear)):
        errors[scheme] = float((kind.from_linear(linear, scheme)(x) - exact).norm() / exact.norm())
    assert errors["int8-hadamard"] < 0.5 * errors["int8"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rotated_row_does_not_depend_on_those_beside_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(37, 1536).to(dtype)
    whole = rotate_rows(rows)
    for pieces in (1, 5, 36):
        assert torch.equal(torch.cat([rotate_rows(part) for part in rows.split(pieces)]), whole)
    monkeypatch.setattr("qgemm.nn.rotated._PIECE", 4000)
    assert torch.equal(rotate_rows(rows), whole)
