"""Tiny models of architectures that transformers doesn't read from GGUF, in llama.cpp's names and layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from torch import Tensor

from checkpoint.gguf_files import Tensors, write_file
from checkpoint.gguf_mixtures import HEAD, HEADS, KEY_HEADS, LAYERS, SETTINGS, SIZES, random_model, rounded
from qgemm.checkpoint.gguf_architectures import ARCHITECTURES

DENSE = {key: value for key, value in SIZES.items() if "experts" not in key}
DENSE |= {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
OF_HEADS = {"attention.key_length": HEAD, "attention.value_length": HEAD, "rope.dimension_count": HEAD}
FACTORS = {"attention.scale": 0.125, "embedding_scale": 12.0, "logit_scale": 8.0, "residual_scale": 0.25}
OF_GRANITE = {
    **{"attention_multiplier": 0.125, "embedding_multiplier": 12.0, "logits_scaling": 8.0},
    "residual_multiplier": 0.25,
}
OF_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
OF_MINISTRAL = {"mscale": 1.0, "mscale_all_dim": 1.0}
# By architecture, or by type of the model where one has two: what its file says, and its config.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "glm4": ({**OF_HEADS, "rope.dimension_count": HEAD // 2}, {"attention_bias": True}),
    "granite": ({**OF_HEADS, **FACTORS, "expert_count": 0}, {**OF_GRANITE, "tie_word_embeddings": True}),
    "ministral3": (
        {**OF_HEADS, **OF_YARN, "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.5},
        {"rope_parameters": {**YARN, **OF_MINISTRAL, "rope_theta": 5000.0, "llama_4_scaling_beta": 0.5}},
    ),
    "mistral3": (
        {**OF_HEADS, **OF_YARN, "rope.scaling.yarn_log_multiplier": 0.5},
        {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}, "sliding_window": None},
    ),
    "seed_oss": (OF_HEADS, {}),
    "smollm3": (OF_HEADS, {"num_hidden_layers": 4}),
}


def write_like(path: Path, kind: str, without: str = "-", **changes: Any) -> Any:
    """Writes a file in llama.cpp's names and layouts, without settings in whose names that is; returns the float model.

    ``changes``: other settings, with ``__`` for a dot.
    """
    said, own = MODELS[kind]
    architecture = {"ministral3": "mistral3"}.get(kind, kind)
    model = random_model({"mistral3": "mistral"}.get(kind, kind), DENSE, **own)
    layers = own.get("num_hidden_layers", LAYERS)
    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(kinds[architecture], layers)
    views: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        stem, _, leaf = name.rpartition(".")
        view = parameter.data
        heads = {"q_proj": HEADS, "k_proj": KEY_HEADS}.get(stem.rpartition(".")[2])
        if heads is not None and ARCHITECTURES[architecture].rows_as_llama:
            view = view.view(heads, 2, HEAD // 2, -1).transpose(1, 2)
        found = names.get_name(stem)
        assert found is not None, name
        views[f"{found}.{leaf}"] = view
    tensors: Tensors = rounded(views, {"down": "Q5_0", "": "Q8_0"})
    settings = {key: value for key, value in SETTINGS.items() if not key.startswith("expert")}
    settings |= {"block_count": layers, **said, "tokenizer.ggml.bos_token_id": 1}
    settings |= {"tokenizer.ggml.eos_token_id": 2, **{key.replace("__", "."): value for key, value in changes.items()}}
    write_file(path, architecture, {key: value for key, value in settings.items() if without not in key}, tensors)
    return model
