"""``PrescaledLinear``: the product of the multiplied input, in every form of weight; alone, split, and in a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoint.models import tiny_llama
from families.schemes import quantized_layer
from torch import Tensor, nn
from torch.nn import functional as F

import qgemm
from qgemm.nn import PrescaledLinear, WeightOnlyLinear
from qgemm.nn.quant_layer import frozen
from qgemm.nn.shard import Shard
from qgemm.scheme import resolve_scheme

SCHEMES = ["int4", "int4-32-asymmetric-ordered", "int4-32-float-zeros", "int8-weight", "mxfp4", "nvfp4", "nf4"]


def factors(K: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(K) + 0.25).to(dtype)


def make(scheme: str, dtype: torch.dtype = torch.float32, K: int = 96, N: int = 40) -> tuple[PrescaledLinear, Any]:
    """A layer, and that without factors."""
    linear = nn.Linear(K, N).to(dtype)
    plain, layer = (quantized_layer(linear, name) for name in (scheme, f"{scheme}-prescaled"))
    assert isinstance(layer, PrescaledLinear)
    assert type(plain) is WeightOnlyLinear
    layer.input_prescale = frozen(factors(K, dtype))
    return layer, plain


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_product_of_the_multiplied_input(scheme: str, dtype: torch.dtype) -> None:
    layer, plain = make(scheme, dtype)
    x = torch.randn(5, 96, dtype=dtype, requires_grad=True)
    out = layer(x)
    assert torch.equal(out, plain(x * layer.input_prescale))
    exact = F.linear((x * layer.input_prescale).double(), plain.dequantize(torch.float64).weight, layer.bias.double())
    assert (out - exact).norm() <= 2 * (exact.to(dtype) - exact).norm() + 1e-6 * exact.norm()
    folded = layer.dequantize(torch.float64)
    assert torch.equal(folded.weight, plain.dequantize(torch.float64).weight * layer.input_prescale.double())
    (of_x,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(of_x, folded.weight.sum(0).to(dtype).expand(5, -1), rtol=0.02, atol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_parts_of_the_columns_take_their_factors() -> None:
    layer, _ = make("int4-32", K=128)
    x, bias = torch.randn(3, 128), layer.bias
    wanted = layer(x) - bias
    parts = []
    for rank in range(2):
        part, _ = make("int4-32", K=128)
        part.load_state_dict(layer.state_dict())
        part.cut(Shard("row", None, rank, 2))
        assert torch.equal(part.input_prescale, layer.input_prescale[64 * rank :][:64])
        parts.append(part.compute(x[:, 64 * rank :][:, :64]) - (0 if part.bias is None else bias))
    torch.testing.assert_close(parts[0] + parts[1], wanted)


def test_names_of_schemes() -> None:
    for name in ("int8-prescaled", "int4-int8-prescaled", "int4-prescaled-prescaled", "mxfp4+nf4-prescaled"):
        with pytest.raises(ValueError, match="scheme is"):
            resolve_scheme(name)
    scheme = resolve_scheme("int4-32-asymmetric-ordered-prescaled")
    assert type(scheme).from_dict(scheme.to_dict()) == scheme


def test_factors_that_are_not_finite_are_refused() -> None:
    layer, _ = make("int4")
    state = {**layer.state_dict(), "input_prescale": torch.full((96,), torch.nan)}
    with pytest.raises(RuntimeError, match="input_prescale holds NaN or Inf"):
        layer.load_state_dict(state)
    layer.load_state_dict({**layer.state_dict(), "input_prescale": factors(96, torch.float16)})
    assert layer.to(torch.bfloat16).input_prescale.dtype == torch.float16


@torch.no_grad()
def test_a_model_with_such_layers_is_fused_saved_and_converted(tmp_path: Any) -> None:
    schemes = {"*.o_proj": "int4-32-prescaled", "*.down_proj": "int4-32-prescaled", "*": "int4-32"}
    model: Any = qgemm.quantize_model(tiny_llama().eval(), schemes)
    for module in model.modules():
        if isinstance(module, PrescaledLinear):
            module.input_prescale = frozen(factors(module.in_features, torch.bfloat16))
    ids = torch.arange(9)[None]
    wanted = model(ids).logits
    qgemm.save_quantized(model, tmp_path / "own")
    assert torch.equal(qgemm.load_quantized(tmp_path / "own")(ids).logits, wanted)
    model.save_pretrained(tmp_path / "transformers")
    assert torch.equal(type(model).from_pretrained(tmp_path / "transformers")(ids).logits, wanted)
    folded: Any = qgemm.load_quantized(tmp_path / "own", scheme="int8-weight")
    assert (folded(ids).logits - wanted).norm() < 0.02 * wanted.norm()
    torch.testing.assert_close(qgemm.fuse(model)(ids).logits, wanted)
    qgemm.unfuse(model)
    for other in ("compressed-tensors", "gptq"):
        with pytest.raises(ValueError, match=r"(o|down)_proj.*'int4-32-prescaled'"):
            qgemm.save_quantized(model, tmp_path / other, format=other)
    torch.testing.assert_close(model.dequantize()(ids).logits, wanted, rtol=1e-3, atol=1e-4)
