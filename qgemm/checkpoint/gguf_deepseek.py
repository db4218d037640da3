"""DeepSeek's mixtures in GGUF: V2, V3 and others of their architecture, and GLM 4.5 to 4.7, whose experts are as V3's.

DeepSeek's attention has latent keys and values. llama.cpp multiplies queries by the part of ``kv_b_proj`` that makes
keys, which its converter stores transposed, and the part that makes values by itself. Both are rows of one layer here,
in float: rows of the file aren't rows of the layer, so that their groups of values aren't either. Older files hold the
layer as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.errors import CheckpointError, unsupported
from qgemm.checkpoint.gguf_architectures import USUAL, count_layers, of_all, own_settings, rotated_part, stated_numbers

DEEPSEEK2, GLM4MOE = "deepseek2", "glm4moe"
_V2, _V3 = "deepseek_v2", "deepseek_v3"
_SHARED_KEYS = "attention.head_count_kv"  # 1 in files for latent keys, which all heads share
_NUMBERS = {called: name for called, name in USUAL.items() if called != _SHARED_KEYS} | {
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
}
_OF_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
}
_SOFTMAX, _SIGMOID = 1, 2
# Layers and vocabulary of GLM 4.7 Flash, of which old files don't say that scores are sigmoids.
_GLM_LAYERS, _GLM_VOCABULARY = (47, 48), 154880
_TEMPERATURE, _SECTIONS = "attention.temperature_scale", "rope.dimension_sections"
# The converter's part of the factor of attention, and the bounds of YaRN.
_LOG, _BOUNDS = "rope.scaling.yarn_log_multiplier", {"beta_fast": 32.0, "beta_slow": 1.0}
_PART = re.compile(r"blk\.(\d+)\.attn_([kv])_b\.weight")


def deepseek_config(path: Path, settings: dict[str, Any], names: Container[str]) -> dict[str, Any]:
    """The config of the model in the file at ``path``. ``names``: those of its tensors.

    Raises ``CheckpointError`` for settings that are missing, or that transformers' model can't have.
    """
    own = own_settings(settings, DEEPSEEK2)
    config = stated_numbers(path, own, _NUMBERS, DEEPSEEK2)
    config |= routed_experts(path, own, DEEPSEEK2)
    if own.get(_TEMPERATURE):
        raise unsupported(f"{path}: {_TEMPERATURE} is {own[_TEMPERATURE]}, which transformers doesn't compute")
    function = own.get("expert_gating_func", 0) or _SOFTMAX
    if "expert_gating_func" not in own and own.get("vocab_size") == _GLM_VOCABULARY:
        function = _SIGMOID if config["num_hidden_layers"] in _GLM_LAYERS else _SOFTMAX
    first = config["first_k_dense_replace"]
    if function == _SIGMOID:
        config["model_type"] = _V3
    elif function == _SOFTMAX:
        config["model_type"] = _V2
        config["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
        if config["norm_topk_prob"] or f"blk.{first}.exp_probs_b.bias" in names:
            raise unsupported(
                f"{path}: its experts' scores are softmaxes, and normed or biased, which qgemm doesn't read"
            )
    else:
        raise unsupported(f"{path}: expert_gating_func is {function}, which qgemm doesn't read for {DEEPSEEK2}")
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["q_lora_rank"] = own.get("attention.q_lora_rank") or None
    # Where files state sizes of heads for latent keys, the usual settings are those of what heads share.
    of_heads = [own.get(f"attention.{part}_length_mla", 0) for part in ("key", "value")]
    if of_heads == [0, 0]:
        of_heads = [own.get(f"attention.{part}_length") for part in ("key", "value")]
    head, rotated = of_heads[0], config["qk_rope_head_dim"]
    if any(type(each) is not int for each in (*of_heads, rotated)) or not (0 < rotated < head and of_heads[1] > 0):
        raise unsupported(f"{path}: heads have {of_heads[0]} and {of_heads[1]} values, of which {rotated} are rotated")
    config |= {"qk_nope_head_dim": head - rotated, "v_head_dim": of_heads[1]}
    return config | of_all(settings, DEEPSEEK2, names)


def glm_config(path: Path, settings: dict[str, Any], names: Container[str]) -> dict[str, Any]:
    """As ``deepseek_config``, of GLM 4.5 and others."""
    own = own_settings(settings, GLM4MOE)
    config = {"model_type": "glm4_moe", **stated_numbers(path, own, USUAL, GLM4MOE)}
    config |= routed_experts(path, own, GLM4MOE)
    if own.get(_SECTIONS, _SECTIONS in own) not in (0, False):
        raise unsupported(f"{path} states {_SECTIONS}, which qgemm doesn't read for {GLM4MOE}")
    if (function := own.get("expert_gating_func", 0) or _SIGMOID) != _SIGMOID:
        raise unsupported(f"{path}: expert_gating_func is {function}, and in transformers' model {_SIGMOID}")
    head = own.get("attention.key_length") or own["embedding_length"] // max(own["attention.head_count"], 1)
    rotated = own.get("rope.dimension_count", head)
    config |= {"head_dim": head, "partial_rotary_factor": rotated_part(path, rotated, head)}
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in names
    config["attention_bias"] = "blk.0.attn_q.bias" in names
    return config | of_all(settings, GLM4MOE, names)


def routed_experts(path: Path, own: dict[str, Any], name: str) -> dict[str, Any]:
    """The part of a config about experts as DeepSeek has them, and how many layers there are.

    ``own``: the settings without the architecture's ``name``. Raises ``CheckpointError`` for settings that are missing,
    and for groups of experts that can't be.
    """
    config = stated_numbers(path, own, _OF_EXPERTS, name)
    config |= {"num_hidden_layers": count_layers(path, own), "num_nextn_predict_layers": 0}
    config["first_k_dense_replace"] = own.get("leading_dense_block_count", 0)
    config["routed_scaling_factor"] = own.get("expert_weights_scale") or 1.0
    config["norm_topk_prob"] = own.get("expert_weights_norm", False)
    count, groups, used = config["n_routed_experts"], own.get("expert_group_count") or 1, 1
    if groups != 1:
        used = own.get("expert_group_used_count", 0)
        sizes = all(type(each) is int for each in (count, groups, used))
        if not sizes or not 0 < used <= groups or count % groups or count // groups < 2:
            raise unsupported(f"{path}: {used} of {groups} groups of {count} experts are used, which isn't possible")
    return config | {"n_group": groups, "topk_group": used}


def scaling_of_deepseek(path: Path, own: dict[str, Any], scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """How positions are scaled, from ``scaling``, which is so for others.

    ``own``: the settings without the architecture's name. Raises ``CheckpointError`` for other ways than YaRN's with a
    factor of attention, which is then that of queries and keys too.
    """
    if scaling is None:
        return None
    factor: Any = own.get(_LOG)
    bounds = {name: own.get(f"rope.scaling.yarn_{name}", usual) for name, usual in _BOUNDS.items()}
    if scaling["rope_type"] != "yarn" or not all(map(_is_positive, (factor, *bounds.values()))):
        raise unsupported(f"{path}: positions are scaled as {scaling}, with {_LOG} {factor} and {bounds}")
    # The file has a tenth of the config's factor, as float32.
    factor = round(10 * factor, 6)
    return scaling | bounds | {"mscale": factor, "mscale_all_dim": factor}


def _is_positive(value: Any) -> bool:
    return type(value) is float and math.isfinite(value) and value > 0


def parts_of_latents(names: Iterable[str]) -> dict[str, list[str]]:
    """The tensors of keys and of values that are one layer in the model, by that layer's name."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        if match := _PART.fullmatch(name):
            found.setdefault(f"model.layers.{match[1]}.self_attn.kv_b_proj.weight", {})[match[2]] = name
    return {target: [own["k"], own["v"]] for target, own in found.items() if len(own) == 2}


def latents_shape(path: Path, name: str, keys: tuple[int, ...], values: tuple[int, ...]) -> tuple[int, int]:
    """The shape of a layer of which these are the parts' shapes; raises ``CheckpointError`` if they aren't parts."""
    if len(keys) != 3 or len(values) != 3 or keys[0] != values[0] or keys[1] != values[2]:
        raise CheckpointError(f"{path}: {name} has shape {list(keys)}, and beside it are values of {list(values)}")
    return keys[0] * (keys[2] + values[1]), keys[1]


def joined_latents(keys: Tensor, values: Tensor) -> Tensor:
    """The layer's weight from ``keys [heads, rank, K]`` and ``values [heads, V, rank]``."""
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)
