"""Architectures that transformers doesn't read from GGUF compute what the float model of the same values does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from torch import Tensor

import qgemm
from checkpoint.gguf_files import Tensors, write_file
from checkpoint.gguf_mixtures import HEAD, HEADS, KEY_HEADS, LAYERS, SETTINGS, SIZES, random_model, rounded
from checkpoint.test_gguf_experts import check_same
from qgemm import CheckpointError
from qgemm.checkpoint.gguf import read_gguf
from qgemm.checkpoint.gguf_architectures import ARCHITECTURES

DENSE = {key: value for key, value in SIZES.items() if "experts" not in key}
DENSE |= {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
OF_HEADS = {"attention.key_length": HEAD, "attention.value_length": HEAD, "rope.dimension_count": HEAD}
FACTORS = {"attention.scale": 0.125, "embedding_scale": 12.0, "logit_scale": 8.0, "residual_scale": 0.25}
OF_GRANITE = {
    **{"attention_multiplier": 0.125, "embedding_multiplier": 12.0, "logits_scaling": 8.0},
    "residual_multiplier": 0.25,
}
# By architecture: what its file says, and its config.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "glm4": ({**OF_HEADS, "rope.dimension_count": HEAD // 2}, {"attention_bias": True}),
    "granite": ({**OF_HEADS, **FACTORS, "expert_count": 0}, {**OF_GRANITE, "tie_word_embeddings": True}),
    "seed_oss": (OF_HEADS, {}),
    "smollm3": (OF_HEADS, {"num_hidden_layers": 4}),
}


def write_like(path: Path, architecture: str, without: str = "-", **changes: Any) -> Any:
    """Writes a file in llama.cpp's names and layouts, without settings in whose names that is; returns the float model.

    ``changes``: other settings, with ``__`` for a dot.
    """
    said, own = MODELS[architecture]
    model = random_model(ARCHITECTURES[architecture].kind, DENSE, **own)
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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models(architecture: str, tmp_path: Path) -> None:
    wanted = write_like(tmp_path / "a.gguf", architecture)
    model = check_same(tmp_path / "a.gguf", wanted)
    assert {layer.scheme.name for layer in model.modules() if hasattr(layer, "scheme")} == {"int8-weight-32"}
    qgemm.save_quantized(model, tmp_path / "saved")
    ids = torch.arange(3, 27).view(2, 12)
    assert torch.equal(qgemm.load_quantized(tmp_path / "saved")(ids).logits, model(ids).logits)


def test_what_is_not_stated(tmp_path: Path) -> None:
    write_like(tmp_path / "a.gguf", "granite", "scale")
    config = read_gguf(tmp_path / "a.gguf").config("float32")
    assert (config["attention_multiplier"], config["logits_scaling"]) == (HEAD**-0.5, 1.0)
    write_like(tmp_path / "a.gguf", "glm4", "rope")
    config = read_gguf(tmp_path / "a.gguf").config("float32")
    assert (config["partial_rotary_factor"], config["rope_theta"]) == (1.0, 10000.0)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "positions of images": (
        "glm4",
        {"rope__dimension_sections": [4, 4, 4, 0]},
        "states rope.dimension_sections, which",
    ),
    "more layers": (
        "glm4",
        {"nextn_predict_layers": 1},
        "states nextn_predict_layers, which qgemm doesn't read for glm4",
    ),
    "no positions": (
        "granite",
        {"rope__scaling__finetuned": False},
        "rope.scaling.finetuned is False, so its positions",
    ),
    "heads of each layer": (
        "seed_oss",
        {"attention__head_count_kv": [2, 2]},
        "doesn't state attention.head_count_kv as",
    ),
    "no heads": ("seed_oss", {"attention__head_count": 0}, "a.gguf"),
    "another scale": (
        "smollm3",
        {"attention__scale": 0.5},
        "attention.scale is 0.5, which transformers doesn't compute",
    ),
    "experts": ("granite", {"expert_count": 4}, "is a mixture of experts, which transformers doesn't read as granite"),
    "a part of each head": ("smollm3", {"rope__dimension_count": 16}, "rotates 16 of a head's 32 values"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    architecture, changes, problem = REFUSED[case]
    write_like(tmp_path / "a.gguf", architecture, **changes)
    with pytest.raises(CheckpointError, match=problem):
        qgemm.load_quantized(tmp_path)
