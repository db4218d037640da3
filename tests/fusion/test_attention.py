"""Fused attention: what its function is told, and what becomes of a cache, whose name depends on transformers."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCABULARY, Example
from families.example import language_model
from families.mixtures import MIXTURES
from torch import nn

from fusion.structures import STRUCTURES
from qgemm import fuse, fusion_report, quantize_model
from qgemm.fusion.attention import _cache_name
from qgemm.kernels.gating import dispatch, launcher
from qgemm.nn.blocks.binding import fused_of

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}


def quantized(family: str) -> Example:
    example = {**FAMILIES, **MIXTURES, **STRUCTURES}[family]()
    quantize_model(example.model)
    return example


def test_what_attention_is_told() -> None:
    expected = {"llama": (0.25, 1.0, {}), "opt": (1.0, 0.25, {}), "mistral": (0.25, 1.0, {"sliding_window": 4})}
    for family, values in expected.items():
        model = fuse(quantized(family).model)
        fused = next(found for found in map(fused_of, model.modules()) if found)
        attention: Any = fused.steps[0].branch
        assert (attention.scaling, attention.query_scaling, attention.told) == values, family


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_queries_are_scaled_where_the_model_does_it(dtype: torch.dtype) -> None:
    """Llama 4 scales scores, and its code has the number 1.0 too; with 24 columns the scale is no power of two."""
    sizes = {"hidden_size": 96, "ffn_dim": 128, "word_embed_proj_dim": 96, "max_position_embeddings": 32}
    for build in (
        language_model("Llama4ForCausalLM", **{**SMALL, "head_dim": 24, "no_rope_layers": [1, 0]}),
        language_model("OPTForCausalLM", **{**SMALL, **sizes}),
    ):
        example = build()
        quantize_model(example.model.to(dtype))
        expected = example.output()
        records = fusion_report(fuse(example.model)).fused
        assert {part for record in records for part in record.parts} >= {"attention"}
        assert [record.error for record in records] == [0.0] * len(records)
        assert torch.equal(example.output(), expected)


@pytest.mark.parametrize(
    ("of_layer", "of_attention", "name"),
    [
        (["past_key_values"], ["past_key_values"], "past_key_values"),  # transformers before 5.24
        (["cache"], ["cache"], "cache"),
        (["layer_past"], ["layer_past"], "layer_past"),
        ([], ["past_key_values"], "past_key_values"),  # of a layer that hands all on
        ([], ["cache"], "cache"),
    ],
)
def test_what_a_layer_calls_its_cache(of_layer: list[str], of_attention: list[str], name: str) -> None:
    attention = type("Attention", (nn.Module,), {})
    exec(f"def forward(self, x, {', '.join(of_attention)}, **others): pass", found := {})
    attention.forward = found["forward"]  # type: ignore[attr-defined]
    assert _cache_name(attention(), dict.fromkeys(of_layer)) == name


@torch.no_grad()
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_caches_since_transformers_5_24_may_change_what_attention_is_told(name: str) -> None:
    example = quantized("llama")
    fused = next(found for found in map(fused_of, fuse(example.model).modules()) if found)
    told: list[dict[str, Any]] = []

    def attend(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **others: Any) -> tuple[Any, None]:
        told.append(others)
        return q.transpose(1, 2), None

    class Cache:
        def update(self, k: Any, v: Any, layer: int, kwargs: dict[str, Any] | None = None) -> tuple[Any, Any]:
            if kwargs is not None:
                kwargs["place"] = layer
            return k, v

    functions = SimpleNamespace(get_interface=lambda *_: attend)
    attention: Any = replace(fused.steps[0].branch, cache_name=name, functions=functions)  # type: ignore[type-var]
    x = torch.randn(1, 3, example.model.config.hidden_size)
    angles = example.model.model.rotary_emb(x, torch.arange(3)[None])
    operands = tuple(product.operands() for product in attention.products)
    attention(x, operands, None, x.dtype, {name: Cache(), "position_embeddings": angles, "attention_mask": None})
    assert [others.get("place") for others in told] == [0 if name == "cache" else None]
    assert name not in told[0]


@torch.no_grad()
def test_what_is_used_no_more_is_freed() -> None:
    """A long prompt's merged queries, keys and values, and then its queries, are as large as its hidden states."""
    example = quantized("llama")
    fused = next(found for found in map(fused_of, fuse(example.model).modules()) if found)
    made: list[weakref.ref[torch.Tensor]] = []
    left: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        left.append(sum(ref() is not None for ref in made))
        made.append(weakref.ref(tensor))
        return tensor

    def attend(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **others: Any) -> tuple[Any, None]:
        return note(q).transpose(1, 2).clone(), None

    attention: Any = replace(fused.steps[0].branch, functions=SimpleNamespace(get_interface=lambda *_: attend))  # type: ignore[type-var]
    into, out_of = (product.operands() for product in attention.products)
    watched = [
        SimpleNamespace(product=lambda *args, of=of: note(of.product(*args)))  # when a product is there
        for of in (into, out_of)
    ]
    x = torch.randn(1, 3, example.model.config.hidden_size)
    angles = example.model.model.rotary_emb(x, torch.arange(3)[None])
    attention(x, watched, None, x.dtype, {"position_embeddings": angles, "attention_mask": None})
    assert left == [0, 0, 0]


@pytest.mark.parametrize("family", ["afmoe", "laguna", "qwen3_5", "gemma4", "qwen2_moe"])
def test_gates_by_the_kernel(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of attention's output, of a layer's input, and of a shared expert."""
    example = quantized(family)
    fuse(example.model)
    expected, calls = example.output(), []
    gate_heads = launcher.gate_heads
    monkeypatch.setattr(launcher, "gate_heads", lambda *given: calls.append(1) or gate_heads(*given))  # type: ignore
    monkeypatch.setattr(dispatch, "_fits", lambda *given: True)
    torch.testing.assert_close(example.output(), expected, rtol=1e-3, atol=1e-3)
    assert calls
