"""The activation between an expert's two products: against PyTorch's and the formulas in models that use them."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.kernels import GPT_OSS, GatedActivation


def halves() -> tuple[Tensor, Tensor]:
    return 4 * torch.randn(5, 16), 4 * torch.randn(5, 16)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", F.silu),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("relu", F.relu),
        ("relu2", lambda x: F.relu(x) ** 2),
    ],
)
def test_by_name(name: str, function: torch.nn.Module) -> None:
    gate, up = halves()
    g = torch.cat([gate, up], dim=1)
    torch.testing.assert_close(GatedActivation(name)(g), function(gate) * up)
    torch.testing.assert_close(GatedActivation(name, gated=False)(g), function(g))


def test_gpt_oss() -> None:
    gate, up = (10 * half for half in halves())
    clamped, limited = gate.clamp(max=7), up.clamp(-7, 7)
    expected = (limited + 1) * (clamped * torch.sigmoid(clamped * 1.702))
    torch.testing.assert_close(GPT_OSS(torch.cat([gate, up], dim=1)), expected)


def test_a_limit_without_the_rest() -> None:
    gate, up = halves()
    expected = F.silu(gate.clamp(max=2.5)) * up.clamp(-2.5, 2.5)
    torch.testing.assert_close(GatedActivation(limit=2.5)(torch.cat([gate, up], dim=1)), expected)


def test_it_is_computed_in_float32() -> None:
    g = torch.cat(halves(), dim=1).bfloat16()
    out = GatedActivation()(g)
    assert out.dtype == torch.float32
    assert torch.equal(out, GatedActivation()(g.float()))


@pytest.mark.parametrize("position", [0, 16])
def test_nan_stays_nan(position: int) -> None:
    g = torch.cat(halves(), dim=1)
    g[2, position] = math.nan
    for activation in (GPT_OSS, GatedActivation("relu", limit=1.0)):
        assert activation(g).isnan().sum() == 1


def test_columns() -> None:
    assert GatedActivation().columns(12) == 24
    assert GatedActivation("relu2", gated=False).columns(12) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "swish"}, "name is 'swish'.*'silu'"),
        ({"limit": 0.0}, "limit is 0.0"),
        ({"limit": math.inf}, "limit is inf"),
        ({"limit": math.nan}, "limit is nan"),
        ({"name": "gelu", "alpha": 1.7}, "alpha is 1.7 for 'gelu'"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"gated": False, "up_offset": 1.0}, "up_offset is 1.0"),
        ({"up_offset": math.inf}, "up_offset is inf"),
    ],
)
def test_values_that_mean_nothing(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatedActivation(**arguments)  # type: ignore[arg-type]
