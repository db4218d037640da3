"""``OutlierLinear``: the decomposition, its columns, and what it is for."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgemm.kernels.reference import quantize_rows_reference, scaled_mm_reference
from qgemm.nn import OutlierLinear, QuantLinear
from qgemm.scheme import resolve_scheme

COLUMNS = torch.tensor([0, 3, 4, 8, 20, 21, 22, 23, 40, 41, 50, 60, 61, 66, 67, 69])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", ["int8-outliers-16", "int8-static-outliers-16"])
@pytest.mark.parametrize("shape", [(5, 70), (70,), (2, 3, 70)])
def test_forward(shape: tuple[int, ...], scheme: str, dtype: torch.dtype, device: torch.device) -> None:
    linear = nn.Linear(70, 40, device=device, dtype=dtype)
    columns = COLUMNS.to(device)
    scale = 0.03 if "static" in scheme else None
    layer = OutlierLinear.from_linear(linear, scheme, scale, outlier_columns=columns)
    x = torch.randn(shape, device=device).to(dtype)
    x[..., columns] *= 50
    # Written out: what is rounded, and what isn't.
    rest, weight = x.reshape(-1, 70).clone(), linear.weight.detach().clone()
    rest[:, columns], weight[:, columns] = 0, 0
    q, q_scale = quantize_rows_reference(rest, layer.input_scale)
    w, w_scale = quantize_rows_reference(weight)
    assert torch.equal(layer.weight, w)
    assert torch.equal(layer.weight_scale, w_scale)
    assert torch.equal(layer.outlier_weight, linear.weight[:, columns])
    small = scaled_mm_reference(q, w.t(), q_scale, w_scale, layer.bias, torch.float32).double()
    large = x.reshape(-1, 70)[:, columns].double() @ linear.weight[:, columns].double().t()
    exact = (small + large).reshape(*shape[:-1], 40)
    out = layer(x)
    assert out.dtype == dtype
    eps = 2.0**-10 if x.is_cuda and dtype == torch.float32 else torch.finfo(dtype).eps
    size = (small.abs() + large.abs()).reshape(exact.shape) + x.abs().amax()
    assert ((out.double() - exact).abs() <= 2 * eps * size).all()


def test_what_it_is_for(device: torch.device) -> None:
    linear, x = nn.Linear(512, 64, device=device), torch.randn(128, 512, device=device)
    columns = torch.arange(5, 21, device=device)
    x[:, columns] *= 100
    exact = linear(x).detach()
    plain = QuantLinear.from_linear(linear)(x)
    kept = OutlierLinear.from_linear(linear, "int8-outliers-16", outlier_columns=columns)(x)
    assert (kept - exact).norm() < 0.05 * (plain - exact).norm()


def test_a_decided_weight_has_zeros_in_the_columns() -> None:
    linear = nn.Linear(70, 40)
    values, scale = torch.full((40, 70), 9, dtype=torch.int8), torch.ones(40)
    layer = OutlierLinear.from_linear(linear, "int8-outliers-16", weight=(values, scale), outlier_columns=COLUMNS)
    assert not layer.weight[:, COLUMNS].any()
    assert layer.weight.sum() == 9 * 40 * (70 - 16)
    assert torch.equal(layer.outlier_weight, linear.weight[:, COLUMNS])


@pytest.mark.parametrize("column", [3, 5])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite(column: int, value: float) -> None:
    # Inside of the columns and outside.
    layer = OutlierLinear.from_linear(nn.Linear(70, 40), "int8-outliers-16", outlier_columns=COLUMNS)
    x = torch.randn(2, 70)
    clean = layer(x)
    x[1, column] = value
    out = layer(x)
    assert torch.equal(out[0], clean[0])
    assert not out[1].isfinite().any()


@pytest.mark.parametrize("column", [3, 5])
def test_a_weight_that_is_not_finite(column: int) -> None:
    linear = nn.Linear(70, 40)
    with torch.no_grad():
        linear.weight[7, column] = torch.nan
    with pytest.raises(ValueError, match="weight holds NaN or Inf"):
        OutlierLinear.from_linear(linear, "int8-outliers-16", outlier_columns=COLUMNS)


BAD: list[tuple[Any, str]] = [
    (None, "scheme 'int8-outliers-16' needs outlier_columns, which are found in calibration"),
    (COLUMNS[1:], r"outlier_columns is torch.int64 \[15\]; it must be torch.int64 \[16\]"),
    (COLUMNS.int(), r"outlier_columns is torch.int32 \[16\]"),
    (COLUMNS.flip(0), "outlier_columns must be ascending columns of a weight that has 70"),
    (COLUMNS.clamp(min=3), "outlier_columns must be ascending columns"),
    (COLUMNS - 1, "outlier_columns must be ascending columns"),
    (COLUMNS + 1, "outlier_columns must be ascending columns"),
]


@pytest.mark.parametrize(("columns", "message"), BAD)
def test_columns_that_are_refused(columns: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OutlierLinear.from_linear(nn.Linear(70, 40), "int8-outliers-16", outlier_columns=columns)


@pytest.mark.parametrize("columns", [columns for columns, message in BAD if "ascending" in message])
@pytest.mark.parametrize("assign", [False, True])
def test_columns_of_a_state_dict_are_checked(columns: Tensor, assign: bool) -> None:
    # A column that isn't there would be read from elsewhere in memory, on a GPU.
    layer = OutlierLinear.from_linear(nn.Linear(70, 40), "int8-outliers-16", outlier_columns=COLUMNS)
    with pytest.raises(RuntimeError, match="outlier_columns must be ascending columns of a weight that has 70"):
        layer.load_state_dict({**layer.state_dict(), "outlier_columns": columns}, assign=assign)
    assert torch.equal(layer.outlier_columns, COLUMNS)


def test_other_schemes_keep_no_columns() -> None:
    with pytest.raises(ValueError, match="scheme 'int8' keeps no columns in float, so it takes no outlier_columns"):
        QuantLinear.from_linear(nn.Linear(70, 40), outlier_columns=COLUMNS)


def test_the_names_of_schemes() -> None:
    scheme = resolve_scheme("int8-static-outliers-48")
    assert scheme.activation.outlier_columns == 48
    assert scheme.is_static
    for name in ("int8-outliers-0", "int8-outliers-8", "int8-outliers-", "int4-outliers-16", "int8-outliers-016"):
        with pytest.raises(ValueError, match=f"scheme is '{name}'; it must be one of .*'int8-outliers-16' or"):
            resolve_scheme(name)


def test_the_kept_columns_follow_the_model_s_dtype() -> None:
    layer = OutlierLinear.from_linear(nn.Linear(70, 40), "int8-outliers-16", outlier_columns=COLUMNS)
    assert layer.bfloat16().outlier_weight.dtype == torch.bfloat16
    assert layer.outlier_columns.dtype == torch.int64
