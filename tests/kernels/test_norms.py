"""``Norm``: the numbers of the models' own modules, bit for bit, and what means nothing."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.kernels.norms import NORMS, Norm

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])


def normalized(x: Tensor, eps: float) -> Tensor:
    """In float32, as all of those modules begin."""
    h = x.to(torch.float32)
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)


def cohere(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.to(torch.float32)
    mean = h.mean(-1, keepdim=True)
    variance = (h - mean).pow(2).mean(-1, keepdim=True)
    return (weight.to(torch.float32) * ((h - mean) * torch.rsqrt(variance + eps))).to(x.dtype)


# As transformers' modules have them.
MODULES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "rms": lambda x, weight, eps: weight * normalized(x, eps).to(x.dtype),  # LlamaRMSNorm
    "rms_once": lambda x, weight, eps: (weight * normalized(x, eps)).to(x.dtype),  # Olmo2RMSNorm, GptOssRMSNorm
    "rms_plus_one": lambda x, weight, eps: (normalized(x, eps) * (1.0 + weight.float())).type_as(x),  # GemmaRMSNorm
    "layer_plus_one": lambda x, weight, eps: F.layer_norm(x, x.shape[-1:], weight + 1.0, None, eps),  # Nemotron
    "layer": lambda x, weight, eps: F.layer_norm(x, x.shape[-1:], weight, None, eps),
}


@DTYPES
@pytest.mark.parametrize("kind", NORMS)
def test_the_bits_of_the_models_modules(kind: str, dtype: torch.dtype) -> None:
    x, weight = (3 * torch.randn(64, 200)).to(dtype), torch.randn(200).to(dtype)
    out = Norm(kind, 1e-5)(x, weight)
    assert out.dtype == dtype
    assert torch.equal(out, MODULES[kind](x, weight, 1e-5))


def test_the_roundings_differ() -> None:
    # Or the test above would show nothing.
    x, weight = torch.randn(64, 200).bfloat16(), torch.randn(200).bfloat16()
    twice, once = Norm("rms")(x, weight), Norm("rms_once")(x, weight)
    assert 0.1 < (twice != once).float().mean() < 0.5


@DTYPES
def test_coheres_norm_is_a_layer_norm_without_a_bias(dtype: torch.dtype) -> None:
    x, weight = torch.randn(64, 200).to(dtype) + 2, torch.randn(200).to(dtype)
    out, theirs = Norm("layer", 1e-5)(x, weight), cohere(x, weight, 1e-5)
    assert (out != theirs).float().mean() < 0.01 or dtype == torch.float32
    torch.testing.assert_close(out, theirs, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_a_bias_and_a_mean_that_is_large() -> None:
    x, weight, bias = torch.randn(5, 40) + 100, torch.randn(40), torch.randn(40)
    exact = F.layer_norm(x.double(), (40,), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(Norm("layer", 1e-5)(x, weight, bias).double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 0)])
def test_empty(kind: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    assert Norm(kind)(x, torch.ones(shape[-1])).shape == shape


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "batch"}, "norm is 'batch'; it must be one of .*'layer', .*'rms'"),
        ({"eps": -1e-6}, "eps is -1e-06"),
        ({"eps": math.nan}, "eps is nan"),
        ({"eps": math.inf}, "eps is inf"),
    ],
)
def test_values_that_mean_nothing(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Norm(**arguments)  # type: ignore[arg-type]
