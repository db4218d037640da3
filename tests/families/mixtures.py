"""Models with experts: those whose experts have a layout of their own, and some of the many that share one.

Experts outweigh all else in them, as they do in large models: most of the weights are in the experts of two layers.
"""

from __future__ import annotations

from collections.abc import Callable

from families.example import LATENT, VOCABULARY, Example, language_model

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_TOP_2 = {"num_experts_per_tok": 2}
# As Qwen's and DeepSeek's have it: many experts that are narrower than a dense layer.
_NARROW = {**_TEXT, **_TOP_2, "intermediate_size": 96, "moe_intermediate_size": 64, "norm_topk_prob": True}


MIXTURES: dict[str, Callable[[], Example]] = {
    "mixtral": language_model("MixtralForCausalLM", **_TEXT, **_TOP_2, intermediate_size=96, num_local_experts=4),
    "qwen3_moe": language_model("Qwen3MoeForCausalLM", **_NARROW, num_experts=8, head_dim=16),
    "deepseek_v3": language_model(
        "DeepseekV3ForCausalLM",
        **{**_NARROW, "num_key_value_heads": 4},
        **LATENT,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
    ),
    "gpt_oss": language_model(
        "GptOssForCausalLM",
        **_TEXT,
        **_TOP_2,
        intermediate_size=96,
        num_local_experts=4,
        head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "llama4": language_model(
        "Llama4ForCausalLM",
        **{**_TEXT, "pad_token_id": 0},
        num_experts_per_tok=1,
        intermediate_size=96,
        intermediate_size_mlp=96,
        num_local_experts=4,
        head_dim=16,
        interleave_moe_layer_step=1,
        attention_chunk_size=32,
        # The second layer has no positions, and queries that grow with theirs.
        no_rope_layers=[1, 0],
        floor_scale=2,
    ),
    "qwen2_moe": language_model("Qwen2MoeForCausalLM", **_NARROW, num_experts=8, shared_expert_intermediate_size=64),
    "olmoe": language_model(
        "OlmoeForCausalLM", **{**_TEXT, "pad_token_id": 0}, **_TOP_2, intermediate_size=64, num_experts=8
    ),
    "granitemoe": language_model(
        "GraniteMoeForCausalLM",
        **{**_TEXT, "pad_token_id": 0},
        **_TOP_2,
        intermediate_size=64,
        num_local_experts=8,
        residual_multiplier=0.22,
    ),
    "phimoe": language_model("PhimoeForCausalLM", **_TEXT, **_TOP_2, intermediate_size=96, num_local_experts=4),
    "minimax_m2": language_model(
        "MiniMaxM2ForCausalLM", **_TEXT, **_TOP_2, intermediate_size=96, num_local_experts=4, head_dim=16
    ),
    "glm4_moe": language_model(
        "Glm4MoeForCausalLM", **_NARROW, n_routed_experts=8, head_dim=16, first_k_dense_replace=1
    ),
    "dots1": language_model(
        "Dots1ForCausalLM", **_NARROW, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, head_dim=16
    ),
    "ernie4_5_moe": language_model(
        "Ernie4_5_MoeForCausalLM",
        **{**_TEXT, "pad_token_id": 0},
        intermediate_size=96,
        moe_intermediate_size=64,
        moe_num_experts=8,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "hunyuan_v1_moe": language_model(
        "HunYuanMoEV1ForCausalLM",
        **{**_TEXT, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1},
        intermediate_size=96,
        num_experts=4,
        moe_topk=2,
        head_dim=16,
    ),
    "lfm2_moe": language_model(
        "Lfm2MoeForCausalLM",
        **{**_NARROW, "pad_token_id": 0},
        num_experts=8,
        num_dense_layers=1,
        layer_types=["conv", "full_attention"],
    ),
    "flex_olmo": language_model(
        "FlexOlmoForCausalLM", **{**_TEXT, "pad_token_id": 0}, **_TOP_2, intermediate_size=64, num_experts=8
    ),
    "jamba": language_model(
        "JambaForCausalLM",
        **{**_TEXT, "pad_token_id": 0},
        **_TOP_2,
        intermediate_size=96,
        num_experts=4,
        expert_layer_period=1,
        expert_layer_offset=0,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=1,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    # Routers that are told a bias, and have names of their own for a factor.
    "afmoe_sparse": language_model(
        "AfmoeForCausalLM",
        **{**_NARROW, "pad_token_id": 0},
        num_experts=8,
        num_dense_layers=1,
        num_shared_experts=1,
        route_scale=2.5,
        head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "hy_v3": language_model(
        "HYV3ForCausalLM",
        **{**_NARROW, "pad_token_id": 0},
        num_local_experts=8,
        num_shared_experts=1,
        router_scaling_factor=2.5,
        head_dim=16,
    ),
    # A mixture beside an MLP.
    "gemma4_moe": language_model(
        "Gemma4ForCausalLM",
        **{**_NARROW, "pad_token_id": 0},
        num_experts=8,
        top_k_experts=2,
        enable_moe_block=True,
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    # No gate in an expert, and its first weight is called up_proj.
    "nemotron_h": language_model(
        "NemotronHForCausalLM",
        **{key: value for key, value in _TEXT.items() if key != "num_hidden_layers"},
        **_TOP_2,
        layers_block_type=["attention", "moe", "moe"],
        moe_intermediate_size=96,
        moe_shared_expert_intermediate_size=32,
        n_routed_experts=8,
        n_shared_experts=1,
        head_dim=16,
        intermediate_size=96,
    ),
}
