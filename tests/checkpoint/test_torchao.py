"""torchao's safetensors files: the library's samples, and what their metadata may say beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import qgemm
from checkpoint.foreign import relative
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
    assert relative(rounded(IDS).logits, reference) < 1e-5
    assert relative(model(IDS).logits, reference) < 0.005


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


def intx(dtype: str, **data: Any) -> str:
    return attributes("IntxUnpackedToInt8Tensor", target_dtype={"_type": "torch.dtype", "_data": dtype}, **data)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("symmetric", [False, True])
def test_whole_numbers_in_groups(symmetric: bool, size: int, bits: int, tmp_path: Path) -> None:
    # As its library writes them: zero points of symmetric layers too, and one group for whole rows.
    torch.manual_seed(0)
    qdata = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (16, 64), dtype=torch.int8)
    scale = torch.rand(16, 64 // size).bfloat16()
    zeros = torch.zeros(16, 64 // size, dtype=torch.int8) if symmetric else qdata[:, : 64 // size].contiguous()
    tensors = {"a._weight_qdata": qdata, "a._weight_scale": scale, "a._weight_zero_point": zeros}
    layer = read(write(tmp_path, tensors, intx(f"int{bits}", block_size=[1, size])))
    base = {(4, 32): "int4-32", (4, 64): "int4-channel", (8, 32): "int8-weight-32", (8, 64): "int8-weight"}[bits, size]
    assert layer.scheme.name == base + ("" if symmetric else "-asymmetric")
    weight = (qdata.float() - zeros.repeat_interleave(size, 1)) * scale.float().repeat_interleave(size, 1)
    assert torch.equal(layer.dequantize(torch.float32).weight, weight)


def test_activations_that_are_left_in_float(tmp_path: Path) -> None:
    folder = write(tmp_path, int8(), intx("int8", activation_quantization="int8_asym_per_token"))
    with pytest.warns(UserWarning, match="activations stay in float, which the checkpoint has rounded to int8"):
        assert read(folder).scheme.name == "int8-weight"


STATIC = {"_type": "QuantizeTensorToInt8Kwargs", "_data": {"granularity": {"_type": "PerTensor"}}}
ASYMMETRIC = {**PER_ROW, "_data": {**PER_ROW["_data"], "mapping_type": {"_type": "MappingType", "_data": "ASYMMETRIC"}}}
REFUSED: dict[str, tuple[dict[str, torch.Tensor], str, str]] = {
    "another class": (
        {},
        attributes("MXTensor"),
        r"a.weight is torchao's 'MXTensor'; qgemm reads .*, so dequantize it",
    ),
    "no metadata": ({}, "", r"metadata don't say what a.weight is"),
    "deep metadata": ({}, "[" * 100000, r"metadata don't say what a.weight is"),
    "odd metadata": ({}, '{"_type": {}, "_data": {}}', r"a.weight is torchao's \{\}"),
    "by tensor": ({}, attributes("Int8Tensor", act_quant_kwargs=STATIC), r"a quantizes activations otherwise"),
    "asymmetric": ({}, attributes("Int8Tensor", act_quant_kwargs=ASYMMETRIC), r"a quantizes activations otherwise"),
    "odd kwargs": ({}, attributes("Int8Tensor", act_quant_kwargs=[1]), r"act_quant_kwargs of a.weight are \[1\]"),
    "fp8": ({}, attributes("Float8Tensor"), r"_weight_qdata is torch.int8 \[16, 64\]; it must be torch.float8_e4m3fn"),
    "zero points of rounded rows": (
        {"a._weight_zero_point": torch.ones(16, 1, dtype=torch.int8)},
        attributes("Int8Tensor", act_quant_kwargs=PER_ROW),
        r"_weight_zero_point is torch.int8 \[16, 1\]; qgemm reads zero points of whole numbers, with activations in",
    ),
    "float zero points": (
        {"a._weight_zero_point": torch.ones(16, 1)},
        attributes("Int8Tensor"),
        r"_weight_zero_point is torch.float32 \[16, 1\]",
    ),
    "2 bits": ({}, intx("int2"), r"a has values of 'int2'; qgemm reads int4 and int8"),
    "no bits": ({}, attributes("IntxUnpackedToInt8Tensor"), r"a has values of None"),
    "too large": ({}, intx("int4"), r"_qdata: its values go from -12\d to 12\d; those of 4 bits are from -8 to 7"),
    "groups of 8": (
        {"a._weight_scale": torch.ones(16, 8)},
        intx("int8", block_size=[1, 8]),
        r"a has groups of 8 columns; qgemm computes groups of any multiple of 16",
    ),
    "other rounding": ({}, intx("int8", activation_quantization="int4"), r"activation_quantization 'int4'"),
    "groups": (
        {"a._weight_scale": torch.ones(16, 2)},
        attributes("Int8Tensor"),
        r"_weight_scale is torch.float32 \[16, 2\]",
    ),
    "scaled inputs": (
        {"a._weight_act_pre_scale": torch.ones(64)},
        attributes("Int8Tensor", act_quant_kwargs=PER_ROW),
        r"a has the scheme 'int8' and a _weight_act_pre_scale, by which its input would be multiplied first",
    ),
    "a bias": ({"a._bias_qdata": torch.ones(64)}, attributes("Int8Tensor"), r"_bias_qdata is of a parameter"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    tensors, about, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        read(write(tmp_path, int8(**tensors), about))
