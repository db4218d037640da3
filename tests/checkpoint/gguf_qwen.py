"""Tiny Qwen3-Next and Qwen3.5 as GGUF files, in llama.cpp's names and layouts, with the values of a float model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, get_tensor_name_map
from torch import Tensor, nn

from checkpoint.gguf_files import Tensors, write_file
from checkpoint.gguf_mixtures import random_model, rounded

OTHER_TYPES = {"two": "Q5_1", "other": "MXFP4"}
"""Those of gates."""

LAYERS, HEAD, SIZE, KEYS, VALUES = 4, 64, 32, 2, 8
EPSILON = 2.0**-20
SIZES = {
    **{"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": HEAD, "vocab_size": 97, "max_position_embeddings": 64, "rms_norm_eps": EPSILON},
    **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": SIZE, "linear_value_head_dim": SIZE},
    **{"linear_num_key_heads": KEYS, "linear_num_value_heads": VALUES, "rope_theta": 5000.0},
    **{"partial_rotary_factor": 0.25, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2},
}
OF_EXPERTS = {
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "shared_expert_intermediate_size": 32,
}
SETTINGS = {
    **{"context_length": 64, "block_count": LAYERS, "embedding_length": 64, "attention.head_count": 4},
    **{"attention.head_count_kv": 2, "attention.key_length": HEAD, "attention.value_length": HEAD},
    **{"attention.layer_norm_rms_epsilon": EPSILON, "rope.dimension_count": HEAD // 4, "rope.freq_base": 5000.0},
    **{"ssm.conv_kernel": 4, "ssm.state_size": SIZE, "ssm.group_count": KEYS, "ssm.time_step_rank": VALUES},
    **{"ssm.inner_size": SIZE * VALUES, "vocab_size": 97},
    **{"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2},
}
OTHER_TYPES = {"two": "Q5_1", "other": "MXFP4"}
"""Those of gates."""

EXPERTS = {
    **{"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32},
    "expert_shared_feed_forward_length": 32,
}


def _views_of(model: Any, architecture: MODEL_ARCH) -> dict[str, Tensor]:
    """The tensors of the model by their names there, before what is added to some."""
    names = get_tensor_name_map(architecture, LAYERS)
    views: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        block = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if leaf == "gate_up_proj":
            views |= {
                f"{block}.ffn_{part}_exps.weight": half
                for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True)
            }
        elif leaf == "dt_bias":
            views[f"{block}.ssm_dt.bias"] = tensor
        elif leaf == "A_log":
            views[f"{block}.ssm_a"] = tensor
        elif leaf == "down_proj":
            views[f"{block}.ffn_down_exps.weight"] = tensor
        else:
            views[f"{names.get_name(stem)}.{leaf}"] = tensor.squeeze() if "conv1d" in name else tensor
    return views


def _with_own_values(views: dict[str, Tensor]) -> Tensors:
    """Those of ``views`` that files hold as other values, which the model then gets those of."""
    found: Tensors = {}
    for name in [name for name in views if name.endswith(("norm.weight", "ssm_a"))]:
        if "ssm_norm" in name:
            continue
        view = views.pop(name)
        if name.endswith("ssm_a"):
            found[name] = -np.exp(view.numpy())
            view.copy_(torch.from_numpy(np.log(-found[name])))
        else:
            nn.init.normal_(view, 0.0, 0.1)
            found[name] = view.numpy() + np.float32(1)
            view.copy_(torch.from_numpy(found[name] - np.float32(1)))
    return found


def _divided(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of ``in_proj_qkvz``, of queries, keys and values of all heads, and of their gates."""
    per = VALUES // KEYS * SIZE
    heads = weight.view(KEYS, 2 * SIZE + 2 * per, -1)
    *parts, gate = (part.flatten(0, 1) for part in heads.split([SIZE, SIZE, per, per], dim=1))
    return torch.cat(parts), gate


