"""Architectures that transformers has models of, but doesn't read from GGUF: what a file says, as their config.

They are those that llama.cpp's converter stores as they are, but for the rows of queries and keys of some, which it
reorders as Llama's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qgemm.checkpoint.errors import unsupported

USUAL = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Settings of most architectures, one number each, and what configs call them."""

_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
# What configs say about biases, and a tensor of the first layer that shows it.
_BIASES = {
    "attention_bias": "blk.0.attn_q.bias",
    "attention_out_bias": "blk.0.attn_output.bias",
    "mlp_bias": "blk.0.ffn_up.bias",
}
NEXT = "nextn_predict_layers"
"""How many layers follow that predict further tokens."""

# Settings with which llama.cpp computes something else, or stores rows in another order.
_OTHERS = ("rope.dimension_sections", NEXT)
_LAYER = re.compile(r"blk\.(\d+)\..*")
# The base of rotary frequencies if none is stated.
BASE = 10000.0
_TEMPERATURE = "attention.temperature_scale"


@dataclass(frozen=True)
class Architecture:
    """``kind``: its type in transformers. ``factors``: settings that only it has, and what configs call them.

    ``rows_as_llama``: whether rows of queries and keys are in Llama's order. ``part_of_head``: whether only the first
    values of a head may be rotated.
    """

    kind: str
    factors: dict[str, str] = field(default_factory=dict)
    rows_as_llama: bool = False
    part_of_head: bool = False


ARCHITECTURES = {
    "glm4": Architecture("glm4", part_of_head=True),
    "granite": Architecture(
        "granite",
        {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "logit_scale": "logits_scaling",
            "residual_scale": "residual_multiplier",
        },
        rows_as_llama=True,
    ),
    "mistral3": Architecture("mistral", rows_as_llama=True),
    "seed_oss": Architecture("seed_oss"),
    "smollm3": Architecture("smollm3", rows_as_llama=True),
}
"""By the name in files."""


def own_config(path: Path, settings: dict[str, Any], names: Container[str]) -> dict[str, Any]:
    """The config of the model in the file at ``path``, with these ``settings`` and tensors of these ``names``.

    Raises ``CheckpointError`` for settings that are missing, and for some that aren't computed.
    """
    name = settings["general.architecture"]
    about = ARCHITECTURES[name]
    own = own_settings(settings, name)
    for key in _OTHERS:
        if own.get(key, key in own) not in (0, False):
            raise unsupported(f"{path} states {key}, which qgemm doesn't read for {name}")
    if own.get("rope.scaling.finetuned", True) is False and name == "granite":
        raise unsupported(f"{path}: rope.scaling.finetuned is False, so its positions aren't rotated")
    # Ministral's attention depends on positions; other models of that architecture are Mistral's.
    is_ministral = name == "mistral3" and bool(own.get(_TEMPERATURE))
    config = stated_numbers(path, own, USUAL, name)
    config["model_type"] = "ministral3" if is_ministral else about.kind
    heads = own["attention.head_count"]
    config["head_dim"] = own.get("attention.key_length") or own["embedding_length"] // max(heads, 1)
    for key, called in about.factors.items():
        # 0 stands for none, too.
        usual = config["head_dim"] ** -0.5 if key == "attention.scale" and config["head_dim"] > 0 else 1.0
        config[called] = own.get(key) or usual
    if name == "mistral3":
        config["sliding_window"] = None
    if about.part_of_head:
        config["partial_rotary_factor"] = 1.0  # unless rope.dimension_count says less
    config |= {called: bias in names for called, bias in _BIASES.items()}
    return config | of_all(settings, name, names)


def own_settings(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """``settings``, those of the architecture ``name`` without its name."""
    return {key.removeprefix(f"{name}."): value for key, value in settings.items()}


def tokens_and_head(settings: dict[str, Any], names: Container[str]) -> dict[str, Any]:
    """What ``settings`` of any model say about tokens, and the names of its tensors about the head."""
    tokens = {called: settings.get(f"tokenizer.ggml.{key}") for key, called in _TOKENS.items()}
    return {**tokens, "tie_word_embeddings": "output.weight" not in names}


def of_all(settings: dict[str, Any], name: str, names: Container[str]) -> dict[str, Any]:
    """``tokens_and_head`` of a model of the architecture ``name``, and the base of its rotary frequencies."""
    return tokens_and_head(settings, names) | {"rope_theta": settings.get(f"{name}.rope.freq_base", BASE)}


def rotated_part(path: Path, rotated: Any, head: Any) -> float:
    """Which part of a head's values is rotated. Raises ``CheckpointError`` for numbers that can't be."""
    if type(head) is not int or type(rotated) is not int or not 0 < rotated <= head:
        raise unsupported(f"{path}: heads have {head} values, of which {rotated} are rotated")
    return rotated / head


def stated_numbers(path: Path, own: dict[str, Any], wanted: dict[str, str], name: str) -> dict[str, Any]:
    """The settings ``wanted``, by what configs call them; ``own``: all, without the architecture's name.

    Raises ``CheckpointError`` for one that isn't a number; ``name`` is what the error calls the architecture.
    """
    for key in wanted:
        if type(own.get(key)) not in (int, float):
            raise unsupported(f"{path} doesn't state {key} as one number, which qgemm needs for {name}")
    return {called: own[key] for key, called in wanted.items()}


def count_layers(path: Path, own: dict[str, Any]) -> int:
    """How many layers a model has without those that predict further tokens.

    ``own``: the settings without the architecture's name. Raises ``CheckpointError`` if none is left.
    """
    layers, after = own["block_count"], own.get(NEXT, 0)
    if type(layers) is not int or type(after) is not int or after >= layers:
        raise unsupported(f"{path} has {layers} layers, of which {after} predict further tokens")
    return layers - after


def is_of_next(name: str, layers: int) -> bool:
    """Whether the tensor ``name`` is of a layer after the model's own ``layers``."""
    layer = _LAYER.fullmatch(name)
    return layer is not None and int(layer[1]) >= layers


def scaling_of_mistral3(
    path: Path, config: dict[str, Any], own: dict[str, Any], scaling: dict[str, Any] | None
) -> dict[str, Any] | None:
    """How positions of a ``config`` of Mistral 3 are scaled, from ``scaling``, which is so for others.

    Those of Ministral, with its temperature, are put into ``config``, and None is returned. ``own``: the settings
    without the architecture's name. Raises ``CheckpointError`` for a temperature of other lengths.
    """
    if scaling is not None and (factor := own.get("rope.scaling.yarn_log_multiplier")):
        scaling = scaling | {"mscale": 1.0, "mscale_all_dim": factor}
    if config["model_type"] != "ministral3":
        return scaling
    length = own.get("rope.scaling.original_context_length") or own["context_length"]
    stated, factor = own.get("attention.temperature_length", length), own[_TEMPERATURE]
    if (
        type(length) is not int
        or length < 1
        or stated != length
        or not (type(factor) is float and math.isfinite(factor))
    ):
        raise unsupported(
            f"{path}: {_TEMPERATURE} is {factor} for lengths of {stated}, and positions are scaled from {length}"
        )
    of_ministral = {"original_max_position_embeddings": length, "llama_4_scaling_beta": factor}
    config["rope_parameters"] = {
        **{"rope_type": "default", "rope_theta": config.pop("rope_theta")},
        **(scaling or {}),
        **of_ministral,
    }
    return None
