"""Architectures that transformers doesn't read from GGUF compute what the float model of the same values does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import qgemm
from checkpoint.gguf_dense import MODELS, write_like
from checkpoint.gguf_mixtures import HEAD
from checkpoint.test_gguf_experts import check_same_when_saved
from qgemm import CheckpointError
from qgemm.checkpoint.gguf import read_gguf


@pytest.mark.parametrize("kind", MODELS)
def test_models(kind: str, tmp_path: Path) -> None:
    wanted = write_like(tmp_path / "a.gguf", kind)
    check_same_when_saved(tmp_path / "a.gguf", wanted)


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
    "another length": (
        "ministral3",
        {"attention__temperature_length": 16},
        "for lengths of 16, and positions are scaled from 8",
    ),
    "a length that is none": (
        "ministral3",
        {"rope__scaling__original_context_length": math.nan},
        "positions are scaled from nan",
    ),
    "a temperature that is none": (
        "ministral3",
        {"attention__temperature_scale": math.inf},
        "temperature_scale is inf",
    ),
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
