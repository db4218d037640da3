"""What layers do to long inputs or large values, which the few tokens that they are compared on don't show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import VOCABULARY
from families.example import LATENT, language_model, tokens
from torch import nn

from qgemm import fuse, fusion_report, quantize_model, unfuse
from qgemm.nn.blocks.binding import fused_of
from tests.fusion.test_fuse import BOTH, fused_parts, quantized
from tests.operators import Operators

SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.1, "pad_token_id": 0},
    **{"bos_token_id": None, "eos_token_id": None},
}
ROPE = {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8}
ROPE_OF_YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}


MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Ministral3ForCausalLM", {"head_dim": 24, "rope_parameters": {**ROPE, "rope_type": "default"}}),
    ("Mistral4ForCausalLM", {**LATENT, "first_k_dense_replace": 2, "rope_parameters": ROPE_OF_YARN}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "settings"), MODELS)
def test_queries_grow_with_their_position(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    example = language_model(name, **{**SIZES, **settings})()
    example.inputs = {"input_ids": tokens(24)}
    quantize_model(example.model.to(dtype))
    expected = example.output()
    fuse(example.model)
    assert fused_parts(example.model) == (BOTH, BOTH)
    assert torch.equal(example.output(), expected)


@pytest.mark.parametrize("limit", [None, 1.5])
def test_another_growth_is_computed_by_the_model(limit: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.ministral3 import modeling_ministral3 as modeling

    own, name = modeling.get_llama_4_attn_scale, "get_llama_4_attn_scale"
    monkeypatch.setattr(modeling, name, lambda *given: own(*given).clamp(max=limit) if limit else own(*given))
    example = language_model(MODELS[0][0], **{**SIZES, **MODELS[0][1]})()
    example.inputs = {"input_ids": tokens(24)}
    quantize_model(example.model)
    expected = example.output()
    fuse(example.model)
    assert fused_parts(example.model) == (BOTH, BOTH)
    with Operators() as counted:
        assert torch.equal(example.output(), expected)
    assert counted.names.count("aten.log") == (0 if limit is None else 2)


def test_attention_that_calls_unknown_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qgemm.fusion.attention._SCALE_BY_POSITION", "another")
    for name, settings in MODELS:
        model = fuse(quantize_model(language_model(name, **{**SIZES, **settings})().model))
        assert fused_parts(model)[:2] == (("mlp",), ("mlp",))
        assert "calls get_llama_4_attn_scale, which is unknown" in fusion_report(model).records[0].reason


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
        assert torch.equal(example.output(), expected)
        assert fused_parts(model) == fused


@torch.no_grad()
def test_gates_with_limits() -> None:
    """DeepSeek V4's have one, and some of Step 3.7's: 0 is none."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4MLP
    from transformers.models.step3p7.modeling_step3p7 import Step3p7MLP

    config: Any = SimpleNamespace(
        hidden_size=64, intermediate_size=96, mlp_bias=False, hidden_act="silu", swiglu_limit=7.0,
        swiglu_limits_shared=[7.0, 0.0],
    )  # fmt: skip
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    for mlp, parts in ((DeepseekV4MLP(config), ()), (Step3p7MLP(config, 0), ()), (Step3p7MLP(config, 1), ("mlp",))):
        model = quantize_model(nn.Sequential(mlp).eval(), skip=())
        expected = model(20 * x)
        fuse(model, {"input": x})
        assert torch.equal(model(20 * x), expected)
        assert fused_parts(model) == (parts,)


@torch.no_grad()
def test_sums_beyond_float16() -> None:
    """An encoder's layer limits its output there, from which the next goes on."""
    example = quantized("whisper")
    model: Any = example.model.half()
    example.inputs = {name: x.half() if x.is_floating_point() else x for name, x in example.inputs.items()}
    fuse(model, example.inputs)
    layer = model.get_encoder().layers[0]
    assert fused_of(layer) is not None
    x = torch.randn(1, 5, 64).half()
    x[0, 3] = 65000
    layer.fc2.bias[7] = 65000
    found = layer(x, None)
    unfuse(model)
    assert torch.equal(found, layer(x, None))
    assert found.isfinite().all()
