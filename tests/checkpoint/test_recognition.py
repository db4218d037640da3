"""Formats told by tensors alone: the samples without their ``quantization_config``, and what tensors don't tell."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.command import run_json
from torch import Tensor
from transformers import AutoModelForCausalLM

import qgemm
from checkpoint.foreign import edit_quantization, same_tensors
from checkpoint.packers import Layer, linears, write
from checkpoint.samples import SAMPLES, load_sample
from qgemm import CheckpointError
from qgemm.checkpoint import formats
from qgemm.checkpoint.contents import Contents, read_converted
from qgemm.checkpoint.formats import read_contents
from qgemm.checkpoint.layout import read_json
from qgemm.checkpoint.recognition import recognize
from qgemm.checkpoint.safetensors_file import read_header

VERSION = "no symmetric layers tell whether zero points of GPTQ's are stored less 1"
ACTIVATIONS = "don't tell whether activations are quantized"
# The format by the tensors, and why they aren't enough.
SAMPLES_ALONE = {
    "auto-round-asym": ("awq", ""),
    "auto-round-gptq": ("gptq", ""),
    "awq-gemm-g128": ("awq", ""),
    "awq-gemm-g32-skip": ("awq", ""),
    "bnb-fp4": ("bitsandbytes", ""),
    "bnb-nf4": ("bitsandbytes", ""),
    "bnb-nf4-double": ("bitsandbytes", ""),
    "ct-fp8-block": ("fp8", ACTIVATIONS),
    "ct-nvfp4": ("compressed-tensors", ACTIVATIONS),
    "ct-w4a16-g128": ("compressed-tensors", ACTIVATIONS),
    "ct-w4a8-int": ("compressed-tensors", ACTIVATIONS),
    "eetq-int8": ("eetq", ""),
    "fbgemm-fp8": ("fp8", ACTIVATIONS),
    "fp8-block128": ("fp8", ""),
    "fp8-block128-ue8m0": ("fp8", ""),
    "fp8-tensor-static": ("fp8", ""),
    "gptq-4bit-g128-sym": ("gptq", ""),
    "gptq-4bit-g32-desc-act": ("gptq", ""),
    "gptq-4bit-g64-asym-desc-act": ("gptq", VERSION),
    "gptq-8bit-channel": ("gptq", ""),
    "gptq-8bit-g128-asym": ("gptq", VERSION),
    "gptq-v2-4bit-g64-asym": ("gptq", VERSION),
    "hqq-4bit-g64": ("hqq", ""),
    "hqq-8bit-g32": ("hqq", ""),
    "metal-4bit": ("metal", "how many bits .*, and in which groups"),
    "mlx-mixed": ("mlx", "how many bits .*, and in which groups"),
    "mxfp4-gpt-oss": ("mxfp4", ""),
    "nvfp4-modelopt": ("modelopt", ""),
    "quark-fp8-kv": ("fp8", ACTIVATIONS),
    "quark-int8-asym": ("quark", ACTIVATIONS),
    "quark-mixed": ("quark", "whether values are signed, and in which order they are packed"),
    "torchao-fp8wo": ("torchao", ""),
    "torchao-int4": ("torchao", ""),
    "torchao-int8wo": ("torchao", ""),
}

MLX = {"weight": torch.ones(4, 8, dtype=torch.uint32), "scales": torch.ones(4, 1), "biases": torch.ones(4, 1)}


def without_settings(name: str, folder: Path) -> Path:
    """A folder with the files of a sample, and nothing that says how it is quantized."""
    folder.mkdir()
    shutil.copy(SAMPLES / name / "model.safetensors", folder)
    config = read_json(SAMPLES / name / "config.json")
    del config["quantization_config"]
    config.pop("quantization", None)  # of MLX
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def contents_of(folder: Path) -> Contents:
    return read_contents(folder, read_json(folder / "config.json"), folder / "config.json")


def values(contents: Contents) -> dict[str, Tensor]:
    return {target.name: value for target, value in read_converted(contents, torch.device("cpu"))}


def octets(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", SAMPLES_ALONE)
def test_samples_without_their_config(name: str, tmp_path: Path) -> None:
    folder, (format, unsaid) = without_settings(name, tmp_path / "copy"), SAMPLES_ALONE[name]
    found = recognize(read_header(folder / "model.safetensors"))
    assert found is not None
    assert found.format == format
    if unsaid:
        with pytest.raises(
            CheckpointError, match=rf"has no quantization_config( of (GPTQ|MLX|transformers))?, and .*{unsaid}"
        ):
            contents_of(folder)
        return
    alone, wanted = contents_of(folder), contents_of(SAMPLES / name)
    # Of a row with one group, tensors don't tell that it is as long as groups of other layers: the values are the same.
    assert alone.manifest.layers.keys() == wanted.manifest.layers.keys()
    for layer, scheme in alone.manifest.layers.items():
        assert scheme.activation == wanted.manifest.layers[layer].activation
    assert alone.shapes == wanted.shapes
    ours, theirs = values(alone), values(wanted)
    assert ours.keys() == theirs.keys()
    assert all(octets(value) == octets(theirs[key]) for key, value in ours.items())


@pytest.mark.slow
def test_a_model_without_its_config(tmp_path: Path) -> None:
    name = "gptq-4bit-g32-desc-act"
    folder, (wanted, _) = without_settings(name, tmp_path / "copy"), load_sample(name)
    assert same_tensors(qgemm.load_quantized(folder).float(), wanted)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=qgemm.QGemmConfig())
    assert same_tensors(loaded, wanted)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_layers_tell_the_version_of_gptq(version: int, bits: int, tmp_path: Path) -> None:
    # Of AutoRound, whose layers have no g_idx, and the scales of which may be negative.
    layers = {"a": Layer(symmetric=True, bits=bits), "b": Layer(bits=bits, seed=1)}
    tensors = {name: layer.gptq(version) for name, layer in layers.items()}
    model: Any = qgemm.load_quantized(write(tmp_path, tensors, None), model=linears(a=(16, 64), b=(16, 64)))
    for name, layer in layers.items():
        assert torch.equal(model[name].dequantize(torch.float32).weight, layer.weight)
    with pytest.raises(CheckpointError, match=VERSION):
        contents_of(write(tmp_path, {"b": tensors["b"]}, None))


@pytest.mark.parametrize("quantization", [None, {"bits": 4, "group_size": 32}])
def test_tensors_are_looked_at_once(
    quantization: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, looked = write(tmp_path, {"a": Layer(symmetric=True).gptq()}, quantization), []
    monkeypatch.setattr(formats, "recognize", lambda stored: looked.append(len(stored)) or recognize(stored))
    assert contents_of(folder).manifest.layers.keys() == {"a"}
    assert len(looked) == 1


def test_layers_that_tell_two_versions_of_gptq(tmp_path: Path) -> None:
    tensors = {f"layer{version}": Layer(symmetric=True).gptq(version) for version in (1, 2)}
    with pytest.raises(CheckpointError, match=VERSION):
        contents_of(write(tmp_path, tensors, None))


E4M3, U8 = torch.float8_e4m3fn, torch.uint8


def fp8(N: int, K: int, grid: tuple[int, ...], **others: Tensor) -> dict[str, Tensor]:
    return {"weight": torch.ones(N, K).to(E4M3), "weight_scale_inv": torch.ones(grid), **others}


@pytest.mark.parametrize(
    ("layers", "unsaid"),
    [
        ([fp8(320, 320, (3, 3))], ""),
        ([fp8(64, 320, (1, 3)), fp8(320, 64, (3, 1))], ""),
        ([fp8(64, 320, (1, 3))], "how large its blocks are"),  # of 128 rows or more
        ([fp8(320, 64, (3, 1))], "how large its blocks are"),
        ([fp8(64, 64, ())], ""),
        (
            [fp8(320, 320, (3, 3)), {"weight": torch.ones(4, 4).to(E4M3), "weight_scale": torch.ones(4, 1)}],
            "activations",
        ),
    ],
)
def test_blocks_of_fp8(layers: list[dict[str, Tensor]], unsaid: str, tmp_path: Path) -> None:
    folder = write(tmp_path, {str(index): layer for index, layer in enumerate(layers)}, None)
    if unsaid:
        with pytest.raises(CheckpointError, match=f"the tensors, which are fp8's, don't tell .*{unsaid}"):
            contents_of(folder)
    else:
        name = "fp8" if layers[0]["weight_scale_inv"].ndim == 0 else "fp8-block"
        assert {scheme.name for scheme in contents_of(folder).manifest.layers.values()} == {name}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": torch.ones(4, 4)}, "this is not a quantized checkpoint"),
        ({"weight": torch.ones(4, 4).bfloat16(), "scales": torch.ones(4)}, "this is not a quantized checkpoint"),
        (
            {"weight": torch.ones(4, 4).char(), "weight_scale": torch.ones(4)},
            "which are qgemm's, don't tell the scheme",
        ),
        ({"weight": torch.ones(4, 4).char(), "weight_scale": torch.ones(4, 1)}, f"compressed-tensors's, {ACTIVATIONS}"),
        ({"a_scale_inv": torch.ones(1), "b": torch.ones(2).to(E4M3)}, "no file holds a quantized layer of that format"),
        ({"qweight": torch.ones(4, 4).int()}, r"0.scales is missing"),
        (MLX, "the tensors don't tell how many bits 0 has, and in which groups: put the quantization there that MLX"),
        (
            {"weight": torch.ones(4, 4).int(), "weight_scale": torch.ones(1, 32)},
            "which are quark's, don't tell whether values are signed, and in which order",
        ),
    ],
)
def test_what_tensors_do_not_tell(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        contents_of(write(tmp_path, {"0": tensors}, None))


def test_mlx_with_its_own_config(tmp_path: Path) -> None:
    folder = write(tmp_path, {"0": MLX}, {"bits": 4, "group_size": 64})
    assert contents_of(folder).manifest.layers["0"].name == "int4-channel-float-zeros"
    assert run_json("inspect", folder)["format"] == "mlx"


def test_bitsandbytes_by_its_tensors(tmp_path: Path) -> None:
    tensors = {"weight": torch.ones(16, 16).char(), "SCB": torch.ones(16), "weight_format": torch.zeros((), dtype=U8)}
    contents = contents_of(write(tmp_path, {"0": tensors}, None))
    assert contents.manifest.layers["0"].name == "int8"
    assert "above 6 (llm_int8_threshold)" in contents.notes[0]  # its default


def test_the_old_name_of_the_settings(tmp_path: Path) -> None:
    folder = without_settings("ct-w4a16-g128", tmp_path / "copy")
    config = read_json(SAMPLES / "ct-w4a16-g128" / "config.json")
    config["compression_config"] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    assert contents_of(folder).manifest == contents_of(SAMPLES / "ct-w4a16-g128").manifest


def with_settings(name: str, folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A sample whose ``quantization_config`` is edited."""
    shutil.copytree(SAMPLES / name, folder)
    edit_quantization(folder, edit)
    return folder


