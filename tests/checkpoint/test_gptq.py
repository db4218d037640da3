"""GPTQ's checkpoints: GPTQModel's own, and layers packed by hand where its files have no such thing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import qgemm
from checkpoint.foreign import edit_quantization, edit_tensors
from checkpoint.packers import Layer, linears, write
from checkpoint.samples import IDS, SAMPLES, layers_in, load_sample, logit_error
from qgemm import CheckpointError
from qgemm.checkpoint import packed_layers
from qgemm.nn import LinearLayer

SCHEMES = {
    "gptq-4bit-g128-sym": "int4",
    "gptq-4bit-g32-desc-act": "int4-32-ordered",
    "gptq-4bit-g64-asym-desc-act": "int4-64-asymmetric-ordered",
    "gptq-8bit-channel": "int8-weight",
    "gptq-8bit-g128-asym": "int8-weight-128-asymmetric",
    "gptq-v2-4bit-g64-asym": "int4-64-asymmetric",
}
V1 = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq", "desc_act": False}


def read(folder: Path, **sizes: tuple[int, int]) -> Any:
    return qgemm.load_quantized(folder, model=linears(**(sizes or {"a": (16, 64)})))


def weight_of(layer: LinearLayer) -> Tensor:
    return layer.dequantize(torch.float32).weight


@pytest.mark.parametrize("name", SCHEMES)
def test_samples(name: str) -> None:
    layers = layers_in(SCHEMES[name], name).values()
    assert {layer.weight_scale.dtype for layer in layers} == {torch.float16}
    # The references are of float parts in float16 or float32, which the files have in bfloat16.
    assert logit_error(name) < 0.01


@pytest.mark.parametrize("name", [name for name in SCHEMES if "-4bit-g" in name and not name.endswith("g128-sym")])
@torch.no_grad()
def test_logits_with_the_float_parts_of_the_reference(name: str) -> None:
    # They are in the AWQ sample, which was made of the same float model.
    model, parts = qgemm.load_quantized(SAMPLES / name).float(), load_file(SAMPLES / "awq-gemm-g128/model.safetensors")
    for key, parameter in model.named_parameters():
        if key in parts and "_proj" not in key:
            assert torch.equal(parameter.bfloat16(), parts[key].bfloat16())
            parameter.copy_(parts[key])
    wanted = load_file(SAMPLES / name / "reference_logits.safetensors")["logits"]
    assert float((model(IDS).logits - wanted).abs().max() / wanted.abs().max()) < 1e-6


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("K", [64, 80])  # 80: a last group of 16
def test_by_the_documented_layout(
    bits: int, version: int, K: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_layers, "_PIECE", 500)  # eight rows at a time
    layer = Layer(K=K, bits=bits)
    # A zero point of 0 borrows from its neighbor in version 1, and 15 is the largest.
    layer.z[:4] = torch.tensor([0, 0, 2**bits - 1, 0])[:, None]
    config = {**V1, "bits": bits, "checkpoint_format": ["gptq", "gptq_v2"][version - 1]}
    model = read(write(tmp_path, {"a": layer.gptq(version)}, config), a=(16, K))
    assert torch.equal(weight_of(model["a"]), layer.weight)
    assert model["a"].weight_zero_point.dtype == torch.int8
    x = torch.randn(3, K)
    torch.testing.assert_close(model["a"](x), x @ layer.weight.t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("written", [1, 2])
@pytest.mark.parametrize("said", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_symmetric_layers_tell_the_version(
    bits: int, said: str | None, written: int, tmp_path: Path
) -> None:
    layer = Layer(bits=bits, symmetric=True)
    config = {**V1, "bits": bits, "sym": True, "checkpoint_format": said}
    model = read(write(tmp_path, {"a": layer.gptq(written)}, config))
    assert model["a"].weight_zero_point is None
    assert torch.equal(weight_of(model["a"]), layer.weight)


def test_the_version_of_symmetric_layers_is_that_of_the_others(tmp_path: Path) -> None:
    layers = {"a": Layer(symmetric=True), "b": Layer(seed=1)}
    folder = write(tmp_path, {name: layer.gptq(2) for name, layer in layers.items()}, {**V1, "sym": True})
    model = read(folder, a=(16, 64), b=(16, 64))
    assert [layer.scheme.name for layer in model.values()] == ["int4-32", "int4-32-asymmetric"]
    assert all(torch.equal(weight_of(model[name]), layer.weight) for name, layer in layers.items())


def test_asymmetric_layers_are_of_the_version_that_the_config_says(tmp_path: Path) -> None:
    layer = Layer()
    layer.z[:] = 8
    model = read(write(tmp_path, {"a": layer.gptq(2)}, {**V1, "checkpoint_format": "gptq_v2"}))
    assert torch.equal(weight_of(model["a"]), layer.weight)


@pytest.mark.parametrize("z", [6, 7, 8, 9, 10])
def test_a_zero_point_beside_the_middle_is_kept(z: int, tmp_path: Path) -> None:
    layer = Layer()
    layer.z[:] = z
    model = read(write(tmp_path, {"a": layer.gptq()}, V1))
    assert (model["a"].weight_zero_point is None) == (z == 8)
    assert torch.equal(weight_of(model["a"]), layer.weight)


def test_symmetric_layers_of_both_versions(tmp_path: Path) -> None:
    layers = {"a": Layer(symmetric=True), "b": Layer(symmetric=True, seed=1)}
    tensors = {name: layer.gptq(version) for version, (name, layer) in enumerate(layers.items(), 1)}
    model = read(write(tmp_path, tensors, {**V1, "sym": True}), a=(16, 64), b=(16, 64))
    assert [layer.scheme.name for layer in model.values()] == ["int4-32", "int4-32"]
    assert all(torch.equal(weight_of(model[name]), layer.weight) for name, layer in layers.items())


@pytest.mark.parametrize("said", [-1, 0, 64])
def test_groups_are_as_many_as_there_are_scales(said: int, tmp_path: Path) -> None:
    layer = Layer()
    model = read(write(tmp_path, {"a": layer.gptq()}, {**V1, "group_size": said}))
    assert torch.equal(weight_of(model["a"]), layer.weight)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("ordered", [True, False])
def test_groups_in_an_order_of_their_own(
    ordered: bool, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_layers, "_PIECE", 500)
    g_idx = torch.arange(64) // 32
    layer = Layer(bits=bits, g_idx=g_idx[torch.randperm(64)] if ordered else g_idx)
    # What desc_act says doesn't matter.
    model = read(write(tmp_path, {"a": layer.gptq()}, {**V1, "bits": bits, "desc_act": not ordered}))
    assert (model["a"].input_order is not None) == ordered
    assert model["a"].stored("weight").is_contiguous()
    assert torch.equal(weight_of(model["a"]), layer.weight)
    x = torch.randn(3, 64)
    torch.testing.assert_close(model["a"](x), x @ layer.weight.t(), rtol=1e-5, atol=1e-4)


def test_a_whole_row_needs_no_order(tmp_path: Path) -> None:
    layer = Layer(group_size=64)
    model = read(write(tmp_path, {"a": layer.gptq()}, {**V1, "desc_act": True, "group_size": -1}))
    assert torch.equal(weight_of(model["a"]), layer.weight)


@pytest.mark.parametrize("config", [V1, None])
def test_an_order_of_zeros_is_none(config: dict[str, Any] | None, tmp_path: Path) -> None:
    # As GPTQ-for-LLaMa left it where it didn't order columns.
    layer = Layer(symmetric=config is None)
    tensors = {**layer.gptq(), "g_idx": torch.zeros(64, dtype=torch.int32)}
    model = read(write(tmp_path, {"a": tensors}, config))
    assert model["a"].scheme.name == ("int4-32-asymmetric" if config else "int4-32")
    assert torch.equal(weight_of(model["a"]), layer.weight)


def test_layers_of_several_bits_and_groups(tmp_path: Path) -> None:
    layers = {"a": Layer(bits=4), "b": Layer(bits=8), "c": Layer(group_size=16), "d": Layer(group_size=64)}
    config = {**V1, "dynamic": {"b": {"bits": 8}, "+:c": {"group_size": 16}, "-:e": {}}}
    folder = write(tmp_path, {name: layer.gptq() for name, layer in layers.items()}, config)
    model = read(folder, **dict.fromkeys(layers, (16, 64)))
    names = ["int4-32-asymmetric", "int8-weight-32-asymmetric", "int4-16-asymmetric", "int4-channel-asymmetric"]
    assert [layer.scheme.name for layer in model.values()] == names
    assert all(torch.equal(weight_of(model[name]), layer.weight) for name, layer in layers.items())


def test_a_config_in_a_file_of_its_own(tmp_path: Path) -> None:
    layer = Layer()
    folder = write(tmp_path, {"a": layer.gptq()}, None)
    own = {
        "bits": 4,
        "group_size": 32,
        "damp_percent": 0.01,
        "desc_act": False,
        "sym": False,
        "model_name_or_path": None,
    }
    (folder / "quantize_config.json").write_text(json.dumps(own))
    assert torch.equal(weight_of(read(folder)["a"]), layer.weight)
    # So old a version may have named the file after what is in it.
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")
    assert torch.equal(weight_of(read(folder)["a"]), layer.weight)
    shutil.copy(folder / "gptq_model-4bit-32g.safetensors", folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read(folder)
    (folder / "other.safetensors").unlink()
    (folder / "quantize_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"quantize_config.json"):
        read(folder)


def test_a_bias_that_the_model_does_not_have(tmp_path: Path) -> None:
    # Old versions stored zeros for layers without one.
    layer = Layer()
    write(tmp_path, {"a": {**layer.gptq(), "bias": torch.zeros(16).half()}}, V1)
    model = read(tmp_path)
    assert model["a"].bias is None
    assert torch.equal(weight_of(model["a"]), layer.weight)
    write(tmp_path, {"a": {**layer.gptq(), "bias": torch.ones(16).half()}}, V1)
    with pytest.raises(CheckpointError, match=r"a\.bias: the bias is not 0, but the model's layer has none"):
        read(tmp_path)


def test_positions_that_old_versions_stored(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SAMPLES / "gptq-8bit-channel", tmp_path / "copy"))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(16)}))
    model = qgemm.load_quantized(folder)
    assert torch.equal(model.model.rotary_emb.inv_freq, load_sample("gptq-8bit-channel")[0].model.rotary_emb.inv_freq)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "2 bits": ({"bits": 2}, {"qweight": (4, 16), "qzeros": (2, 1)}, r"layer a has 2 bits; qgemm reads GPTQ of 4 and 8"),
    "3 bits": ({"bits": 3}, {"qweight": (6, 16), "qzeros": (2, 2)}, r"layer a has 3 bits"),
    "unsaid bits": ({}, {"qweight": (6, 32), "qzeros": (2, 3), "scales": torch.ones(2, 32).half()}, r"a has 3 bits"),
    "5 bits": ({"bits": 5}, {"qweight": (10, 16), "qzeros": (2, 3)}, r"layer a has 5 bits"),
    "marlin": ({"checkpoint_format": "marlin"}, {}, r"is 'marlin'; qgemm reads 'gptq' and 'gptq_v2', so dequantize it"),
    "old marlin": ({"is_marlin_format": True}, {}, r"checkpoint_format is 'marlin'"),
    "a list": ({"checkpoint_format": ["gptq"]}, {}, r"checkpoint_format is \['gptq'\]"),
    "int16": ({"pack_dtype": "int16"}, {}, r"pack_dtype is 'int16'"),
    "no bits": ({"bits": None}, {}, r"bits is None; it must be a whole number"),
    "true bits": ({"bits": True}, {}, r"bits is True"),
    "no scales": ({}, {"scales": None}, r"a.scales is missing"),
    "no zeros": ({}, {"qzeros": None}, r"a.qzeros is missing"),
    "int8 weight": ({}, {"qweight": torch.zeros(8, 16, dtype=torch.int8)}, r"a.qweight is torch.int8"),
    "short weight": ({}, {"qweight": (7, 16)}, r"layer a has the shape \[16, 56\]; the model's is \[16, 64\]"),
    "transposed": ({}, {"qweight": (16, 8)}, r"a.qweight is torch.int32 \[16, 8\]"),
    "few groups": ({}, {"scales": torch.ones(3, 16).half(), "qzeros": (3, 2)}, r"scales of groups of 32 of 64"),
    "odd groups": (
        {},
        {"scales": torch.ones(8, 16).half(), "qzeros": (8, 2)},
        r"groups of 8 columns; .* multiple of 16",
    ),
    "int scales": ({}, {"scales": torch.ones(2, 16).int()}, r"a.scales is torch.int32"),
    "NaN": ({}, {"scales": torch.full((2, 16), torch.nan).half()}, r"a.scales holds NaN"),
    "g_idx of 63": ({}, {"g_idx": torch.zeros(63, dtype=torch.int32)}, r"a.g_idx is torch.int32 \[63\]"),
    "g_idx of floats": ({}, {"g_idx": torch.zeros(64)}, r"a.g_idx is torch.float32"),
    "one group": ({}, {"g_idx": torch.ones(64, dtype=torch.int32)}, r"g_idx doesn't put 32 of 64 columns into each"),
    "an order of 0": ({"desc_act": True}, {"g_idx": torch.zeros(64, dtype=torch.int32)}, r"g_idx doesn't put 32 of 64"),
    "group -1": ({}, {"g_idx": torch.arange(64).int() // 32 - 1}, r"g_idx doesn't put 32"),
    "group 2^31": ({}, {"g_idx": torch.full((64,), 2**31 - 1, dtype=torch.int32)}, r"g_idx doesn't put 32"),
    "no g_idx": ({"desc_act": True}, {}, r"model.safetensors: desc_act is true, but layer a has no g_idx"),
    "another weight": ({}, {"weight": torch.zeros(16, 64)}, r"holds both a.qweight and a.weight"),
    "no layer": ({}, {"qweight": None}, r"no file holds a quantized layer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    config, tensors, message = REFUSED[case]
    found: dict[str, Any] = {**Layer().gptq(), **tensors}
    for leaf, value in list(found.items()):
        if value is None:
            del found[leaf]
        elif isinstance(value, tuple):
            found[leaf] = torch.zeros(value, dtype=torch.int32)
    with pytest.raises(CheckpointError, match=message):
        read(write(tmp_path, {"a": found}, {**V1, **config}))


def test_damage_of_a_sample_names_file_and_tensor(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SAMPLES / "gptq-4bit-g32-desc-act", tmp_path / "copy"))
    name = "model.layers.1.mlp.down_proj.g_idx"
    edit_tensors(folder, lambda tensors: tensors[name].zero_())
    with pytest.raises(CheckpointError, match=rf"model.safetensors: {name} doesn't put 32"):
        qgemm.load_quantized(folder)
    edit_quantization(folder, lambda config: config.update(checkpoint_format="gptq_p"))
    with pytest.raises(CheckpointError, match=r"config.json: checkpoint_format is 'gptq_p'"):
        qgemm.load_quantized(folder)