def write_next(
    path: Path,
    kind: str = "same",
    more: Tensors | None = None,
    without: str = "-",
    kinds: dict[str, str] | None = None,
    **changes: Any,
) -> Any:
    """Writes Qwen3-Next, without settings and tensors in whose names that is; returns the float model.

    ``kind``: what ``in_proj_qkvz`` is: two tensors of the ``same`` type, of ``two``, or of ``other`` numbers than
    integers, or as it is (``old``).
    ``kinds``: other types, by a part of a name. ``more``: tensors in addition. ``changes``: other settings, with ``__``
    for a dot.
    """
    model = random_model("qwen3_next", SIZES | OF_EXPERTS | {"intermediate_size": 96})
    views = _views_of(model, MODEL_ARCH.QWEN3NEXT)
    tensors = _with_own_values(views)
    whole = {name: views.pop(name) for name in list(views) if "ssm_in" in name and kind != "old"}
    for name, weight in whole.items():
        for part, rows in zip(("attn_qkv", "attn_gate"), _divided(weight), strict=True):
            views[name.replace("ssm_in", part)] = rows
    of_types = {
        **(kinds or {}),
        **({"attn_gate": OTHER_TYPES[kind]} if kind in OTHER_TYPES else {}),
        "conv1d": "F32",
        "": "Q8_0",
    }
    tensors |= _rounded(views, of_types)
    for name, weight in whole.items():
        qkv, gate = (views[name.replace("ssm_in", part)] for part in ("attn_qkv", "attn_gate"))
        per, keys = VALUES // KEYS * SIZE, SIZE * KEYS
        parts = [*qkv.split([keys, keys, per * KEYS]), gate]
        weight.copy_(torch.cat([part.reshape(KEYS, -1, weight.shape[1]) for part in parts], dim=1).flatten(0, 1))
    settings = {**SETTINGS, **EXPERTS, "feed_forward_length": 96, "full_attention_interval": 4}
    _write(path, "qwen3next", settings, tensors | (more or {}), without, changes)
    return model


def _in_heads(views: dict[str, Tensor], keys: int, undo: bool) -> None:
    """Puts what ``views`` have for each head of values into the order of Qwen3.5's file, or back into the model's."""
    first, others = (VALUES // keys, keys) if undo else (keys, VALUES // keys)
    for name, view in views.items():
        part = name.split(".")[2] if name.startswith("blk.") else ""
        size = SIZE if part in ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_out") else 1
        if part in ("attn_qkv", "ssm_conv1d"):
            view = view[2 * keys * SIZE :]
        if part == "ssm_out":
            heads = view.T.reshape(first, others, size, -1).transpose(0, 1)
            view.copy_(heads.reshape(VALUES * size, -1).T)
        elif part in ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_a", "ssm_alpha", "ssm_beta", "ssm_dt"):
            view.copy_(view.reshape(first, others, size, -1).transpose(0, 1).reshape(view.shape))


def write_35(
    path: Path,
    kind: str = "qwen35",
    more: Tensors | None = None,
    without: str = "-",
    kinds: dict[str, str] | None = None,
    keys: int = KEYS,
    **changes: Any,
) -> Any:
    """As ``write_next``, Qwen3.5; ``kind``: its architecture. ``keys``: how many heads of keys layers have."""
    own, said = {"intermediate_size": 96}, {"feed_forward_length": 96}
    if kind == "qwen35moe":
        own, said = OF_EXPERTS, EXPERTS
    rotary = {"mrope_section": [3, 3, 2], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
    model = random_model(
        {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}[kind],
        SIZES | own | {"linear_num_key_heads": keys},
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, **rotary},
    )
    views = _views_of(model, MODEL_ARCH.QWEN35MOE if kind == "qwen35moe" else MODEL_ARCH.QWEN35)
    everything = dict(views)
    _in_heads(everything, keys, undo=False)
    tensors = _with_own_values(views) | _rounded(views, {**(kinds or {}), "": "Q8_0"})
    _in_heads(everything, keys, undo=True)
    settings = {
        **SETTINGS,
        **said,
        "ssm.group_count": keys,
        "full_attention_interval": 4,
        "rope.dimension_sections": [3, 3, 2, 0],
    }
    _write(path, kind, settings, tensors | (more or {}), without, changes)
    return model


def _rounded(views: dict[str, Tensor], kinds: dict[str, str]) -> Tensors:
    floats = {name: views[name].numpy().copy() for name in views if "conv1d" in name or "ssm_norm" in name}
    return floats | rounded({name: view for name, view in views.items() if name not in floats}, kinds)


def _write(
    path: Path, architecture: str, said: dict[str, Any], tensors: Tensors, without: str, changes: dict[str, Any]
) -> None:
    settings = {**said, **{key.replace("__", "."): value for key, value in changes.items()}}
    settings = {key: value for key, value in settings.items() if without not in key}
    write_file(path, architecture, settings, {name: each for name, each in tensors.items() if without not in name})
