"""What one way to read a checkpoint refuses, all refuse, and ``qgemm inspect`` tells."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.foreign import edit_tensors, same_tensors
from checkpoint.refused_values import REFUSED, Refused
from checkpoint.samples import SAMPLES
from checkpoint.test_bitsandbytes import float_model, write_by_layout
from checkpoint.test_save_compressed_tensors import quantized_llama
from transformers import AutoModelForCausalLM

import qgemm
from cli.command import run_failing, run_json
from qgemm import CheckpointError, QGemmConfig


def check_every_way(folder: Path, message: str, other: Path | None = None) -> None:
    for scheme in (None, "int8"):
        with pytest.raises(CheckpointError, match=message):
            qgemm.load_quantized(folder, scheme=scheme)
        with pytest.raises(CheckpointError, match=message):
            AutoModelForCausalLM.from_pretrained(folder, quantization_config=QGemmConfig(scheme))
    found = run_json("inspect", folder, exit_code=1)
    assert found["loads"] is False
    assert re.search(message, found["refusal"])
    assert len([each for each in found["problems"] if re.search(message, each)]) >= 1
    shown = run_failing("convert", folder, folder.with_name("converted"), "--to", "qgemm")
    assert re.search(message, shown)
    if other is not None:
        assert re.search(message, run_failing("compare", folder, other))
        assert re.search(message, run_failing("compare", other, folder))


@pytest.mark.parametrize("name", REFUSED)
def test_samples(name: str, tmp_path: Path) -> None:
    case: Refused = REFUSED[name]
    # inspect counts scales that can't be, where loading stops at the first.
    check_every_way(case.write(tmp_path / "it"), case.message, SAMPLES / case.sample)


def test_bitsandbytes_in_an_order_of_one_kind_of_gpu(tmp_path: Path) -> None:
    model: Any = float_model("llama")
    (tmp_path / "it").mkdir()
    write_by_layout(model, tmp_path / "it")
    name = "model.layers.0.mlp.up_proj.weight_format"
    edit_tensors(tmp_path / "it", lambda tensors: tensors[name].fill_(2))
    check_every_way(tmp_path / "it", "laid out for one kind of GPU")


def test_a_bias_that_the_model_lacks_beside_a_zero_point_of_the_input(tmp_path: Path) -> None:
    model, name = quantized_llama("int8-static-asymmetric"), "model.layers.0.mlp.up_proj.bias"
    qgemm.save_quantized(model, tmp_path / "it", format="compressed-tensors")
    edit_tensors(tmp_path / "it", lambda tensors: tensors.update({name: torch.zeros(48)}))
    assert same_tensors(qgemm.load_quantized(tmp_path / "it"), model)
    edit_tensors(tmp_path / "it", lambda tensors: tensors[name].fill_(1))
    check_every_way(tmp_path / "it", "the bias is not 0, but the model's layer has none")
