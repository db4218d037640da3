"""DeepSeek's and GLM's mixtures from GGUF compute what the float model does whose values are in the file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import qgemm
from checkpoint.gguf_deepseek import GLM_KINDS, KINDS, LAYERS, write_deepseek, write_glm
from checkpoint.test_gguf_experts import check_same_when_saved
from qgemm import CheckpointError
from qgemm.checkpoint.gguf import read_gguf

WRITERS = {**dict.fromkeys(KINDS, write_deepseek), **dict.fromkeys(GLM_KINDS, write_glm)}


@pytest.mark.parametrize("kind", WRITERS)
def test_models(kind: str, tmp_path: Path) -> None:
    check_same_when_saved(tmp_path / "a.gguf", WRITERS[kind](tmp_path / "a.gguf", kind))


def test_latents(tmp_path: Path) -> None:
    """Keys and values of a file for latent keys are one float layer; an older file has it in blocks."""
    for kind, is_float in (("deepseek_v3", True), ("old", False)):
        write_deepseek(tmp_path / "a.gguf", kind)
        model: Any = qgemm.load_quantized(tmp_path / "a.gguf", dtype="float32")
        assert (type(model.model.layers[1].self_attn.kv_b_proj) is nn.Linear) == is_float


def test_layers_for_further_tokens(tmp_path: Path) -> None:
    more = {f"blk.{LAYERS}.attn_norm.weight": np.ones(64, "f4"), f"blk.{LAYERS}.nextn.enorm.weight": np.ones(64, "f4")}
    wanted = write_deepseek(tmp_path / "a.gguf", "deepseek_v3", more, block_count=LAYERS + 1, nextn_predict_layers=1)
    check_same_when_saved(tmp_path / "a.gguf", wanted)


def test_scores_of_glm(tmp_path: Path) -> None:
    """Its first files don't say how experts are scored, and llama.cpp knows it by its size."""
    sizes = {"block_count": 47, "vocab_size": 154880}
    for changes, kind in ((sizes, "deepseek_v3"), ({}, "deepseek_v2"), ({"vocab_size": 154880}, "deepseek_v2")):
        write_deepseek(tmp_path / "a.gguf", "deepseek_v3", None, "gating", **{"expert_weights_norm": False, **changes})
        if kind == "deepseek_v2":  # which adds nothing to scores
            with pytest.raises(CheckpointError, match="scores are softmaxes, and normed or biased"):
                read_gguf(tmp_path / "a.gguf").config("float32")
        else:
            assert read_gguf(tmp_path / "a.gguf").config("float32")["model_type"] == kind


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no experts": ("deepseek_v2", {"without": "expert_count"}, "doesn't state expert_count as one number"),
    "no latents": ("deepseek_v2", {"without": "kv_lora"}, "doesn't state attention.kv_lora_rank as one number"),
    "heads of each layer": ("old", {"attention__head_count": [4] * LAYERS}, "doesn't state attention.head_count as"),
    "other scores": ("deepseek_v3", {"expert_gating_func": 3}, "expert_gating_func is 3, which qgemm doesn't read"),
    "normed softmax": ("deepseek_v2", {"expert_weights_norm": True}, "scores are softmaxes, and normed or biased"),
    "biased softmax": ("old", {"expert_gating_func": 1}, "scores are softmaxes, and normed or biased"),
    "a temperature": ("deepseek_v3", {"attention__temperature_scale": 0.5}, "temperature_scale is 0.5, which"),
    "all groups": ("deepseek_v3", {"expert_group_used_count": 5}, "5 of 4 groups of 8 experts are used"),
    "groups of one": ("deepseek_v3", {"expert_group_count": 8}, "2 of 8 groups of 8 experts are used"),
    "no groups": ("deepseek_v3", {"without": "group_used"}, "0 of 4 groups of 8 experts are used"),
    "all are next": ("deepseek_v3", {"nextn_predict_layers": 3}, "has 3 layers, of which 3 predict further tokens"),
    "one size": ("deepseek_v3", {"without": "value_length_mla"}, "heads have 48 and 0 values, of which 16 are rotated"),
    "all rotated": ("deepseek_v3", {"rope__dimension_count": 48}, "heads have 48 and 32 values, of which 48 are"),
    "linear": ("deepseek_v3", {"rope__scaling__type": "linear"}, "positions are scaled as .*'linear'"),
    "no factor": ("deepseek_v3", {"without": "log_multiplier"}, "yarn_log_multiplier None and"),
    "no bound": ("kimi", {"rope__scaling__yarn_beta_fast": 0.0}, "positions are scaled as .*'beta_fast': 0.0"),
    "an infinite bound": ("kimi", {"rope__scaling__yarn_beta_slow": math.inf}, "positions are scaled as .*: inf"),
    "a factor beside it": ("kimi", {"rope__scaling__attn_factor": 2.0}, "rope.scaling.attn_factor is 2.0"),
    "other values": (
        "kimi",
        {"more": {"blk.0.attn_v_b.weight": np.ones((2, 32, 64), "f4")}},
        "beside it are values of",
    ),
    "other keys": ("kimi", {"more": {"blk.0.attn_k_b.weight": np.ones((256, 32), "f4")}}, r"has shape \[256, 32\]"),
    "keys alone": ("kimi", {"without": "blk.1.attn_v_b"}, "holds tensors that the model doesn't have: blk.1.attn_k_b"),
    "both": ("kimi", {"more": {"blk.0.attn_kv_b.weight": np.ones((256, 64), "f4")}}, "holds both blk.0.attn_k_b"),
    "softmax": ("air", {"expert_gating_func": 1}, "expert_gating_func is 1, and in transformers' model 2"),
    "positions of images": ("air", {"rope__dimension_sections": [8, 4, 4, 0]}, "states rope.dimension_sections, which"),
    "too many rotated": ("air", {"rope__dimension_count": 64}, "heads have 32 values, of which 64 are rotated"),
    "no heads": ("air", {"attention__head_count": 0}, "a.gguf"),
    "no shared experts": ("air", {"without": "shared"}, "doesn't state expert_shared_count as one number"),
    "a norm of queries": ("glm", {"without": "attn_k_norm"}, "lacks tensors of the model: .*k_norm.weight"),
}


def test_what_is_not_stated(tmp_path: Path) -> None:
    write_glm(tmp_path / "a.gguf", "air", without="rope")
    config = read_gguf(tmp_path / "a.gguf").config("float32")
    assert (config["partial_rotary_factor"], config["rope_theta"]) == (1.0, 10000.0)


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    kind, changes, problem = REFUSED[case]
    WRITERS[kind](tmp_path / "a.gguf", kind, **changes)
    with pytest.raises(CheckpointError, match=problem):
        qgemm.load_quantized(tmp_path)
