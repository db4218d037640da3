"""Gemma 4 from GGUF computes what the float model does whose values are in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qgemm
from checkpoint.gguf_gemma4 import FULL, KINDS, LAYERS, WINDOWED, WINDOWS, write_gemma4
from checkpoint.test_gguf_experts import check_same_when_saved
from qgemm import CheckpointError
from qgemm.checkpoint.gguf import read_gguf

KEYS = {
    "blk.5.attn_k.weight": np.ones((2 * FULL, 64), "f4"),
    "blk.5.attn_v.weight": np.ones((2 * FULL, 64), "f4"),
    "blk.5.attn_k_norm.weight": np.ones(FULL, "f4"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_models(kind: str, tmp_path: Path) -> None:
    wanted = write_gemma4(tmp_path / "a.gguf", kind, KEYS if kind == "small" else None)
    check_same_when_saved(tmp_path / "a.gguf", wanted)


def test_without_factors(tmp_path: Path) -> None:
    write_gemma4(tmp_path / "a.gguf", without="rope_freqs")
    config = read_gguf(tmp_path / "a.gguf").config("float32")
    assert config["rope_parameters"]["full_attention"] == {"rope_type": "default", "rope_theta": 5000.0}


def factors(*values: float) -> dict[str, Any]:
    return {"rope_freqs.weight": np.array(values, "f4")}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a window last": ({"attention__sliding_window_pattern": [True] * LAYERS}, {}, "its last layer has a window"),
    "fewer layers": ({"attention__sliding_window_pattern": WINDOWS[1:]}, {}, "must be a number for each of 6 layers"),
    "no pattern": ({"without": "pattern"}, {}, "sliding_window_pattern is None, and must be a number for each"),
    "no heads": ({"without": "head_count"}, {}, "doesn't state attention.head_count as one number"),
    "keys of each layer": (
        {"attention__head_count_kv": [1, 2, 2, 2, 2, 2]},
        {},
        "head_count_kv is .*, which transformers",
    ),
    "other keys": ({"attention__head_count_kv": [2, 2, 1, 2, 2, 1]}, {}, "and all layers have values of their own"),
    "another width": ({"feed_forward_length": [96, 96, 192, 96, 192, 192]}, {}, "feed_forward_length is .*, which"),
    "a part of each head": ({"rope__dimension_count_swa": 16}, {}, f"swa is 16, and heads have {WINDOWED} values"),
    "no base": ({"without": "base_swa"}, {}, "doesn't state rope.freq_base and rope.freq_base_swa"),
    "scaled": ({"rope__scaling__factor": 4.0}, {}, "its positions are scaled, which qgemm doesn't read for Gemma 4"),
    "experts": ({"expert_count": 4}, {}, "doesn't state expert_used_count as one number"),
    "other factors": ({}, factors(*[2.0] * 32), "rope_freqs.weight holds factors that aren't those of Gemma 4"),
    "fewer factors": ({}, factors(*[1.0] * 16), "rope_freqs.weight holds factors that aren't those of Gemma 4"),
    "none rotated": ({}, factors(*[1e30] * 32), "rope_freqs.weight holds factors that aren't those of Gemma 4"),
    "no factors": ({}, factors(), "rope_freqs.weight holds factors that aren't those of Gemma 4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    changes, tensors, problem = REFUSED[case]
    write_gemma4(tmp_path / "a.gguf", "small", tensors, **changes)
    with pytest.raises(CheckpointError, match=problem):
        qgemm.load_quantized(tmp_path)
