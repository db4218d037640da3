"""Tiny models as GGUF files: of each architecture, what a config and the settings of a file say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpoint.gguf_files import Tensors, random_tensors, write_file

EPSILON = 2.0**-13
_CONFIG = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97},
    **{"intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"rms_norm_eps": EPSILON, "layer_norm_eps": EPSILON, "layer_norm_epsilon": EPSILON, "norm_eps": EPSILON},
    "norm_epsilon": EPSILON,
}
_SETTINGS = {
    **{"context_length": 64, "block_count": 2, "embedding_length": 64, "feed_forward_length": 128, "vocab_size": 97},
    **{"attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 5000.0},
    "tokenizer.ggml.tokens": [str(each) for each in range(97)],
}
_RMS = {"attention.layer_norm_rms_epsilon": EPSILON}
_NORM = {"attention.layer_norm_epsilon": EPSILON}
_HEADS = {"attention.key_length": 32, "attention.value_length": 32}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_OF_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = {"expert_shared_feed_forward_length": 96}
_MAMBA = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.time_step_rank": 4}
_GEMMA = {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32}
_SLIDING = {**_RMS, **_HEADS, "attention.sliding_window": 8}
_T5 = {**_NORM, "attention.key_length": 16, "attention.relative_buckets_count": 8}
_OF_T5 = {
    **{"d_kv": 16, "d_ff": 128, "num_layers": 2, "relative_attention_num_buckets": 8},
    "feed_forward_proj": "gated-gelu",
}
# By architecture: the type in transformers, and what differs from the above in the file and in the config.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bloom": ("bloom", {**_NORM, "attention.head_count_kv": 4}, {}),
    "falcon": ("falcon", {**_NORM, "attention.head_count_kv": 1}, {}),
    "gemma2": ("gemma2", {**_SLIDING, "attn_logit_softcapping": 5.0}, {**_GEMMA, "attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", _SLIDING, _GEMMA),
    "gpt2": ("gpt2", {**_NORM, "feed_forward_length": 256}, {"n_inner": 256}),
    "lfm2": (
        "lfm2",
        {**_RMS, "attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
        {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False, "conv_L_cache": 3},
    ),
    "llama": ("llama", {**_RMS, "rope.dimension_count": 16}, {}),
    "mamba": ("mamba", {**_RMS, **_MAMBA}, {}),
    "nemotron": ("nemotron", {**_NORM, "rope.dimension_count": 8}, {}),
    "phi3": (
        "phi3",
        {**_RMS, "rope.dimension_count": 8, "attention.sliding_window": 8, "tokenizer.ggml.padding_token_id": 0},
        {"partial_rotary_factor": 0.5, "sliding_window": 8, "pad_token_id": 0},
    ),
    "qwen2": ("qwen2", _RMS, {}),
    "qwen2moe": (
        "qwen2_moe",
        {**_RMS, **_EXPERTS, **_SHARED},
        {**_OF_EXPERTS, "shared_expert_intermediate_size": 96},
    ),
    "qwen3": ("qwen3", {**_RMS, **_HEADS}, {"head_dim": 32}),
    "qwen3moe": ("qwen3_moe", {**_RMS, **_HEADS, **_EXPERTS}, {**_OF_EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "minimax-m2": (
        "minimax_m2",
        {**_RMS, **_HEADS, **_EXPERTS, "rope.dimension_count": 8, "expert_feed_forward_length": 128},
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 8},
    ),
    "stablelm": ("stablelm", {**_NORM, "rope.dimension_count": 8}, {"partial_rotary_factor": 0.5}),
    "starcoder2": ("starcoder2", _NORM, {}),
    "t5": ("t5", _T5, _OF_T5),
    "t5encoder": ("t5", _T5, _OF_T5),
}


def float_model(architecture: str, **changes: Any) -> nn.Module:
    """The model of transformers, on meta."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5EncoderModel

    kind, _, own = MODELS[architecture]
    known = AutoConfig.for_model(kind)
    values = {name: value for name, value in _CONFIG.items() if hasattr(known, name)}
    if hasattr(known, "rope_parameters"):
        values["rope_theta"] = 5000.0
    config = AutoConfig.for_model(kind, **{**values, **own, **changes})
    with torch.device("meta"):
        if architecture == "t5encoder":
            return T5EncoderModel(config)
        return (AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM).from_config(config)


def write_model(
    path: Path, architecture: str, kind: str = "Q8_0", more: Tensors | None = None, /, **changes: Any
) -> Path:
    """Writes a model of ``architecture`` whose weights are of type ``kind``.

    ``more``: tensors in addition. ``changes``: other settings, with ``__`` for a dot.
    """
    tensors = random_tensors(float_model(architecture), architecture, kind) | (more or {})
    return write_file(path, architecture, settings_of(architecture, **changes), tensors)


def settings_of(architecture: str, **changes: Any) -> dict[str, Any]:
    """The settings of a file, without its architecture; ``changes`` as in ``write_model``."""
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    return {**_SETTINGS, **MODELS[architecture][1], **changed}
