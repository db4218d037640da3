"""AutoRound's own format: the library's files, whose scales may be negative, and what isn't read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import qgemm
from checkpoint.packers import Layer, linears, write
from checkpoint.samples import layers_in, logit_error
from qgemm import CheckpointError

SCHEMES = {"auto-round-gptq": "int4-32", "auto-round-asym": "int4-32-asymmetric"}
CONFIG = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}


@pytest.mark.parametrize("name", SCHEMES)
def test_samples(name: str) -> None:
    layers = layers_in(SCHEMES[name], name).values()
    negative = sum(int((layer.weight_scale < 0).sum()) for layer in layers)
    share = negative / sum(layer.weight_scale.numel() for layer in layers)
    assert (0.4 < share < 0.6) == (name == "auto-round-gptq")
    # The references are of float parts that weren't rounded to bfloat16 as those in the files.
    assert logit_error(name) < 0.01


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
@pytest.mark.parametrize("bits", [4, 8])
def test_both_packings(bits: int, method: str, tmp_path: Path) -> None:
    layer = Layer(bits=bits, symmetric=bits == 8)
    packings = {"auto_round:auto_gptq": layer.gptq()} | ({"auto_round:auto_awq": layer.awq()} if bits == 4 else {})
    for packing, tensors in packings.items():
        config = {**CONFIG, "quant_method": method, "bits": bits, "sym": bits == 8, "packing_format": packing}
        model: Any = qgemm.load_quantized(write(tmp_path, {"a": tensors}, config), model=linears(a=(16, 64)))
        assert torch.equal(model["a"].dequantize(torch.float32).weight, layer.weight)


# Its packers subtract 1 from zero points for what says "gptq" alone.
@pytest.mark.parametrize(
    ("said", "version"),
    [
        ({"packing_format": "auto_round"}, 2),
        ({"packing_format": "auto_round:exllamav2"}, 2),
        ({"packing_format": "auto_round:tritonv2"}, 2),
        ({"packing_format": "auto_round:gptq"}, 1),
        # Of 2024, before there was a packing_format.
        ({"backend": "auto_round:exllamav2"}, 2),
        ({"backend": "auto_round:triton"}, 2),
        ({"backend": "autoround:exllamav2"}, 2),
        ({"backend": "auto-round:triton"}, 2),
        ({"backend": "autoround:gptq:exllamav2"}, 1),
        ({"backend": "auto_gptq:exllamav2"}, 1),
        ({"backend": "auto", "packing_format": "auto_round:auto_gptq"}, 1),
        ({"backend": "auto"}, 1),
        ({}, 1),
    ],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_are_less_1_where_it_says_gptq(
    bits: int, said: dict[str, str], version: int, tmp_path: Path
) -> None:
    layer = Layer(bits=bits)
    config = {**CONFIG, "bits": bits, "sym": False, **said}
    model: Any = qgemm.load_quantized(write(tmp_path, {"a": layer.gptq(version)}, config), model=linears(a=(16, 64)))
    assert torch.equal(model["a"].dequantize(torch.float32).weight, layer.weight)


E4M3 = {"weight": torch.ones(16, 64).to(torch.float8_e4m3fn), "weight_scale": torch.ones(16, 1)}
FP8 = {"data_type": "fp", "bits": 8, "group_size": -1}
STATIC = {"act_bits": 8, "act_data_type": "fp", "act_group_size": 0, "act_dynamic": False, "fmt": "e4m3"}


@pytest.mark.parametrize(
    ("scale", "config", "scheme"),
    [
        (
            {"weight_scale": (16,), "input_scale": (1,)},
            {**STATIC, "packing_format": "auto_round:fp8_static"},
            "fp8-static",
        ),
        ({"weight_scale": (16, 1)}, {**STATIC, "act_group_size": -1, "act_dynamic": True}, "fp8"),
        (
            {"weight_scale_inv": (1, 1)},
            {**STATIC, "group_size": [128, 128], "act_group_size": 128, "act_dynamic": True},
            "fp8-block",
        ),
        (
            {"weight_scale": (1,)},
            {"group_size": 0, "extra_config": {"b": {"bits": 16}, "c": {"bits": 32}, "d": None}},
            "fp8-weight",
        ),
    ],
)
def test_fp8(scale: dict[str, tuple[int, ...]], config: dict[str, Any], scheme: str, tmp_path: Path) -> None:
    scales = {leaf: torch.full(shape, 0.5, dtype=torch.bfloat16) for leaf, shape in scale.items()}
    tensors = {"weight": torch.full((16, 64), 2.0).to(torch.float8_e4m3fn), "k_scale": torch.ones(1), **scales}
    folder = write(tmp_path, {"a": tensors, "b": {"weight": torch.ones(2, 64)}}, {**CONFIG, **FP8, **config})
    with pytest.warns(UserWarning, match="its scales of keys and values are not used"):
        layer: Any = qgemm.load_quantized(folder, model=linears(a=(16, 64), b=(2, 64)))["a"]
    assert layer.scheme.name == scheme
    assert torch.equal(layer.dequantize(torch.float32).weight, torch.ones(16, 64))
    assert "input_scale" not in scale or float(layer.input_scale) == 0.5


MXFP4 = {
    "weight_packed": torch.zeros(16, 32, dtype=torch.uint8),
    "weight_scale": torch.full((16, 2), 127, dtype=torch.uint8),
}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (E4M3, {**FP8, "act_bits": 8, "act_dynamic": True, "act_group_size": 64}, "act_group_size is 64"),
        (E4M3, {**FP8, "act_bits": 4}, "act_bits is 4"),
        (E4M3, {**FP8, "group_size": [128, 128]}, r"group_size is \[128, 128\]"),
        (E4M3, {**FP8, "data_type": "fp8_e5m2"}, "data_type is 'fp8_e5m2'"),
        (E4M3, {**FP8, "extra_config": {"a": {"bits": 4}}}, "extra_config of 'a' has another kind than its fp8"),
        (MXFP4, {"data_type": "mx_fp", "packing_format": "auto_round:llm_compressor"}, "data_type is 'mx_fp'"),
    ],
)
def test_layouts_of_other_data_types(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, {"a": tensors}, {**CONFIG, **config})
    with pytest.raises(CheckpointError, match=rf"{message}.*, so dequantize it"):
        qgemm.load_quantized(folder, model=linears(a=(16, 64)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"data_type": "mx_fp"}, r"data_type is 'mx_fp'"),
        ({"act_bits": 8}, r"act_bits is 8; with int weights qgemm reads activations in float, 16, so"),
        ({"packing_format": "auto_round:marlin"}, r"packing_format is 'auto_round:marlin'"),
        ({"packing_format": "auto_round:gptq:exllamav2"}, r"packing_format is 'auto_round:gptq:exllamav2'"),
    ],
)
def test_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path, {"a": Layer().gptq()}, {**CONFIG, **config})
    with pytest.raises(CheckpointError, match=message):
        qgemm.load_quantized(folder, model=linears(a=(16, 64)))
