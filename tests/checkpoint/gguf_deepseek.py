"""Tiny mixtures as DeepSeek's in GGUF files, in llama.cpp's names and layouts, with the values of a float model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, get_tensor_name_map
from torch import Tensor, nn

from checkpoint.gguf_files import Tensors, write_file
from checkpoint.gguf_mixtures import random_model, rounded

LAYERS, HEADS, RANK, PLAIN, ROTATED, VALUE = 3, 4, 64, 32, 16, 32
EPSILON = 2.0**-13
SIZES = {
    **{"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": 97},
    **{"num_key_value_heads": HEADS, "max_position_embeddings": 64, "intermediate_size": 96, "rope_theta": 5000.0},
    **{"rms_norm_eps": EPSILON, "kv_lora_rank": RANK, "qk_nope_head_dim": PLAIN, "qk_rope_head_dim": ROTATED},
    **{"v_head_dim": VALUE, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"n_shared_experts": 2, "first_k_dense_replace": 1, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2},
}
OF_EXPERTS = {
    **{"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_shared_count": 2},
    "leading_dense_block_count": 1,
}
SETTINGS = {
    **{"context_length": 64, "block_count": LAYERS, "embedding_length": 64, "feed_forward_length": 96},
    **{"attention.head_count": HEADS, "attention.head_count_kv": 1, "rope.freq_base": 5000.0, "vocab_size": 97},
    **{"attention.layer_norm_rms_epsilon": EPSILON, "rope.dimension_count": ROTATED, "attention.kv_lora_rank": RANK},
    **{"attention.key_length": RANK + ROTATED, "attention.value_length": RANK},
    **{"attention.key_length_mla": PLAIN + ROTATED, "attention.value_length_mla": VALUE},
    **{**OF_EXPERTS, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2},
}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
# By kind: what its file says, and its config.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # As V2 Lite, and as V2.
    "deepseek_v2": (
        {"expert_gating_func": 1, "expert_weights_scale": 1.0, **YARN, "rope.scaling.yarn_log_multiplier": 0.0707},
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "scaling": 0.707},
    ),
    "grouped": (
        {
            **{"expert_weights_scale": 16.0, "expert_group_count": 4, "expert_group_used_count": 2},
            "attention.q_lora_rank": 64,
        },
        {
            **{"q_lora_rank": 64, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
            "routed_scaling_factor": 16.0,
        },
    ),
    # As V3 and R1, as Kimi K2, and as V3 in files of before latent keys.
    "deepseek_v3": (
        {
            **{"expert_gating_func": 2, "expert_weights_scale": 2.5, "expert_weights_norm": True, **YARN},
            **{"expert_group_count": 4, "expert_group_used_count": 2, "attention.q_lora_rank": 64},
            **{"rope.scaling.yarn_log_multiplier": 0.1},
        },
        {"q_lora_rank": 64, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "scaling": 1.0},
    ),
    "kimi": (
        {
            **{"expert_gating_func": 2, "expert_weights_scale": 2.827, "expert_weights_norm": True, **YARN},
            **{"expert_group_count": 1, "expert_group_used_count": 1, "attention.q_lora_rank": 64},
            **{"rope.scaling.yarn_log_multiplier": 0.1, "rope.scaling.yarn_beta_fast": 1.0},
        },
        {
            **{"q_lora_rank": 64, "n_group": 1, "topk_group": 1, "routed_scaling_factor": float(np.float32(2.827))},
            **{"scaling": 1.0, "beta_fast": 1.0},
        },
    ),
    "old": (
        {
            **{"expert_gating_func": 2, "expert_weights_scale": 2.5, "expert_weights_norm": True},
            **{"attention.q_lora_rank": 64, "attention.key_length": PLAIN + ROTATED, "attention.value_length": VALUE},
            **{"attention.head_count_kv": HEADS, "attention.key_length_mla": 0, "attention.value_length_mla": 0},
        },
        {"q_lora_rank": 64, "n_group": 1, "topk_group": 1},
    ),
}


GLM = {
    **{key: value for key, value in SIZES.items() if "lora" not in key and "head_dim" not in key},
    **{"head_dim": 32, "num_key_value_heads": 2, "num_nextn_predict_layers": 0, "partial_rotary_factor": 0.5},
}
OF_GLM = {
    **{key: value for key, value in SETTINGS.items() if "lora" not in key and "mla" not in key},
    **{"attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32},
    **{"expert_gating_func": 2, "expert_weights_scale": 2.5, "expert_weights_norm": True},
    **{"expert_group_count": 1, "expert_group_used_count": 1},
}
# As GLM 4.5 and as Air; both with layers for further tokens.
GLM_KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "glm": ({"block_count": LAYERS + 1, "nextn_predict_layers": 1}, {"use_qk_norm": True, "attention_bias": True}),
    "air": ({"expert_weights_scale": 1.0}, {"attention_bias": True, "routed_scaling_factor": 1.0}),
}
NEXT: Tensors = {
    **{f"blk.{LAYERS}.nextn.{name}.weight": np.ones(64, "f4") for name in ("enorm", "hnorm", "shared_head_norm")},
    **{f"blk.{LAYERS}.nextn.eh_proj.weight": np.ones((64, 128), "f4")},
}


def mixture(kind: str, sizes: dict[str, Any], **own: Any) -> Any:
    """A float model with values, also of what is no parameter: what its router adds to scores."""
    factor, beta = own.pop("scaling", None), own.pop("beta_fast", 32.0)
    if factor is not None:
        own["rope_scaling"] = {
            **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": factor},
            **{"mscale_all_dim": factor, "beta_fast": beta, "beta_slow": 1.0},
        }
    model = random_model(kind, sizes, **own)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, 0.0, 0.1)
    return model


def views_of(model: Any, architecture: MODEL_ARCH, layers: int) -> dict[str, Tensor]:
    """The tensors of the model, but for those that the layout of the file divides, by their names there."""
    names = get_tensor_name_map(architecture, layers)
    views: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                views[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"] = half
        elif leaf == "e_score_correction_bias":
            views[f"blk.{name.split('.')[2]}.exp_probs_b.bias"] = tensor
        elif leaf == "down_proj":
            views[f"{names.get_name(name)}.weight"] = tensor
        else:
            views[f"{names.get_name(stem)}.{leaf}"] = tensor
    return views


def write_deepseek(path: Path, kind: str, more: Tensors | None = None, without: str = "-", **changes: Any) -> Any:
    """Writes a file, without settings and tensors in whose names that is; returns the float model.

    ``more``: tensors in addition. ``changes``: other settings, with ``__`` for a dot.
    """
    said, own = KINDS[kind]
    of_v3 = {"num_nextn_predict_layers": 0}
    model = (
        mixture("deepseek_v2", SIZES, **own)
        if said.get("expert_gating_func") != 2
        else mixture("deepseek_v3", SIZES | of_v3, **own)
    )
    views = views_of(model, MODEL_ARCH.DEEPSEEK2, LAYERS)
    for name in [name for name in views if "kv_b" in name and kind != "old"]:
        keys, values = views.pop(name).view(HEADS, PLAIN + VALUE, RANK).split([PLAIN, VALUE], dim=1)
        views[name.replace("kv_b", "k_b")] = keys.transpose(1, 2)
        views[name.replace("kv_b", "v_b")] = values
    return _write(path, "deepseek2", {**SETTINGS, **said}, views, more or {}, without, changes) or model


def write_glm(path: Path, kind: str, more: Tensors | None = None, without: str = "-", **changes: Any) -> Any:
    """As ``write_deepseek``."""
    said, own = GLM_KINDS[kind]
    model = mixture("glm4_moe", GLM, **{"routed_scaling_factor": 2.5, **own})
    views = views_of(model, MODEL_ARCH.GLM4_MOE, LAYERS)
    if kind == "glm":  # its last layer, which predicts further tokens, as the one before it
        before = f"blk.{LAYERS - 1}."
        views |= {name.replace(before, f"blk.{LAYERS}."): view for name, view in views.items() if before in name}
        more = NEXT | (more or {})
    return _write(path, "glm4moe", {**OF_GLM, **said}, views, more or {}, without, changes) or model


def _write(
    path: Path,
    architecture: str,
    said: dict[str, Any],
    views: dict[str, Tensor],
    more: Tensors,
    without: str,
    changes: dict[str, Any],
) -> None:
    tensors = rounded(views, {"down": "Q5_0", "": "Q8_0"})
    settings = {**said, **{key.replace("__", "."): value for key, value in changes.items()}}
    settings = {key: value for key, value in settings.items() if without not in key}
    tensors |= more
    write_file(path, architecture, settings, {name: each for name, each in tensors.items() if without not in name})
