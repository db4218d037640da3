"""Gemma 4 in GGUF: its config from settings, some of which are lists with a value for each layer.

transformers has a table for it, but not for what differs between layers with a window and those without: the size of
heads, how many keys there are, the base of rotary frequencies, and which part of a head is rotated, which a tensor
shows. Values are as llama.cpp's converter writes them, unchanged. The factors of a mixture's experts, a vector in the
file and in the model, are listed one by one, as those of ``NVFP4`` are.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from qgemm.checkpoint.errors import unsupported
from qgemm.checkpoint.gguf_architectures import own_settings, stated_numbers, tokens_and_head

GEMMA4, GEMMA4_TEXT = "gemma4", "gemma4_text"
# A single number each.
_NUMBERS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "global_head_dim",
    "attention.key_length_swa": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
}
_OF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_ROTATED = {"rope.dimension_count": "global_head_dim", "rope.dimension_count_swa": "head_dim"}
# By what frequencies of values that aren't rotated are divided.
_NOT_ROTATED = 1e30
_FACTOR = re.compile(r"blk\.(\d+)\.ffn_down_exps\.(\d+)\.scale")
_KEYS = re.compile(r"blk\.(\d+)\.attn_(?:k|v|k_norm)\.weight")


def gemma4_config(path: Path, settings: dict[str, Any], names: Container[str]) -> dict[str, Any]:
    """The config of the model in the file at ``path``. ``settings``: with lists. ``names``: those of the tensors.

    Raises ``CheckpointError`` for settings that are missing, or that transformers' model can't have.
    """
    own = own_settings(settings, GEMMA4)
    config: dict[str, Any] = {"model_type": GEMMA4_TEXT, **tokens_and_head(settings, names)}
    of_experts = _OF_EXPERTS if own.get("expert_count") else {}
    config |= stated_numbers(path, own, _NUMBERS | of_experts, "Gemma 4")
    config["enable_moe_block"] = bool(of_experts)
    for key, called in _ROTATED.items():
        if own.get(key, config[called]) != config[called]:
            raise unsupported(f"{path}: {key} is {own[key]}, and heads have {config[called]} values")
    count = config["num_hidden_layers"]
    has_window = _of_layers(path, own, "attention.sliding_window_pattern", count)
    if count < 1 or has_window[-1]:
        raise unsupported(f"{path}: its last layer has a window, which transformers' model hasn't")
    config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in has_window]
    _add_keys(path, config, _of_layers(path, own, "attention.head_count_kv", count), names)
    wide, shared = _of_layers(path, own, "feed_forward_length", count), config["num_kv_shared_layers"]
    first = wide[0]
    config["intermediate_size"], config["use_double_wide_mlp"] = first, wide[-1] != first
    factors = [2 if config["use_double_wide_mlp"] and layer >= count - shared else 1 for layer in range(count)]
    if list(wide) != [first * factor for factor in factors]:
        raise unsupported(f"{path}: feed_forward_length is {list(wide)}, which transformers' model can't have")
    if own.get("rope.scaling.factor") not in (None, 0.0, 1.0) or own.get("rope.scaling.type", "none") != "none":
        raise unsupported(f"{path}: its positions are scaled, which qgemm doesn't read for Gemma 4")
    config["final_logit_softcapping"] = own.get("final_logit_softcapping")
    bases = {"full_attention": own.get("rope.freq_base"), "sliding_attention": own.get("rope.freq_base_swa")}
    if any(type(base) is not float for base in bases.values()):
        raise unsupported(f"{path} doesn't state rope.freq_base and rope.freq_base_swa, which qgemm needs for Gemma 4")
    config["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    return config


def _of_layers(path: Path, own: dict[str, Any], key: str, count: int) -> tuple[int, ...]:
    """The value of each layer, where all may have one."""
    value = own.get(key)
    values = (value,) * count if type(value) is int and 0 < count < 1 << 16 else value
    if not isinstance(values, tuple) or len(values) != count or any(not isinstance(each, int) for each in values):
        raise unsupported(f"{path}: {key} is {value}, and must be a number for each of {count} layers")
    return values


def _add_keys(path: Path, config: dict[str, Any], heads: tuple[int, ...], names: Container[str]) -> None:
    """Adds how many heads of keys each kind of layer has, and whether those without a window take keys for values."""
    types = config["layer_types"]
    by_kind = {kind: {each for each, own in zip(heads, types, strict=True) if own == kind} for kind in types}
    if any(len(found) > 1 for found in by_kind.values()):
        raise unsupported(f"{path}: attention.head_count_kv is {list(heads)}, which transformers' model can't have")
    (of_full,) = by_kind["full_attention"]
    (of_window,) = by_kind.get("sliding_attention", {of_full})
    first = types.index("full_attention")
    shares = f"blk.{first}.attn_k.weight" in names and f"blk.{first}.attn_v.weight" not in names
    if of_full != of_window and not shares:
        raise unsupported(f"{path}: attention.head_count_kv is {list(heads)}, and all layers have values of their own")
    config |= {"num_key_value_heads": of_window, "num_global_key_value_heads": of_full, "attention_k_eq_v": shares}


def set_rotated_part(path: Path, config: dict[str, Any], factors: Tensor | None) -> None:
    """Sets how much of a head is rotated in layers without a window, by ``factors``, those of rotary frequencies.

    Raises ``CheckpointError`` for factors that aren't 1, and then so large that nothing is rotated.
    """
    if factors is None:
        return
    rotated = int((factors == 1).sum())
    is_known = factors.ndim == 1 and bool((factors[:rotated] == 1).all() and (factors[rotated:] >= _NOT_ROTATED).all())
    if (
        not is_known
        or rotated == 0
        or 2 * len(factors) != config["global_head_dim"]
        or rotated / len(factors) * len(factors) != rotated
    ):
        raise unsupported(f"{path}: rope_freqs.weight holds factors that aren't those of Gemma 4")
    config["rope_parameters"]["full_attention"] |= {
        "rope_type": "proportional",
        "partial_rotary_factor": rotated / len(factors),
    }


def factors_of_experts(names: Iterable[str]) -> dict[str, list[str]]:
    """The tensors of single experts' factors, in their order, by the model's name for all of a layer."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        if match := _FACTOR.fullmatch(name):
            target = f"model.layers.{match[1]}.router.per_expert_scale"
            found.setdefault(target, []).append((int(match[2]), name))
    return {target: [name for _, name in sorted(own)] for target, own in found.items()}


def is_shared(name: str, config: dict[str, Any]) -> bool:
    """Whether the tensor ``name`` is of keys or values of a layer that takes those of another, which no one reads."""
    layer = _KEYS.fullmatch(name)
    return layer is not None and int(layer[1]) >= config["num_hidden_layers"] - config["num_kv_shared_layers"]
