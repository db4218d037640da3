"""torchao's safetensors files: the library's samples, and what their metadata may say beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import qgemm
from checkpoint.packers import linears
from checkpoint.samples import IDS, SAMPLES, digest, load_sample, reference_weights
from qgemm import CheckpointError
from qgemm.nn import WeightOnlyLinear

SCHEMES = {"torchao-int8wo": "int8-weight", "torchao-fp8wo": "fp8-weight"}


@pytest.mark.parametrize("name", SCHEMES)
@torch.no_grad()
def test_samples(name: str) -> None:
    # torchao dequantizes to bfloat16, the dtype that its tensors have.
    model, warnings = load_sample(name)[0], load_sample(name)[1]
    assert warnings == []
    layers = {key: layer for key, layer in model.named_modules() if isinstance(layer, WeightOnlyLinear)}
    assert {layer.scheme.name for layer in layers.values()} == {SCHEMES[name]}
    assert layers.keys() == reference_weights(name).keys()
    rounded = qgemm.load_quantized(SAMPLES / name).float()
    for key, wanted in reference_weights(name).items():
        linear = layers[key].dequantize(torch.bfloat16)
        assert digest(linear.weight) == wanted["sha256_float32"]
        rounded.set_submodule(key, linear.float())
    reference = load_file(SAMPLES / name / "reference_logits.safetensors")["logits"]
    assert torch.allclose(rounded(IDS).logits, reference, rtol=0, atol=1e-5)
    assert float((model(IDS).logits - reference).abs().max() / reference.abs().max()) < 0.005


def attributes(kind: str, **data: Any) -> str:
    return json.dumps({"_type": kind, "_data": {"block_size": [1, 64], "act_quant_kwargs": None, **data}})


def write(folder: Path, tensors: dict[str, torch.Tensor], about: str) -> Path:
    save_file(tensors, folder / "model.safetensors", {"a.weight": about, "tensor_names": '["a.weight"]'})
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "torchao"}}))
    return folder


def int8(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    qdata = torch.randint(-128, 128, (16, 64), dtype=torch.int8)
    tensors = {"a._weight_qdata": qdata, "a._weight_scale": torch.rand(16, 1), **changes}
    return {"a._weight_zero_point": torch.zeros(16, 1, dtype=torch.int8), **tensors}


PER_ROW = {"_type": "QuantizeTensorToInt8Kwargs", "_data": {"granularity": {"_type": "PerRow", "_data": {"dim": -1}}}}


def read(folder: Path) -> Any:
    return qgemm.load_quantized(folder, model=linears(a=(16, 64)))["a"]


def test_activations_rounded_by_row_are_int8(tmp_path: Path) -> None:
    tensors = int8()
    layer = read(write(tmp_path, tensors, attributes("Int8Tensor", act_quant_kwargs=PER_ROW)))
    assert layer.scheme.name == "int8"
    weight = tensors["a._weight_qdata"] * tensors["a._weight_scale"]
    assert torch.equal(layer.dequantize(torch.float32).weight, weight)


@pytest.mark.parametrize("shape", [(1, 1), (1,), ()])
def test_one_scale_for_the_tensor(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = int8(**{"a._weight_scale": torch.full(shape, 0.5, dtype=torch.bfloat16)})
    layer = read(write(tmp_path, tensors, attributes("Int8Tensor")))
    assert layer.weight_scale.dtype == torch.bfloat16
    assert torch.equal(layer.dequantize(torch.float32).weight, tensors["a._weight_qdata"] * 0.5)


@pytest.mark.parametrize("by_row", [False, True])
def test_fp8(by_row: bool, tmp_path: Path) -> None:
    qdata = torch.randn(16, 64).to(torch.float8_e4m3fn)
    tensors = {"a._weight_qdata": qdata, "a._weight_scale": torch.rand(16, 1)}
    about = attributes("Float8Tensor", act_quant_kwargs=PER_ROW if by_row else None)
    layer = read(write(tmp_path, tensors, about))
    assert layer.scheme.name == ("fp8" if by_row else "fp8-weight")
    assert torch.equal(layer.dequantize(torch.float32).weight, qdata.float() * tensors["a._weight_scale"])
    tensors["a._weight_qdata"][3, 5] = torch.nan
    with pytest.raises(CheckpointError, match=r"a._weight_qdata holds NaN"):
        read(write(tmp_path, tensors, about))


STATIC = {"_type": "QuantizeTensorToInt8Kwargs", "_data": {"granularity": {"_type": "PerTensor"}}}
ASYMMETRIC = {**PER_ROW, "_data": {**PER_ROW["_data"], "mapping_type": {"_type": "MappingType", "_data": "ASYMMETRIC"}}}
REFUSED: dict[str, tuple[dict[str, torch.Tensor], str, str]] = {
    "tile-packed": ({}, attributes("Int4TilePackedTo4dTensor"), r"a.weight is torchao's 'Int4TilePackedTo4dTensor'"),
    "plain int4": ({}, attributes("Int4Tensor"), r"a.weight is torchao's 'Int4Tensor'; qgemm reads Int8Tensor and"),
    "no metadata": ({}, "", r"metadata don't say what a.weight is"),
    "deep metadata": ({}, "[" * 100000, r"metadata don't say what a.weight is"),
    "odd metadata": ({}, '{"_type": {}, "_data": {}}', r"a.weight is torchao's \{\}"),
    "by tensor": ({}, attributes("Int8Tensor", act_quant_kwargs=STATIC), r"a quantizes activations otherwise"),
    "asymmetric": ({}, attributes("Int8Tensor", act_quant_kwargs=ASYMMETRIC), r"a quantizes activations otherwise"),
    "odd kwargs": ({}, attributes("Int8Tensor", act_quant_kwargs=[1]), r"act_quant_kwargs of a.weight are \[1\]"),
    "fp8": ({}, attributes("Float8Tensor"), r"_weight_qdata is torch.int8 \[16, 64\]; it must be torch.float8_e4m3fn"),
    "zero points": (
        {"a._weight_zero_point": torch.ones(16, 1, dtype=torch.int8)},
        attributes("Int8Tensor"),
        r"_weight_zero_point: the zero point is not 0",
    ),
    "groups": (
        {"a._weight_scale": torch.ones(16, 2)},
        attributes("Int8Tensor"),
        r"_weight_scale is torch.float32 \[16, 2\]",
    ),
    "scaled inputs": (
        {"a._weight_act_pre_scale": torch.ones(64)},
        attributes("Int8Tensor"),
        r"act_pre_scale is of AWQ",
    ),
    "a bias": ({"a._bias_qdata": torch.ones(64)}, attributes("Int8Tensor"), r"_bias_qdata is of a parameter"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    tensors, about, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        read(write(tmp_path, int8(**tensors), about))
