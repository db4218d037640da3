"""Tiny models whose layers are built in ways that ``families`` has no model of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from families.example import LATENT, VOCABULARY, Example, language_model

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GPT = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4, "eos_token_id": None}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA4_KEYS = {
    **_SLIDING,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
}


def _text(name: str, **settings: Any) -> Callable[[], Example]:
    return language_model(name, **{**_TEXT, **settings})


STRUCTURES: dict[str, Callable[[], Example]] = {
    "gemma": _text("GemmaForCausalLM", head_dim=16),
    "granite": _text("GraniteForCausalLM", residual_multiplier=0.22, attention_multiplier=0.2),
    # Latent attention, and branches with a scale.
    "minicpm3": _text(
        "MiniCPM3ForCausalLM", **{"num_key_value_heads": 4, "head_dim": 8, "num_hidden_layers": 2}, **LATENT
    ),
    # Positions as complex numbers.
    "deepseek_v2": _text(
        "DeepseekV2ForCausalLM",
        **{"num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 2},
        **{**LATENT, "q_lora_rank": None},
    ),
    # Latent attention without positions, behind linear attention.
    "kimi_linear": _text(
        "KimiLinearForCausalLM",
        **{"num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
        **{"mlp_layer_types": ["dense", "dense"], "linear_head_dim": 16, "linear_num_heads": 4},
        **{**LATENT, "q_lora_rank": None},
    ),
    # A projection whose sigmoid multiplies the heads.
    "afmoe": _text("AfmoeForCausalLM", **_SLIDING, head_dim=16, num_dense_layers=2),
    # One whose softplus does, in float32, with a number for each head.
    "laguna": _text(
        "LagunaForCausalLM", **_SLIDING, head_dim=16, mlp_layer_types=["dense", "dense"], gating="per-head"
    ),
    # One layer without positions.
    "smollm3": _text("SmolLM3ForCausalLM", no_rope_layers=[1, 0]),
    "glm": _text("GlmForCausalLM", head_dim=16),
    "glm4": _text("Glm4ForCausalLM", head_dim=16),
    "olmo3": _text("Olmo3ForCausalLM", **_SLIDING),
    # Positions in layers with a window only.
    "cohere2": _text("Cohere2ForCausalLM", **_SLIDING),
    "starcoder2": _text("Starcoder2ForCausalLM"),
    "ministral3": _text("Ministral3ForCausalLM", head_dim=16),
    "nemotron": _text("NemotronForCausalLM"),
    "apertus": _text("ApertusForCausalLM"),  # whose activation has parameters
    # Norms of heads in each of their ways.
    "cohere_heads": _text("CohereForCausalLM", use_qk_norm=True),
    "phi_heads": _text("PhiForCausalLM", qk_layernorm=True),
    "stablelm_heads": _text("StableLmForCausalLM", qk_layernorm=True, use_parallel_residual=True),
    # Behind the rotation.
    "hunyuan": _text("HunYuanDenseV1ForCausalLM", head_dim=16),
    # Inputs of layers, keys and values that layers share, and norms of values.
    "gemma4": _text(
        "Gemma4ForCausalLM",
        num_hidden_layers=4,
        head_dim=16,
        global_head_dim=32,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCABULARY,
        sliding_window=4,
        layer_types=2 * ["sliding_attention", "full_attention"],
    ),
    # Values made of keys.
    "gemma4_keys": _text("Gemma4ForCausalLM", **_GEMMA4_KEYS),
    # Queries with gates, behind layers with linear attention.
    "qwen3_5": _text(
        "Qwen3_5ForCausalLM",
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "lfm2": _text("Lfm2ForCausalLM", layer_types=["conv", "full_attention"], block_multiple_of=16),
    # A shared expert in the layer, beside its mixture, behind a state space.
    "granite_hybrid": _text(
        "GraniteMoeHybridForCausalLM",
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
        residual_multiplier=0.22,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_expand=2,
        mamba_chunk_size=8,  # a sequence is padded to whole chunks
    ),
    # Attention of its own, which calls the cache by another name.
    "mpt": language_model(
        "MptForCausalLM",
        vocab_size=VOCABULARY,
        d_model=64,
        n_layers=2,
        n_heads=4,
        max_seq_len=64,
        initializer_range=0.1,
        eos_token_id=None,
    ),
    "gptj": language_model("GPTJForCausalLM", **_GPT, rotary_dim=8),
    "gpt_neox_in_a_row": _text("GPTNeoXForCausalLM", use_parallel_residual=False),
}

ENCODERS: dict[str, Callable[[], Example]] = {
    # Norms of other names, in the order of the code: attention(norm(x)).
    "modernbert": language_model("ModernBertForMaskedLM", **{**_TEXT, "cls_token_id": 1, "sep_token_id": 2}),
    # Rotated queries and keys, and no number of the layer in a cache.
    "nomic_bert": language_model("NomicBertForMaskedLM", **_TEXT, head_dim=16),
}
