"""Qwen3-Next and Qwen3.5 from GGUF compute what the float model does whose values are in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qgemm
from checkpoint.gguf_files import random_blocks
from checkpoint.gguf_qwen import LAYERS, write_35, write_next
from checkpoint.test_gguf_experts import IDS, check_same, check_same_when_saved
from qgemm import CheckpointError
from qgemm.checkpoint.gguf import read_gguf

PROJECTIONS = {"same": "int8-weight-32", "two": "int8-weight-32-float-zeros", "other": None, "old": "int8-weight-32"}


@pytest.mark.parametrize(("kind", "scheme"), PROJECTIONS.items())
def test_next(kind: str, scheme: str | None, tmp_path: Path) -> None:
    wanted = write_next(tmp_path / "a.gguf", kind)
    model = check_same(tmp_path / "a.gguf", wanted)
    layers = {name: each.scheme.name for name, each in model.named_modules() if hasattr(each, "scheme")}
    assert layers.pop("model.layers.0.linear_attn.in_proj_qkvz", None) == scheme
    assert set(layers.values()) <= {"int8-weight-32", scheme}
    assert {"model.layers.0.linear_attn.out_proj", "model.layers.3.mlp.experts"} <= layers.keys()
    qgemm.save_quantized(model, tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(qgemm.load_quantized(tmp_path / "saved")(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("kind", ["qwen35", "qwen35moe"])
@pytest.mark.parametrize("keys", [1, 2, 8])
def test_35(kind: str, keys: int, tmp_path: Path) -> None:
    wanted = write_35(tmp_path / "a.gguf", kind, keys=keys)
    check_same_when_saved(tmp_path / "a.gguf", wanted)


def test_a_type_whose_groups_are_larger_than_a_head(tmp_path: Path) -> None:
    """Columns in another order are no whole groups: the layer is in float."""
    model = check_same(tmp_path / "a.gguf", write_35(tmp_path / "a.gguf", kinds={"ssm_out": "TQ2_0"}))
    assert type(model.model.layers[0].linear_attn.out_proj) is nn.Linear
    model = check_same(tmp_path / "a.gguf", write_35(tmp_path / "a.gguf", kinds={"ssm_out": "TQ2_0"}, keys=8))
    assert model.model.layers[0].linear_attn.out_proj.scheme.name == "int4-256"


def test_which_layers_have_attention(tmp_path: Path) -> None:
    of_kinds = {True: "linear_attention", False: "full_attention"}
    said: dict[str, Any]
    for said, wanted in (
        ({"without": "interval"}, [True, True, True, False]),
        ({"full_attention_interval": 2}, [True, False, True, False]),
        ({"attention__recurrent_layers": [False, True, True, False]}, [False, True, True, False]),
    ):
        write_next(tmp_path / "a.gguf", **said)
        found = read_gguf(tmp_path / "a.gguf").config("float32")["layer_types"]
        assert found == [of_kinds[each] for each in wanted]


def test_layers_for_further_tokens(tmp_path: Path) -> None:
    more = {f"blk.{LAYERS}.nextn.enorm.weight": np.ones(64, "f4")}
    check_same(
        tmp_path / "a.gguf",
        write_next(tmp_path / "a.gguf", "same", more, block_count=LAYERS + 1, nextn_predict_layers=1),
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no heads": ({"without": "group_count"}, "doesn't state ssm.group_count as one number"),
    "no experts": ({"without": "expert_count"}, "doesn't state expert_count as one number"),
    "another size": ({"ssm__inner_size": 512}, "512 values are 8 heads of 32, with 2 heads of keys"),
    "no heads of keys": ({"ssm__group_count": 0}, "256 values are 8 heads of 32, with 0 heads of keys"),
    "more heads of keys": ({"ssm__group_count": 3}, "256 values are 8 heads of 32, with 3 heads of keys"),
    "too many rotated": ({"rope__dimension_count": 65}, "heads have 64 values, of which 65 are rotated"),
    "no interval": ({"full_attention_interval": 0}, "has 4 layers, of which one of 0 has attention"),
    "fewer layers": ({"attention__recurrent_layers": [True] * 3}, "recurrent_layers is .*, and it has 4 layers"),
    "all are next": ({"nextn_predict_layers": 4}, "has 4 layers, of which 4 predict further tokens"),
    "sigmoid": ({"expert_gating_func": 2}, "expert_gating_func is 2, and in transformers' model 1"),
    "a scale": ({"attention__scale": 0.5}, "attention.scale is 0.5, which transformers doesn't compute"),
    "a scale of experts": ({"expert_weights_scale": 2.0}, "expert_weights_scale is 2.0, which transformers doesn't"),
    "other rows": (
        {"more": {"blk.0.attn_gate.weight": ("Q8_0", random_blocks("Q8_0", 128, 64))}},
        "attn_qkv.weight and its gate have 512 rows, and the settings say 640",
    ),
    "other columns": ({"more": {"blk.0.attn_gate.weight": np.ones((256, 32), "f4")}}, r"and its gate \[256, 32\]"),
    "no columns": (
        {"more": {f"blk.0.attn_{part}.weight": ("Q8_0", np.zeros((1 << 40, 0), "u1")) for part in ("qkv", "gate")}},
        r"has shape \[1099511627776, 0\], and its gate",
    ),
    "queries alone": ({"without": "blk.0.attn_gate"}, "holds tensors that the model doesn't have: blk.0.attn_qkv"),
    "both": ({"more": {"blk.0.ssm_in.weight": np.ones((640, 64), "f4")}}, "holds both blk.0.attn_qkv.weight and"),
}


OF_35: dict[str, tuple[dict[str, Any], str]] = {
    "no sections": ({"without": "sections"}, "rope.dimension_sections is None, and 8 pairs of values are rotated"),
    "fewer sections": ({"rope__dimension_sections": [3, 3, 2]}, r"sections is \(3, 3, 2\), and 8 pairs"),
    "no whole sections": ({"rope__dimension_sections": [3.0, 3.0, 2.0, 0.0]}, r"sections is \(3.0, .*, and 8 pairs"),
    "a pair without a section": ({"rope__dimension_sections": [3, 2, 2, 0]}, r"sections is \(3, 2, 2, 0\), and 8"),
    "no width": ({"without": "feed_forward"}, "doesn't state feed_forward_length as one number"),
    "experts": ({"expert_count": 8}, "is a mixture of experts, which transformers doesn't read as qwen35"),
    "other columns": (
        {"more": {"blk.0.ssm_out.weight": ("Q8_0", random_blocks("Q8_0", 64, 128))}},
        r"settings don't fit tensor blk.0.ssm_out.weight, \[64, 128\]: .*8 heads have 32 values each",
    ),
    "other rows": (
        {"more": {"blk.0.attn_gate.weight": ("Q8_0", random_blocks("Q8_0", 128, 64))}},
        r"settings don't fit tensor blk.0.attn_gate.weight, \[128, 64\]",
    ),
    "no rows": (
        {"more": {"blk.0.ssm_out.weight": ("Q8_0", np.zeros((0, 272), "u1"))}},
        r"layer model.layers.0.linear_attn.out_proj has the shape \[0, 256\]",
    ),
    "no columns": ({"more": {"blk.0.ssm_out.weight": np.ones(256, "f4")}}, r"settings don't fit tensor blk.0.ssm_out"),
}


@pytest.mark.parametrize("case", OF_35)
def test_refused_of_35(case: str, tmp_path: Path) -> None:
    changes, problem = OF_35[case]
    write_35(tmp_path / "a.gguf", **changes)
    with pytest.raises(CheckpointError, match=problem):
        qgemm.load_quantized(tmp_path)


def test_scaled(tmp_path: Path) -> None:
    said = {"type": "yarn", "factor": 4.0, "original_context_length": 16}
    write_35(tmp_path / "a.gguf", **{f"rope__scaling__{name}": value for name, value in said.items()})
    found = qgemm.load_quantized(tmp_path / "a.gguf").config.rope_parameters
    assert (found["rope_type"], found["factor"], found["mrope_section"]) == ("yarn", 4.0, [3, 3, 2])


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    changes, problem = REFUSED[case]
    write_next(tmp_path / "a.gguf", **changes)
    with pytest.raises(CheckpointError, match=problem):
        qgemm.load_quantized(tmp_path)
