"""The mxfp4 experts of GPT-OSS: read bit for bit, in qgemm's order of rows, and computed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import qgemm
from checkpoint.samples import SAMPLES, digest, load_sample, logit_error, reference_weights
from qgemm import CheckpointError, QuantExperts

NAME = "mxfp4-gpt-oss"
EXPERTS = "model.layers.1.mlp.experts"


def in_order_of_the_file(rows: Tensor) -> Tensor:
    """``[E, 2 * I, ...]``, gates before ups, with gates and ups in turn."""
    return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)


def test_weights_are_bit_equal() -> None:
    model, wanted = load_sample(NAME)[0], reference_weights(NAME)
    assert len(wanted) == 4
    for name, reference in wanted.items():
        layer, _, leaf = name.rpartition(".")
        experts = model.get_submodule(layer)
        assert type(experts) is QuantExperts
        assert experts.scheme.name == "mxfp4"
        weight = experts.dequantize(torch.float32)[leaf]
        weight = in_order_of_the_file(weight) if leaf == "gate_up_proj" else weight
        assert list(weight.shape) == reference["shape"]
        assert digest(weight) == reference["sha256_float32"]


def test_biases_are_in_the_order_of_the_weights() -> None:
    stored = load_file(SAMPLES / NAME / "model.safetensors")
    biases = load_sample(NAME)[0].get_submodule(EXPERTS).dequantize(torch.float32)
    assert torch.equal(
        in_order_of_the_file(biases["gate_up_proj_bias"]), stored[f"{EXPERTS}.gate_up_proj_bias"].float()
    )
    assert torch.equal(biases["down_proj_bias"], stored[f"{EXPERTS}.down_proj_bias"].float())


def test_logits_are_those_of_the_reference() -> None:
    assert logit_error(NAME) < 1e-5


def test_it_is_saved_as_one_of_ours(tmp_path: Path) -> None:
    model = qgemm.load_quantized(SAMPLES / NAME)
    qgemm.save_quantized(model, tmp_path / "ours")
    loaded = qgemm.load_quantized(tmp_path / "ours")
    wanted = model.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in loaded.state_dict().items())
    assert wanted[f"{EXPERTS}.down_proj"].dtype == torch.uint8


def cut(name: str) -> Any:
    return lambda tensors: tensors.update({name: tensors[name][..., :-1].contiguous()})


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda tensors: tensors.pop(f"{EXPERTS}.down_proj_scales"), "has down_proj_blocks and no down_proj_scales"),
        (cut(f"{EXPERTS}.down_proj_blocks"), r"down_proj_blocks is .*must be torch.uint8, \[E, N, K / 32, 16\]"),
        (cut(f"{EXPERTS}.gate_up_proj_scales"), r"gate_up_proj_scales is .*must be torch.uint8 \[4, 128, 2\]"),
        (
            lambda tensors: tensors[f"{EXPERTS}.gate_up_proj_scales"].fill_(255),
            "gate_up_proj_scales holds NaN or Inf",
        ),
    ],
    ids=["no scales", "short blocks", "short scales", "NaN"],
)
def test_damaged_files_are_refused(edit: Any, problem: str, tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / NAME, tmp_path / "damaged")
    path = tmp_path / "damaged" / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=problem):
        qgemm.load_quantized(tmp_path / "damaged")