def called(method: str) -> Callable[[dict[str, Any]], object]:
    return lambda quantization: quantization.update(quant_method=method)


# What samples are called in their config, and what they are.
MISNAMED = [
    ("gptq-4bit-g128-sym", "awq", "gptq"),
    ("gptq-8bit-g128-asym", "awq", "gptq"),  # its checkpoint_format says of which version
    ("gptq-4bit-g128-sym", "compressed-tensors", "gptq"),
    ("awq-gemm-g32-skip", "gptq", "awq"),
    ("mxfp4-gpt-oss", "compressed-tensors", "mxfp4"),
    ("torchao-int8wo", "gptq", "torchao"),
    ("bnb-nf4", "fp8", "bitsandbytes"),
    ("fp8-block128", "compressed-tensors", "fp8"),
    ("ct-w4a16-g128", "gptq", "compressed-tensors"),  # its config_groups say the rest
]


@pytest.mark.parametrize(("name", "method", "format"), MISNAMED)
def test_a_config_that_names_another_method(name: str, method: str, format: str, tmp_path: Path) -> None:
    contents = contents_of(with_settings(name, tmp_path / "copy", called(method)))
    wanted = contents_of(SAMPLES / name)
    assert contents.manifest == wanted.manifest
    ours, theirs = values(contents), values(wanted)
    assert all(octets(value) == octets(theirs[key]) for key, value in ours.items())
    note = f"quant_method is '{method}', but the tensors are {format}'s, as which they are read"
    assert contents.notes[-1] == note


