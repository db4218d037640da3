"""What layers do to long inputs or large values, which the few tokens that they are compared on don't show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from families import VOCABULARY, Example
from families.example import LATENT, language_model, tokens

from fusion.structures import STRUCTURES
from qgemm import fuse, fusion_report, quantize_model
from tests.fusion.test_fuse import BOTH, fused_parts, quantized

SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.1, "pad_token_id": 0},
    **{"bos_token_id": None, "eos_token_id": None},
}
ROPE = {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8}
ROPE_OF_YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Ministral3ForCausalLM", {"head_dim": 24, "rope_parameters": {**ROPE, "rope_type": "default"}}),
        ("Mistral4ForCausalLM", {**LATENT, "first_k_dense_replace": 2, "rope_parameters": ROPE_OF_YARN}),
    ],
)
def test_queries_grow_with_their_position(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    example = language_model(name, **{**SIZES, **settings})()
    example.inputs = {"input_ids": tokens(24)}
    quantize_model(example.model.to(dtype))
    expected = example.output()
    fuse(example.model)
    assert fused_parts(example.model) == (BOTH, BOTH)
    assert torch.equal(example.output(), expected)


LIMITED: dict[str, tuple[dict[str, Any], tuple[tuple[str, ...], ...]]] = {
    "OlmoForCausalLM": ({"clip_qkv": 8.0}, (("mlp",), ("mlp",))),
    "OlmoeForCausalLM": ({"clip_qkv": 8.0, "num_experts": 4, "num_experts_per_tok": 2}, (("mixture",), ("mixture",))),
}


@torch.no_grad()
@pytest.mark.parametrize("name", LIMITED)
def test_queries_keys_and_values_with_limits(name: str) -> None:
    settings, parts = LIMITED[name]
    for limit, fused in ((8.0, parts), (None, tuple(("attention", *own) for own in parts))):
        example = language_model(name, **{**SIZES, **settings, "clip_qkv": limit})()
        model: Any = example.model
        layer = model.model.layers[0]
        beyond = layer.input_layernorm(model.model.embed_tokens.weight[90])
        layer.self_attn.v_proj.weight[0] = 1.2 * beyond / beyond.norm()
        quantize_model(model)
        example.inputs = {"input_ids": torch.tensor([[5, 90, 7]])}
        expected = example.output()
        fuse(model, {"input_ids": torch.arange(15)[None]})
        assert fused_parts(model) == fused
        assert torch.equal(example.output(), expected)
