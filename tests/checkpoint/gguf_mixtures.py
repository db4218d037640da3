"""Tiny GPT-OSS and Mixtral as GGUF files, in llama.cpp's names and layouts, with the values of a float model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor, nn

from checkpoint.gguf_files import Tensors, write_file

EXPERTS, LAYERS, HEADS, KEY_HEADS, HEAD = 4, 2, 4, 2, 32
SIZES = {
    **{"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": 97},
    **{"intermediate_size": 96, "num_key_value_heads": KEY_HEADS, "head_dim": HEAD, "max_position_embeddings": 64},
    **{"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "rms_norm_eps": 2.0**-13, "rope_theta": 5000.0},
}
SETTINGS = {
    **{"context_length": 64, "block_count": LAYERS, "embedding_length": 64, "feed_forward_length": 96},
    **{"attention.head_count": HEADS, "attention.head_count_kv": KEY_HEADS, "rope.freq_base": 5000.0},
    **{"attention.layer_norm_rms_epsilon": 2.0**-13, "expert_count": EXPERTS, "expert_used_count": 2},
    "vocab_size": 97,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}
OF_GPT_OSS = {
    **{"attention.key_length": HEAD, "attention.value_length": HEAD, "attention.sliding_window": 8},
    **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
    "expert_feed_forward_length": 96,
}
# What llama.cpp calls the tensors of a block, by their names in the model.
BLOCK = {
    **{"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k"},
    **{"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"},
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def random_model(kind: str, sizes: dict[str, Any] = SIZES, **others: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**sizes, **others}), dtype=torch.float32
    ).eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, float("norm" in name), 0.1)
    return model


def in_file(model: Any, stems: dict[str, str]) -> dict[str, Tensor]:
    """Views of the parameters that have the same layout there, by their names there."""
    parts = {**OUTSIDE}
    for layer in range(LAYERS):
        parts |= {f"model.layers.{layer}.{own}": f"blk.{layer}.{theirs}" for own, theirs in (BLOCK | stems).items()}
    found = {}
    for name, parameter in model.named_parameters():
        stem, _, leaf = name.rpartition(".")
        if stem in parts:
            found[f"{parts[stem]}.{leaf}"] = parameter.data
    return found


def rounded(views: dict[str, Tensor], kinds: dict[str, str]) -> Tensors:
    """What a file holds of the model's ``views``, which get its values. ``kinds``: types, by a part of a name."""
    found: Tensors = {}
    for name, view in views.items():
        values = (view.flatten(0, -2) if view.ndim == 4 else view).numpy()  # of queries and keys
        kind = next((kinds[part] for part in kinds if part in name and name.endswith("weight")), None)
        if kind is None or "norm" in name or "sinks" in name or "_inp" in name:
            found[name] = values.copy()
            continue
        found[name] = kind, quantize(values, GGMLQuantizationType[kind])
        view.copy_(torch.from_numpy(dequantize(found[name][1], GGMLQuantizationType[kind])).reshape(view.shape))
    return found


def write_gpt_oss(path: Path, without: str = "-", fused: bool = False) -> Any:
    """Writes GPT-OSS, without settings and tensors in whose names that is; returns the float model.

    ``fused``: gates and ups of experts are one tensor, as the option --fuse-gate-up-exps of the converter makes them.
    """
    model = random_model("gpt_oss", sliding_window=8, rope_scaling=YARN | {"truncate": False})
    views = in_file(model, {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"})
    for number, layer in enumerate(model.model.layers):
        own, block = layer.mlp.experts, f"blk.{number}."
        for start, part in enumerate(("gate", "up")):
            views[f"{block}ffn_{part}_exps.weight"] = own.gate_up_proj.data[..., start::2].transpose(1, 2)
            views[f"{block}ffn_{part}_exps.bias"] = own.gate_up_proj_bias.data[..., start::2]
        views[f"{block}ffn_down_exps.weight"] = own.down_proj.data.transpose(1, 2)
        views[f"{block}ffn_down_exps.bias"] = own.down_proj_bias.data
        views[f"{block}attn_sinks.weight"] = layer.self_attn.sinks.data
    settings, tensors = SETTINGS | OF_GPT_OSS, rounded(views, {"exps": "MXFP4", "": "Q8_0"})
    settings = {name: value for name, value in settings.items() if without not in name}
    if fused:
        for name in [name for name in tensors if "gate_exps" in name]:
            gate, up = (tensors.pop(name.replace("gate", part)) for part in ("gate", "up"))
            is_float = not isinstance(gate, tuple)
            both = np.concatenate([each if is_float else each[1] for each in (gate, up)], axis=1)
            tensors[name.replace("gate", "gate_up")] = both if is_float else (gate[0], both)
    write_file(path, "gpt-oss", settings, {name: value for name, value in tensors.items() if without not in name})
    return model


def write_mixtral(path: Path, merged: bool = True) -> Any:
    """Writes Mixtral; with ``merged`` False as old files hold it, with a tensor for each expert."""
    model = random_model("mixtral")
    views = in_file(model, {"post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp"})
    for name, count in (("q", HEADS), ("k", KEY_HEADS)):
        for layer in range(LAYERS):
            whole = f"blk.{layer}.attn_{name}.weight"
            views[whole] = views[whole].view(count, 2, HEAD // 2, 64).transpose(1, 2)
    for number, layer in enumerate(model.model.layers):
        gates, ups = layer.mlp.experts.gate_up_proj.data.chunk(2, dim=1)
        for part, weight in (("gate", gates), ("up", ups), ("down", layer.mlp.experts.down_proj.data)):
            own = {f"blk.{number}.ffn_{part}_exps.weight": weight}
            views |= own if merged else {f"blk.{number}.ffn_{part}.{e}.weight": weight[e] for e in range(EXPERTS)}
    tensors = rounded(views, {"down": "Q5_0", "": "Q4_0"})
    write_file(path, "llama", {**SETTINGS, "rope.dimension_count": HEAD}, tensors)
    return model
