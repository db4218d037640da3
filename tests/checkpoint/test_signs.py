"""Negative scales of files: the same weights, by values of the opposite sign."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.command import run_json
from families.mixtures import MIXTURES
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import qgemm
from checkpoint.foreign import edit_tensors, same_tensors
from checkpoint.rewriting import rewrite_file
from checkpoint.samples import SAMPLES
from checkpoint.test_compressed_tensors import LAYER
from checkpoint.test_fp8 import BLOCKS, FBGEMM, in_blocks, transposed, write_experts
from checkpoint.test_save_compressed_tensors import quantized_llama
from qgemm import CheckpointError, QGemmConfig
from qgemm.checkpoint.signs import with_positive_scales

SCALES = ("weight_scale", "weight_scale_inv", "_scale_inv", "_proj_scale")


def opposite(value: Tensor) -> Tensor:
    return -value if value.dtype == torch.int8 else (value.view(torch.uint8) ^ 128).view(value.dtype)


def turn_signs(tensors: dict[str, Tensor]) -> None:
    """Every value of a layer in fp8 or int8, and its scales."""
    for name in [name for name in tensors if name.endswith(SCALES)]:
        weight = name.replace("_scale_inv", "").removesuffix("_scale")
        tensors[weight], tensors[name] = opposite(tensors[weight]), -tensors[name]


@pytest.mark.parametrize(
    "name", ["ct-fp8-dynamic", "ct-fp8-static", "ct-fp8-block", "fp8-block128", "fp8-tensor-static"]
)
def test_fp8(name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SAMPLES / name, tmp_path / "copy"))
    edit_tensors(folder, turn_signs)
    wanted = qgemm.load_quantized(SAMPLES / name)
    assert same_tensors(qgemm.load_quantized(folder), wanted)
    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=QGemmConfig())
    assert same_tensors(loaded, wanted)
    assert run_json("inspect", folder)["problems"] == []


@pytest.mark.parametrize("scheme", ["int8", "int8-static", "int8-static-asymmetric"])
def test_int8(scheme: str, tmp_path: Path) -> None:
    model = quantized_llama(scheme)
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    edit_tensors(tmp_path, turn_signs)
    assert same_tensors(qgemm.load_quantized(tmp_path), model)
    edit_tensors(tmp_path, lambda tensors: tensors[f"{LAYER}.weight"].view(-1)[0].fill_(-128))
    with pytest.raises(
        CheckpointError, match=rf"{LAYER}\.weight: holds -128 in rows with a negative scale, .* dequant"
    ):
        qgemm.load_quantized(tmp_path)


@pytest.mark.parametrize(
    ("family", "scheme", "quantization", "write_one"),
    [("qwen3_moe", "fp8-block", BLOCKS, in_blocks), ("llama4", "fp8", FBGEMM, transposed)],
)
def test_experts(family: str, scheme: str, quantization: Any, write_one: Any, tmp_path: Path) -> None:
    model: Any = qgemm.quantize_model(MIXTURES[family]().model, scheme)
    write_experts(model, tmp_path / "it", quantization, write_one)
    for path in (tmp_path / "it").glob("*.safetensors"):
        tensors = load_file(path)
        turn_signs(tensors)
        rewrite_file(path, tensors)
    assert same_tensors(qgemm.load_quantized(tmp_path / "it"), model)


def test_some_of_the_scales() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 6).to(torch.float8_e4m3fn)
    for scale, block, whole in (
        (torch.tensor([1.0, -2.0, 0.0, -0.5, 3.0]), None, lambda scale: scale[:, None]),
        (
            torch.tensor([[1.0, -2.0], [-1.0, 4.0], [-3.0, -1.0]]),
            (2, 4),
            lambda scale: scale.repeat_interleave(2, 0)[:5].repeat_interleave(4, 1)[:, :6],
        ),
    ):
        values, positive = with_positive_scales(weight, scale, block)
        assert torch.equal(positive, scale.abs())
        assert torch.equal(values.float() * whole(positive), weight.float() * whole(scale))


def test_positive_ones_leave_the_weight_alone() -> None:
    weight, scale = torch.full((2, 2), -128, dtype=torch.int8), torch.tensor([0.0, 1.0])
    assert with_positive_scales(weight, scale)[0] is weight


@pytest.mark.parametrize("leaf", ["weight_scale_2", "weight_global_scale"])
def test_inspect_takes_a_negative_global_scale_as_loading_does(leaf: str, tmp_path: Path) -> None:
    sample = "nvfp4-modelopt" if leaf == "weight_scale_2" else "ct-nvfp4"
    folder = Path(shutil.copytree(SAMPLES / sample, tmp_path / "copy"))
    edit_tensors(folder, lambda tensors: tensors[f"model.layers.0.self_attn.q_proj.{leaf}"].neg_())
    qgemm.load_quantized(folder)
    found = run_json("inspect", folder)
    assert (found["loads"], found["problems"]) == (True, [])
