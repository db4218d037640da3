"""Qwen3-Next and Qwen3.5 in GGUF: layers with linear attention, and every fourth one with attention and a gate.

What llama.cpp's converter changes is undone: weights of norms have 1 added, and ``A_log`` is its negative exponential.

Qwen3-Next's ``in_proj_qkvz``, whose rows are those of one head of keys after the other, is two tensors, with queries,
keys and values of all heads in one and their gates in the other. Both may be of different types, whose values one
scheme can have; older files hold it as it is. Of Qwen3.5, heads of values are in another order: the first of each head
of keys, then the second, and so on. They are rows, but columns of ``out_proj``, which stays quantized if a head has
whole groups of them.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.errors import CheckpointError, unsupported
from qgemm.checkpoint.gguf_architectures import USUAL, count_layers, of_all, own_settings, rotated_part, stated_numbers

QWEN3NEXT, _DENSE, _MIXTURE = "qwen3next", "qwen35", "qwen35moe"
QWENS = {QWEN3NEXT: "qwen3_next", _DENSE: "qwen3_5_text", _MIXTURE: "qwen3_5_moe_text"}
"""By the name in files: the type in transformers."""

MIXTURES = (QWEN3NEXT, _MIXTURE)
"""Those with experts."""

_WIDTH, _SECTIONS = "feed_forward_length", "rope.dimension_sections"
_NUMBERS = {key: called for key, called in USUAL.items() if key != _WIDTH} | {
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
# What has values for each head of values: the whole of it in some, and after queries and keys in others.
_AFTER_KEYS = ("attn_qkv", "ssm_conv1d")
_WHOLE_HEADS = (*_AFTER_KEYS, "attn_gate", "ssm_out")
_BY_HEAD = (*_WHOLE_HEADS, "ssm_a", "ssm_alpha", "ssm_beta", "ssm_dt")
_PART = re.compile(r"blk\.(\d+)\.attn_(qkv|gate)\.weight")
_OWN_NAMES = re.compile(r"model\.layers\.(\d+)\.linear_attn\.dt_bias")


def qwen_config(path: Path, settings: dict[str, Any], names: Container[str]) -> dict[str, Any]:
    """The config of the model in the file at ``path``. ``settings``: with lists. ``names``: those of the tensors.

    Raises ``CheckpointError`` for settings that are missing, or that transformers' model can't have.
    """
    name = settings["general.architecture"]
    own = own_settings(settings, name)
    others = {_WIDTH: "intermediate_size"} if name == _DENSE else _OF_EXPERTS
    config = {"model_type": QWENS[name], **stated_numbers(path, own, _NUMBERS | others, name)}
    del config[""]
    config["num_hidden_layers"] = count_layers(path, own)
    if (function := own.get("expert_gating_func", _SOFTMAX)) != _SOFTMAX:
        raise unsupported(f"{path}: expert_gating_func is {function}, and in transformers' model {_SOFTMAX}")
    if name == QWEN3NEXT and type(own.get(_WIDTH)) is int:
        config["intermediate_size"] = own[_WIDTH]
    size, inner, heads = own["ssm.state_size"], own["ssm.inner_size"], own["ssm.time_step_rank"]
    groups = own["ssm.group_count"]
    if any(type(each) is not int for each in (size, inner, heads, groups)) or not (
        0 < groups <= heads and heads % groups == 0 and inner == size * heads and size > 0
    ):
        raise unsupported(f"{path}: {inner} values are {heads} heads of {size}, with {groups} heads of keys")
    config["linear_value_head_dim"] = size
    config["partial_rotary_factor"] = rotated_part(path, own["rope.dimension_count"], own["attention.key_length"])
    config["layer_types"] = _layer_types(path, own, config["num_hidden_layers"])
    return config | of_all(settings, name, names)


def scaling_of_qwen(path: Path, own: dict[str, Any], scaling: dict[str, Any] | None) -> dict[str, Any]:
    """How positions of Qwen3.5 are scaled, from ``scaling``, which is so for others, and what they are of images.

    ``own``: the settings without the architecture's name. Raises ``CheckpointError`` unless all rotated values have a
    position.
    """
    sections: Any = own.get(_SECTIONS)
    pairs = own["rope.dimension_count"] // 2
    is_known = isinstance(sections, list | tuple) and len(sections) == 4 and all(type(each) is int for each in sections)
    if not is_known or any(3 * count < pairs - axis for axis, count in enumerate(sections[:3])):
        raise unsupported(f"{path}: {_SECTIONS} is {sections}, and {pairs} pairs of values are rotated")
    return {"rope_type": "default", **(scaling or {}), "mrope_section": list(sections[:3]), "mrope_interleaved": True}


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


def changed(architecture: str, name: str, values: Any, config: dict[str, Any]) -> Any:
    """The model's values, from ``values`` of the tensor ``name`` in a file; the same object if nothing changes.

    Raises ``ValueError`` if its shape isn't what ``config`` says.
    """
    import numpy as np

    part = _part(name)
    if not values.size:  # of no model, whatever its shape is
        return values
    if part in _WITH_ONE_ADDED:
        return values - 1
    if part == "ffn_gate_inp_shexp":
        return np.reshape(values, (1, -1))
    if architecture != QWEN3NEXT and part in _BY_HEAD:
        values = _in_order(part, values, config)
    if part == "ssm_a":
        return np.log(-values)
    return np.expand_dims(values, axis=1) if part == "ssm_conv1d" else values


def _part(name: str) -> str:
    match = _NAME.fullmatch(name)
    return "" if match is None else match[1]


def _in_order(part: str, values: Any, config: dict[str, Any]) -> Any:
    """``values`` with those of heads of values in the model's order; the same object if that is the file's."""
    import numpy as np

    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = config["linear_value_head_dim"] if part in _WHOLE_HEADS else 1
    first = 2 * groups * config["linear_key_head_dim"] if part in _AFTER_KEYS else 0
    if groups == heads:
        return values
    if part == "ssm_out":
        return values[:, _order(heads, groups, size, values.shape[1])]
    order = _order(heads, groups, size, values.shape[0] - first)
    return np.concatenate([values[:first], values[first:][order]])


def _order(heads: int, groups: int, size: int, count: int) -> Any:
    import numpy as np

    if count != heads * size:
        raise ValueError(f"{heads} heads have {size} values each")
    return np.arange(count).reshape(heads // groups, groups, size).swapaxes(0, 1).flatten()


def order_of_columns(architecture: str, name: str, K: int, config: dict[str, Any]) -> Tensor | None:
    """The order of the columns of the tensor ``name`` in the model; None if it is the file's.

    Raises ``ValueError`` if they aren't as many as ``config`` says.
    """
    if architecture not in (_DENSE, _MIXTURE) or _part(name) != "ssm_out":
        return None
    heads, groups = config["linear_num_value_heads"], config["linear_num_key_heads"]
    order = _order(heads, groups, config["linear_value_head_dim"], K)
    return None if heads == groups else torch.from_numpy(order)


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
