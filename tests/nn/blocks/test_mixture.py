"""Mixtures of experts in fused layers: their operators, and what sees or replaces their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families.mixtures import MIXTURES

from qgemm import fuse, quantize_model
from qgemm.nn.blocks.binding import fused_of
from qgemm.nn.blocks.mixture import FusedMixture
from tests.operators import Operators


def fused(family: str) -> tuple[Any, Any]:
    """A model of ``family``, and its last layer."""
    model = quantize_model(MIXTURES[family]().model)
    fuse(model)
    return model, model.model.layers[-1]


def operators(call: Any, *arguments: Any, **options: Any) -> list[str]:
    with torch.no_grad(), Operators() as found:
        call(*arguments, **options)
    return [name.partition(".")[2] for name in found.names]


SHARED = ["quant_linear", "activation_quantize", "multiply", "mm", "sigmoid", "mul"]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3_moe", ["mm", "route", "quant_experts"]),
        ("mixtral", ["mm", "route", "quant_experts"]),
        ("olmoe", ["mm", "route", "quant_experts"]),
        ("gpt_oss", ["addmm", "route", "quant_experts"]),
        ("qwen2_moe", ["mm", "route", *SHARED, "quant_experts", "add_norm"]),
        ("deepseek_v3", ["mm", "route", *SHARED[:3], "quant_experts", "add_norm"]),
        ("minimax_m2", ["mm", "route", "quant_experts"]),
        ("granitemoe", ["mm", "route", "quant_experts"]),
        ("phimoe", ["mm", "route", "quant_experts"]),
        ("lfm2_moe", ["mm", "route", "quant_experts"]),
        ("hunyuan_v1_moe", ["mm", "route", *SHARED[:3], "quant_experts", "add_norm"]),
        ("jamba", ["mm", "route", "quant_experts"]),
        ("ernie4_5_moe", ["mm", "route", *SHARED[:3], "quant_experts", "add_norm"]),
        ("afmoe_sparse", ["mm", "route", *SHARED[:3], "quant_experts", "add_norm"]),
        ("hy_v3", ["mm", "route", *SHARED[:3], "quant_experts", "add_norm"]),
        ("llama4", ["mm", "route", *SHARED[:3], "mul", "new_ones", "quant_experts", "add_norm"]),
    ],
)
def test_a_mixture_is_three_operators(family: str, expected: list[str]) -> None:
    model, layer = fused(family)
    mixture: Any = fused_of(layer).steps[1].branch
    assert isinstance(mixture, FusedMixture)
    x, residual = torch.randn(2, 1, 2, model.config.hidden_size)
    assert operators(mixture, x, (), residual, x.dtype, {}) == expected
    with torch.no_grad():
        out = mixture.module(x)
        out = residual + (out[0] if isinstance(out, tuple) else out)
        assert torch.equal(mixture(x, (), residual, x.dtype, {}), out)


@torch.no_grad()
def test_experts_whose_inputs_are_multiplied_may_be_several_of_a_token() -> None:
    model: Any = quantize_model(MIXTURES["llama4"]().model)
    for layer in model.model.layers:
        layer.feed_forward.router.top_k = 2
    fuse(model)
    mixture: Any = fused_of(model.model.layers[-1]).steps[1].branch
    assert isinstance(mixture, FusedMixture)
    x, residual = torch.randn(2, 1, 2, model.config.hidden_size)
    found = mixture(x, (), residual, x.dtype, {})
    torch.testing.assert_close(found, residual + mixture.module(x)[0].view(x.shape), rtol=1e-5, atol=1e-6)


def test_the_router_reads_floats_that_one_operator_normalizes() -> None:
    model, _ = fused("qwen3_moe")
    names = operators(model, torch.arange(4)[None])
    assert names.count("add_norm") == len(model.model.layers) + 1  # and the last
    assert "rsqrt" not in names


def test_who_asks_for_logits_of_routers_gets_them() -> None:
    model, _ = fused("mixtral")
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        plain = model(tokens).logits
        asked = model(tokens, output_router_logits=True)
        assert [logits.shape for logits in asked.router_logits] == [(5, model.config.num_local_experts)] * 2
        assert torch.equal(asked.logits, plain)
        assert torch.equal(model(tokens).logits, plain)


def test_a_hook_on_experts_sees_what_it_would() -> None:
    model, layer = fused("qwen3_moe")
    tokens, seen = torch.arange(5)[None], []
    with torch.no_grad():
        plain = model(tokens).logits
        handle = layer.mlp.experts.register_forward_hook(lambda module, args, out: seen.append(out))
        assert torch.equal(model(tokens).logits, plain)
        (out,) = seen
        handle.remove()
        handle = layer.mlp.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
        assert not torch.equal(model(tokens).logits, plain)
        handle.remove()
        assert out.abs().max() > 0
        assert torch.equal(model(tokens).logits, plain)


def test_a_replaced_router_is_called() -> None:
    class First(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x, x.new_ones(len(x), 1), x.new_zeros(len(x), 1, dtype=torch.int64)

    model, layer = fused("qwen3_moe")
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        plain = model(tokens).logits
        layer.mlp.gate = First()
        assert not torch.equal(model(tokens).logits, plain)