@pytest.mark.parametrize(("name", "packing"), [("auto-round-asym", "auto_gptq"), ("auto-round-gptq", "auto_awq")])
def test_autorounds_other_layout(name: str, packing: str, tmp_path: Path) -> None:
    def edit(quantization: dict[str, Any]) -> None:
        quantization["packing_format"] = f"auto_round:{packing}"

    contents, wanted = contents_of(with_settings(name, tmp_path / "copy", edit)), contents_of(SAMPLES / name)
    assert contents.manifest == wanted.manifest
    assert contents.notes[0].startswith(f"packing_format is 'auto_round:{packing}', but the tensors are laid out as ")
    theirs = values(wanted)
    assert all(octets(value) == octets(theirs[key]) for key, value in values(contents).items())


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("ct-fp8-dynamic", "gptq", rf"config.json says that quant_method is 'gptq', and .* fp8's, {ACTIVATIONS}"),
        (
            "fbgemm-fp8",
            "awq",
            rf"quant_method is 'awq', and .* fp8's, {ACTIVATIONS}.*put the quantization_con",
        ),
        ("gptq-4bit-g128-sym", "vptq", "quant_method is 'vptq'; the formats supported are"),
    ],
)
def test_another_method_where_tensors_do_not_tell_enough(name: str, method: str, message: str, tmp_path: Path) -> None:
    def edit(quantization: dict[str, Any]) -> None:
        quantization.pop("config_groups", None)
        quantization.pop("activation_scale_ub", None)
        quantization["quant_method"] = method

    with pytest.raises(CheckpointError, match=message):
        contents_of(with_settings(name, tmp_path / "copy", edit))


