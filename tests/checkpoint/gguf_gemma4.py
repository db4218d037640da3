"""Tiny Gemma 4 as GGUF files, in llama.cpp's names and layouts, with the values of a float model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, get_tensor_name_map
from torch import Tensor, nn

from checkpoint.gguf_files import Tensors, write_file
from checkpoint.gguf_mixtures import random_model, rounded

LAYERS, WINDOWED, FULL = 6, 32, 64
WINDOWS = [True] * 2 + [False] + [True] * 2 + [False]
SIZES = {
    **{"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": 97},
    **{"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": WINDOWED, "max_position_embeddings": 64},
    **{"global_head_dim": FULL, "rms_norm_eps": 2.0**-13, "sliding_window": 8, "final_logit_softcapping": 5.0},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": True},
    "layer_types": ["sliding_attention" if each else "full_attention" for each in WINDOWS],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0},
    },
}
_SCALES = {"scale": "ffn_gate_inp", "per_expert_scale": "ffn_down_exps"}
SETTINGS = {
    **{"context_length": 64, "block_count": LAYERS, "embedding_length": 64, "feed_forward_length": 96},
    **{"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 2.0**-13},
    **{"attention.key_length": FULL, "attention.value_length": FULL, "rope.dimension_count": FULL},
    **{"attention.key_length_swa": WINDOWED, "attention.value_length_swa": WINDOWED},
    **{"rope.dimension_count_swa": WINDOWED, "rope.freq_base": 5000.0, "rope.freq_base_swa": 500.0},
    **{"attention.sliding_window": 8, "attention.sliding_window_pattern": WINDOWS, "final_logit_softcapping": 5.0},
    **{"attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0},
    **{"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2},
}
# As E2B: embeddings of each layer, and layers that take the keys of others; as 26B-A4B; as 31B: keys for values.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "small": (
        {
            **{"attention.shared_kv_layers": 3, "embedding_length_per_layer_input": 32},
            "feed_forward_length": [96] * 3 + [192] * 3,
        },
        {
            **{"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 3, "vocab_size_per_layer_input": 97},
            "use_double_wide_mlp": True,
        },
    ),
    "mixture": (
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
        {
            **{"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
            "moe_intermediate_size": 32,
        },
    ),
    "large": (
        {"attention.head_count_kv": [2 if each else 1 for each in WINDOWS]},
        {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
}


def write_gemma4(
    path: Path, kind: str = "small", more: Tensors | None = None, without: str = "-", **changes: Any
) -> Any:
    """Writes a file, without settings and tensors in whose names that is; returns the float model.

    ``more``: tensors in addition. ``changes``: other settings, with ``__`` for a dot.
    """
    said, own = KINDS[kind]
    model = random_model("gemma4_text", SIZES, **own)
    names = get_tensor_name_map(MODEL_ARCH.GEMMA4, LAYERS)
    views: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if name.endswith("layer_scalar"):
            nn.init.uniform_(tensor, 0.5, 1.5)
            views[f"{names.get_name(name)}.weight"] = tensor
        elif name.endswith("scale"):
            nn.init.uniform_(tensor, 0.5, 1.5)
            views[f"blk.{name.split('.')[2]}.{_SCALES[name.rpartition('.')[2]]}.scale"] = tensor
        elif ".experts." in name:
            views[f"{names.get_name(name)}.weight"] = tensor
        else:
            stem, _, leaf = name.rpartition(".")
            views[f"{names.get_name(stem)}.{leaf}"] = tensor
    tensors = rounded(views, _kinds(views))
    rotated = FULL // 8
    tensors["rope_freqs.weight"] = np.array([1.0] * rotated + [1e30] * (FULL // 2 - rotated), dtype="f4")
    settings = {**SETTINGS, **said, **{key.replace("__", "."): value for key, value in changes.items()}}
    settings = {key: value for key, value in settings.items() if without not in key}
    write_file(path, "gemma4", settings, {n: t for n, t in (tensors | (more or {})).items() if without not in n})
    return model


def _kinds(views: dict[str, Tensor]) -> dict[str, str]:
    """Matrices are in Q8_0; what has no whole blocks, and numbers, in float."""
    return {name: "Q8_0" for name, view in views.items() if view.ndim in (2, 3) and torch.numel(view) % 32 == 0}
