"""GPTQ's files as qgemm writes them: read field by field as the format is described, and by ``load_quantized``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import qgemm
from checkpoint.foreign import logits, same_tensors
from checkpoint.models import tiny_llama
from checkpoint.packers import linears
from checkpoint.samples import SAMPLES, load_sample
from qgemm.nn import WeightOnlyLinear, linear_class

SCHEMES = ["int4-32", "int4-channel", "int4-16-asymmetric", "int8-weight", "int8-weight-32-asymmetric", "int4"]


def field(words: Tensor, index: int, bits: int) -> Tensor:
    """Field ``index`` of each row of words, as their description says."""
    per_word = 32 // bits
    return (words[:, index // per_word].long() >> bits * (index % per_word)) & (2**bits - 1)


def decode(tensors: dict[str, Tensor], name: str, bits: int) -> Tensor:
    """float32 ``[N, K]`` of version 2: ``scales[g] * (q - zeros[g])``, transposed."""
    qweight, qzeros, scales, g_idx = (tensors[f"{name}.{leaf}"] for leaf in ("qweight", "qzeros", "scales", "g_idx"))
    assert (qweight.dtype, qzeros.dtype, g_idx.dtype) == (torch.int32, torch.int32, torch.int32)
    columns = [
        (field(qweight.t(), k, bits) - zeros_of(qzeros, int(group), scales.shape[1], bits)) * scales[int(group)].float()
        for k, group in enumerate(g_idx)
    ]
    return torch.stack(columns, dim=1)


def zeros_of(qzeros: Tensor, group: int, N: int, bits: int) -> Tensor:
    return torch.cat([field(qzeros[group : group + 1], n, bits) for n in range(N)])


def net(*schemes: str | None, K: int = 64) -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict({f"layer{i}": nn.Linear(K, 16, bias=i % 2 == 0) for i in range(len(schemes))})
    for i, scheme in enumerate(schemes):
        if scheme is not None:
            model[f"layer{i}"] = linear_class(scheme).from_linear(model[f"layer{i}"], scheme)
    return model


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_field_is_where_the_format_has_it(scheme: str, tmp_path: Path) -> None:
    K = 256 if scheme == "int4" else 64
    model = net(scheme, K=K)
    qgemm.save_quantized(model, tmp_path, format="gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    layer: Any = model["layer0"]
    config = config_of(tmp_path)
    assert torch.equal(decode(tensors, "layer0", config["bits"]), layer.dequantize(torch.float32).weight)
    wanted = {
        "bits": layer.form.bits,
        "group_size": layer.scheme.weight.group_size or -1,
        "sym": "asym" not in scheme,
        "desc_act": False,
        "checkpoint_format": "gptq_v2",
        "lm_head": False,
    }
    assert wanted.items() <= config.items()
    assert "dynamic" not in config
    again: Any = qgemm.load_quantized(tmp_path, model=linears(bias=True, layer0=(16, K)))
    assert same_tensors(again, model)
    assert again["layer0"].scheme == layer.scheme


def test_layers_of_several_schemes_are_named(tmp_path: Path) -> None:
    model = net("int4-32", "int8-weight-asymmetric", None, "int4-32")
    qgemm.save_quantized(model, tmp_path, format="gptq")
    assert config_of(tmp_path)["dynamic"] == {
        r"+:^layer1$": {"bits": 8, "group_size": -1, "sym": False, "desc_act": False},
        r"-:^layer2$": {},
    }
    sizes = {f"layer{i}": (16, 64) for i in range(4)}
    build = linears(**sizes)()
    for i in (0, 2):
        build[f"layer{i}"] = nn.Linear(64, 16)
    assert same_tensors(qgemm.load_quantized(tmp_path, model=build), model)


@pytest.mark.parametrize("name", ["gptq-4bit-g64-asym-desc-act", "gptq-8bit-g128-asym", "awq-gemm-g32-skip"])
def test_samples_there_and_back(name: str, tmp_path: Path) -> None:
    model = qgemm.load_quantized(SAMPLES / name)
    qgemm.save_quantized(model, tmp_path, format="gptq")
    assert same_tensors(qgemm.load_quantized(tmp_path).float(), load_sample(name)[0])
    if name == "gptq-4bit-g64-asym-desc-act":  # whose files have the same layout, but for the version
        ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path, SAMPLES / name))
        ones = 0x11111111
        for key, tensor in theirs.items():
            assert torch.equal(ours[key], tensor + ones if key.endswith("qzeros") else tensor), key
        assert ours.keys() - {"model.rotary_emb.inv_freq"} == theirs.keys()


def test_a_transformers_model(tmp_path: Path) -> None:
    model = qgemm.quantize_model(tiny_llama().eval(), "int4-16", skip="*.down_proj")
    qgemm.save_quantized(model, tmp_path, format="gptq", max_shard_size="20KB")
    config = config_of(tmp_path)
    assert r"-:^model\.layers\.1\.mlp\.down_proj$" in config["dynamic"]
    loaded = qgemm.load_quantized(tmp_path)
    assert same_tensors(loaded, model)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("scheme", ["int4-16", "int4-16-asymmetric", "int8-weight"])
def test_experts_are_a_layer_each(scheme: str, tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 97}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=3, num_experts_per_tok=2)).eval()
    model = qgemm.quantize_model(model, {"*.experts*": scheme, "*": "int4-32"}, progress=False)
    qgemm.save_quantized(model, tmp_path, format="gptq")
    config, tensors = config_of(tmp_path), load_file(tmp_path / "model.safetensors")
    experts = model.model.layers[0].mlp.experts
    weight = experts.dequantize(torch.float32)["gate_up_proj"][2, 32:]
    name = "model.layers.0.mlp.experts.2.up_proj"
    assert torch.equal(decode(tensors, name, 8 if scheme == "int8-weight" else 4), weight)
    assert [key for key in config["dynamic"] if key.startswith("+")] == [r"+:^model\.layers\.0\.mlp\.experts\.\d+\."]
    assert r"-:^model\.layers\.0\.mlp\.gate$" in config["dynamic"]
    loaded = qgemm.load_quantized(tmp_path)
    assert same_tensors(loaded, model)
    assert torch.equal(logits(loaded), logits(model))


# With the schemes in which it does.
REFUSED: dict[str, tuple[nn.ModuleDict, str, list[str]]] = {
    "int8": (net("int8"), r"layer0 has the scheme 'int8', and GPTQ stores int4", ["int8-weight"]),
    "fp8": (net("fp8"), r"layer0 has the scheme 'fp8', and GPTQ stores int4", ["int8-weight"]),
    "nf4": (net("nf4"), r"layer0 has the scheme 'nf4'", ["int4-64", "int4-channel", "int8-weight"]),
    "float zero points": (
        net("int4-32-float-zeros"),
        r"layer0 has the scheme 'int4-32-float-zeros', and GPTQ stores int4 and int8-weight schemes with whole zero",
        ["int4-64-asymmetric", "int4-channel-asymmetric", "int8-weight"],
    ),
    "int8 columns": (net("int4-channel", K=60), r"layer0 has 60 input columns, not a multiple of 8", ["int8-weight"]),
    "no columns": (net("int8-weight", K=62), r"layer0 has 62 input columns, not a multiple of 4", []),
    "a short group": (
        net("int4-32", "int4-32", K=80),
        r"layer0 has 80 input columns, not a multiple of 32",
        ["int4-16", "int4-channel", "int8-weight"],
    ),
    "a large group": (
        net("int4", K=96),
        r"layer0 has 96 input columns, not a multiple of 128",
        ["int4-32", "int4-channel", "int8-weight"],
    ),
    "zero points": (
        net("int4-asymmetric", K=192),
        r"layer0 has 192 input columns, not a multiple of 128",
        ["int4-64-asymmetric", "int4-channel-asymmetric", "int8-weight"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_gptq_cannot_store(case: str, tmp_path: Path) -> None:
    model, message, schemes = REFUSED[case]
    with pytest.raises(ValueError, match=message) as refusal:
        qgemm.save_quantized(model, tmp_path / "new", format="gptq")
    assert not (tmp_path / "new").exists()
    said = str(refusal.value)
    assert 'save it with format="qgemm"' in said
    assert re.findall('"(.*?)"', said.partition(", or load or quantize it with scheme=")[2]) == schemes
    qgemm.save_quantized(model, tmp_path / "ours")
    for index, scheme in enumerate(schemes):
        like = nn.ModuleDict({name: nn.Linear(layer.in_features, 16) for name, layer in model.items()})
        for name, layer in model.items():
            like[name].bias = layer.bias
        loaded = qgemm.load_quantized(tmp_path / "ours", model=like, scheme=scheme)
        qgemm.save_quantized(loaded, tmp_path / str(index), format="gptq")


def test_a_zero_point_beyond_the_fields(tmp_path: Path) -> None:
    model = net("int4-32-asymmetric")
    model["layer0"].weight_zero_point.data[3, 1] = 8
    with pytest.raises(ValueError, match="layer0 has a zero point of 8, which GPTQ can't store"):
        qgemm.save_quantized(model, tmp_path, format="gptq")


def test_rows_that_do_not_fill_words(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": WeightOnlyLinear.from_linear(nn.Linear(64, 15), "int4-32")})
    with pytest.raises(ValueError, match="a has 15 output columns, not a multiple of 8"):
        qgemm.save_quantized(model, tmp_path, format="gptq")