@pytest.mark.parametrize("name", [name for name in SAMPLES_ALONE if not name.startswith("bnb")])
def test_a_config_without_a_method(name: str, tmp_path: Path) -> None:
    folder = with_settings(name, tmp_path / "copy", lambda quantization: quantization.pop("quant_method", None))
    contents, wanted = contents_of(folder), contents_of(SAMPLES / name)
    assert contents.manifest == wanted.manifest
    assert contents.notes == wanted.notes
    theirs = values(wanted)
    assert all(octets(value) == octets(theirs[key]) for key, value in values(contents).items())


def test_a_config_that_says_nothing_is_like_none(tmp_path: Path) -> None:
    folder = with_settings("gptq-4bit-g128-sym", tmp_path / "gptq-4bit-g128-sym", dict.clear)
    assert contents_of(folder).manifest.layers.keys() == contents_of(SAMPLES / folder.name).manifest.layers.keys()
    with pytest.raises(CheckpointError, match=ACTIVATIONS):
        contents_of(with_settings("ct-w4a16-g128", tmp_path / "b", dict.clear))


@pytest.mark.parametrize("edit", [called("awq"), lambda quantization: quantization.pop("quant_method")])
def test_transformers_loads_what_is_misnamed(edit: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    name = "gptq-4bit-g128-sym"
    folder = with_settings(name, tmp_path / "copy", edit)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=qgemm.QGemmConfig())
    assert same_tensors(loaded, load_sample(name)[0])
    found = run_json("inspect", folder)
    assert (found["format"], found["loads"], found["problems"]) == ("gptq", True, [])
