"""Qwen3-Next in GGUF: layers with linear attention, and every fourth one with attention and a gate.

What llama.cpp's converter changes is undone: weights of norms have 1 added, ``A_log`` is its negative exponential, and
``in_proj_qkvz``, whose rows are those of one head of keys after the other, is two tensors, with queries, keys and
values of all heads in one and their gates in the other. If both are of one type, the layer stays quantized; older files
hold it as it is.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.errors import CheckpointError, unsupported
from qgemm.checkpoint.gguf_architectures import USUAL, count_layers, of_all, stated_numbers

QWEN3NEXT = "qwen3next"
QWENS = {QWEN3NEXT: "qwen3_next"}
"""By the name in files: the type in transformers."""

_NUMBERS = {key: called for key, called in USUAL.items() if key != "feed_forward_length"} | {
    "attention.key_length": "head_dim",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "rope.dimension_count": "",
    "ssm.inner_size": "",
}
_OF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# How often a layer has attention if nothing is stated, and the gating function.
_INTERVAL, _SOFTMAX = 4, 1
_NAME = re.compile(r"(?:blk\.\d+\.)?(\w+?)(?:\.weight|\.bias)?")
_WITH_ONE_ADDED = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")
_PART = re.compile(r"blk\.(\d+)\.attn_(qkv|gate)\.weight")
_OWN_NAMES = re.compile(r"model\.layers\.(\d+)\.linear_attn\.dt_bias")


def qwen_config(path: Path, settings: dict[str, Any], names: Container[str]) -> dict[str, Any]:
    """The config of the model in the file at ``path``. ``settings``: with lists. ``names``: those of the tensors.

    Raises ``CheckpointError`` for settings that are missing, or that transformers' model can't have.
    """
    name = settings["general.architecture"]
    own = {key.removeprefix(f"{name}."): value for key, value in settings.items()}
    config = {"model_type": QWENS[name], **stated_numbers(path, own, _NUMBERS | _OF_EXPERTS, name)}
    del config[""]
    config["num_hidden_layers"] = count_layers(path, own)
    if (function := own.get("expert_gating_func", _SOFTMAX)) != _SOFTMAX:
        raise unsupported(f"{path}: expert_gating_func is {function}, and in transformers' model {_SOFTMAX}")
    if type(own.get("feed_forward_length")) is int:
        config["intermediate_size"] = own["feed_forward_length"]
    size, inner, heads = own["ssm.state_size"], own["ssm.inner_size"], own["ssm.time_step_rank"]
    groups = own["ssm.group_count"]
    if any(type(each) is not int for each in (size, inner, heads, groups)) or not (
        0 < groups <= heads and heads % groups == 0 and inner == size * heads and size > 0
    ):
        raise unsupported(f"{path}: {inner} values are {heads} heads of {size}, with {groups} heads of keys")
    config["linear_value_head_dim"] = size
    rotated, head = own["rope.dimension_count"], own["attention.key_length"]
    if type(rotated) is not int or type(head) is not int or not 0 < rotated <= head:
        raise unsupported(f"{path}: heads have {head} values, of which {rotated} are rotated")
    config["partial_rotary_factor"] = rotated / head
    config["layer_types"] = _layer_types(path, own, config["num_hidden_layers"])
    return config | of_all(settings, name, names)


def _layer_types(path: Path, own: dict[str, Any], count: int) -> list[str]:
    interval = own.get("full_attention_interval", _INTERVAL)
    stated = own.get("attention.recurrent_layers")
    if type(count) is not int or type(interval) is not int or not (0 < count < 1 << 16 and interval > 0):
        raise unsupported(f"{path} has {count} layers, of which one of {interval} has attention")
    linear = [(layer + 1) % interval != 0 for layer in range(count)] if stated is None else stated
    if not isinstance(linear, list | tuple) or len(linear) < count:
        raise unsupported(f"{path}: attention.recurrent_layers is {linear}, and it has {count} layers")
    return ["linear_attention" if each else "full_attention" for each in linear[:count]]


def own_name(name: str) -> str | None:
    """What files call the model's tensor ``name``, which has no name in the table of the package gguf."""
    match = _OWN_NAMES.fullmatch(name)
    return None if match is None else f"blk.{match[1]}.ssm_dt.bias"


def changed(name: str, values: Any) -> Any:
    """The model's values, from ``values`` of the tensor ``name`` in a file; the same object if nothing changes."""
    import numpy as np

    match = _NAME.fullmatch(name)
    part = "" if match is None else match[1]
    if part in _WITH_ONE_ADDED:
        return values - 1
    if part == "ssm_a":
        return np.log(-values)
    if part == "ssm_conv1d":
        return np.expand_dims(values, axis=1)
    return np.reshape(values, (1, -1)) if part == "ffn_gate_inp_shexp" else values


def parts_of_projections(names: Iterable[str]) -> dict[str, list[str]]:
    """The tensors of queries, keys and values, and of gates, that are one layer, by the name of its weight."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        if match := _PART.fullmatch(name):
            found.setdefault(f"model.layers.{match[1]}.linear_attn.in_proj_qkvz.weight", {})[match[2]] = name
    return {target: [own["qkv"], own["gate"]] for target, own in found.items() if len(own) == 2}


def order_of_projections(path: Path, name: str, rows: int, config: dict[str, Any]) -> Tensor:
    """Where the layer's rows are in those of both tensors together; raises ``CheckpointError`` if they aren't ``rows``.

    ``name``: that of one of them in the file at ``path``.
    """
    heads, groups = config["linear_num_value_heads"], config["linear_num_key_heads"]
    keys, values = config["linear_key_head_dim"] * groups, config["linear_value_head_dim"] * heads
    if rows != 2 * (keys + values):
        raise CheckpointError(
            f"{path}: {name} and its gate have {rows} rows, and the settings say {2 * (keys + values)}"
        )
    parts = torch.arange(rows, device="cpu").split([keys, keys, values, values])
    return torch.cat([part.view(groups, -1) for part in parts], dim=1).flatten()
