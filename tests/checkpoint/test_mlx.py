"""MLX's files: a sample that mlx-lm wrote, and the layouts written out value by value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import qgemm
from checkpoint.mlx_layers import affine, small_floats, weight_of
from checkpoint.packers import linears
from checkpoint.samples import load_sample, logit_error, wrong_weights
from qgemm import CheckpointError
from qgemm.nn import WeightOnlyLinear

NAME = "mlx-mixed"


def test_sample() -> None:
    """Each layer has bits, groups and a mode of its own, and the embedding becomes floats."""
    model, warnings = load_sample(NAME)
    assert len(warnings) == 1
    assert warnings[0].endswith("are restored to float as they are loaded: model.embed_tokens")
    schemes = {name: layer.scheme.name for name, layer in model.named_modules() if isinstance(layer, WeightOnlyLinear)}
    block = model.model.layers[0]
    assert schemes["lm_head"] == "int8-weight-float-zeros"
    assert block.self_attn.q_proj.scheme.name == block.mlp.down_proj.scheme.name == "int4-64-float-zeros"
    assert block.self_attn.v_proj.scheme.name == "int8-weight-32-float-zeros"
    assert block.self_attn.o_proj.scheme.name == "mxfp4"
    assert wrong_weights(NAME) == []
    assert logit_error(NAME) < 1e-6


def load(
    folder: Path, tensors: dict[str, Tensor], N: int, K: int, settings: Any, key: str = "quantization", **config: Any
) -> Any:
    save_file(
        {f"a.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "mlx"}
    )
    (folder / "config.json").write_text(json.dumps({key: settings, **config}))
    return qgemm.load_quantized(folder, model=linears(a=(N, K)))["a"]


@pytest.mark.parametrize(
    ("bits", "size", "K", "scheme"),
    [
        (1, 32, 96, "int4-32-float-zeros"),
        (2, 64, 128, "int4-64-float-zeros"),
        (3, 32, 96, "int4-32-float-zeros"),  # values lie across the ends of words
        (4, 128, 256, "int4-float-zeros"),
        (4, 64, 64, "int4-channel-float-zeros"),
        (5, 32, 96, "int8-weight-32-float-zeros"),
        (6, 64, 192, "int8-weight-64-float-zeros"),
        (8, 32, 96, "int8-weight-32-float-zeros"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_bits(bits: int, size: int, K: int, scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = affine(bits, size, 5, K, dtype=dtype)
    layer = load(tmp_path, tensors, 5, K, {"bits": bits, "group_size": size})
    assert layer.scheme.name == scheme
    assert torch.equal(layer.weight_scale, tensors["scales"])
    error = (layer.dequantize(torch.float64).weight - weight_of(tensors, "affine", bits, size)).abs().amax()
    zeros = layer.weight_zero_point.abs().amax()
    assert error <= (2.0**-24 * zeros if bits in (4, 8) else 0.0)


def metal(bits: int, size: int, *shape: int) -> dict[str, Tensor]:
    """The tensors of a layer as transformers' ``MetalConfig`` writes them."""
    tensors = affine(bits, size, *shape)
    biases = tensors.pop("biases")
    return {**tensors, "qbiases": biases}


def test_the_sample_of_transformers_metal_config() -> None:
    model, warned = load_sample("metal-4bit")
    assert warned == []
    assert {layer.scheme.name for layer in model.modules() if isinstance(layer, WeightOnlyLinear)} == {
        "int4-32-float-zeros"
    }
    assert wrong_weights("metal-4bit") == []
    assert logit_error("metal-4bit") < 1e-6


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_transformers_metal_config(bits: int, tmp_path: Path) -> None:
    tensors = metal(bits, 32, 8, 64)
    save_file({f"a.{leaf}": tensor for leaf, tensor in tensors.items()}, tmp_path / "model.safetensors")
    quantization = {"quant_method": "metal", "bits": bits, "group_size": 32, "modules_to_not_convert": ["lm_head"]}
    config = {"model_type": "qwen3_next", "quantization_config": quantization}  # of any model
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = qgemm.load_quantized(tmp_path, model=linears(a=(8, 64)))["a"]
    weight = weight_of({**tensors, "biases": tensors["qbiases"]}, "affine", bits, 32)
    assert (layer.dequantize(torch.float64).weight - weight).abs().amax() <= 2.0**-23 * weight.abs().amax() * 2
    for part, message in (
        ({}, "has no quantization_config of transformers, and the tensors don't tell how many bits a has, and in"),
        ({"quant_method": "metal"}, "has no quantization_config of transformers, and the tensors don't tell how many"),
        ({**quantization, "bits": 7}, "a has 7 bits in groups of 32 values|a.weight is"),
        ({**quantization, "group_size": 48}, r"a.weight is .*words of \d bits in groups of 48"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": part} if part else {}))
        with pytest.raises(CheckpointError, match=message):
            qgemm.load_quantized(tmp_path, model=linears(a=(8, 64)))


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_small_floats(mode: str, tmp_path: Path) -> None:
    tensors, size, bits = small_floats(mode, 5, 96), 16 if mode == "nvfp4" else 32, 8 if mode == "mxfp8" else 4
    settings = {"group_size": size, "bits": bits, "mode": mode}
    layer = load(tmp_path, tensors, 5, 96, settings)
    assert layer.scheme.name == mode
    assert torch.equal(layer.dequantize(torch.float64).weight, weight_of(tensors, mode, bits, size))


def test_what_the_config_says(tmp_path: Path) -> None:
    """A layer's own settings count more than those of all, and MLX's key more than one of before it was converted."""
    tensors = affine(6, 32, 4, 96)
    weight = weight_of(tensors, "affine", 6, 32)
    of_all = {"bits": 4, "group_size": 64, "a": {"bits": 6, "group_size": 32}, "b": False}
    for config in (
        {"settings": of_all},
        {"settings": of_all, "key": "quantization_config"},
        {"settings": {"bits": 6, "group_size": 32, "mode": "affine", "a": True}},
    ):
        layer = load(tmp_path, tensors, 4, 96, **config)
        assert torch.equal(layer.dequantize(torch.float64).weight, weight)
    with pytest.warns(UserWarning, match="quant_method is 'fp8', but the tensors are mlx's, as which they are read"):
        assert load(tmp_path, tensors, 4, 96, of_all, quantization_config={"quant_method": "fp8"})
    floats = small_floats("mxfp4", 4, 96)
    layer = load(tmp_path, floats, 4, 96, {"group_size": 64, "bits": 8, "a": {"mode": "mxfp4"}})
    assert torch.equal(layer.dequantize(torch.float64).weight, weight_of(floats, "mxfp4", 4, 32))


def test_an_index_of_one_file(tmp_path: Path) -> None:
    """MLX writes one beside that file."""
    tensors = affine(4, 64, 4, 128)
    names = {f"a.{name}": "model.safetensors" for name in tensors}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert load(tmp_path, tensors, 4, 128, {"bits": 4, "group_size": 64}).scheme.name == "int4-64-float-zeros"
    for wrong in ({**names, "b": "model-00002-of-00002.safetensors"}, {}):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(CheckpointError, match=r"holds model.safetensors and .*index.json: remove the one"):
            load(tmp_path, tensors, 4, 128, {"bits": 4, "group_size": 64})


def mixture(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {
        "num_key_value_heads": 1,
        "vocab_size": 50,
        "head_dim": 32,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    }
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float32).eval()


@pytest.mark.parametrize(("kind", "holder"), [("mixtral", "block_sparse_moe.switch_mlp"), ("gpt_oss", "mlp.experts")])
@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_experts(kind: str, holder: str, mode: str, tmp_path: Path) -> None:
    """One layer of all experts becomes that of the model; the float model gets its values."""
    model = mixture(kind)
    nn_of = model.model.layers[0].mlp
    gates_and_ups, down, is_oss = nn_of.experts.gate_up_proj.data, nn_of.experts.down_proj.data, kind == "gpt_oss"
    names = {"mlp.gate.weight": "block_sparse_moe.gate.weight"}
    stored = {
        next((name.replace(old, new) for old, new in names.items() if old in name), name): tensor.clone()
        for name, tensor in model.state_dict().items()
        if ".experts." not in name
    }
    for part, (N, K) in {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}.items():
        tensors = small_floats(mode, 3, N, K) if mode == "mxfp4" else affine(4, 32, 3, N, K)
        if mode == "affine":
            tensors |= {leaf: tensors[leaf] / 64 for leaf in ("scales", "biases")}
        weight = weight_of(tensors, mode, 4, 32).float()
        stored |= {f"model.layers.0.{holder}.{part}_proj.{leaf}": tensor for leaf, tensor in tensors.items()}
        target = down if part == "down" else gates_and_ups
        if is_oss:
            index = slice(None) if part == "down" else slice(int(part == "up"), None, 2)
            target[..., index] = weight.transpose(1, 2)
            bias = nn_of.experts.down_proj_bias if part == "down" else nn_of.experts.gate_up_proj_bias
            bias.data[..., index] = torch.randn(3, N)
            stored[f"model.layers.0.{holder}.{part}_proj.bias"] = bias.data[..., index].clone()
        else:
            target[:, slice(None) if part == "down" else slice(96, None) if part == "up" else slice(96)] = weight
    save_file(stored, tmp_path / "model.safetensors")
    settings = {"group_size": 32, "bits": 4, "mode": mode}
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization": settings}))
    loaded: Any = qgemm.load_quantized(tmp_path)
    experts = loaded.model.layers[0].mlp.experts
    assert experts.scheme.name == ("mxfp4" if mode == "mxfp4" else "int4-32-float-zeros")
    ids = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    qgemm.save_quantized(loaded, tmp_path / "saved")
    assert "quantization" not in json.loads((tmp_path / "saved" / "config.json").read_text())


GOOD = affine(4, 64, 4, 128)
SAID = {"bits": 4, "group_size": 64}
REFUSED: dict[str, tuple[dict[str, Tensor], Any, str]] = {
    "other bits": (GOOD, {**SAID, "bits": 7}, "a has 7 bits in groups of 64 values in mode affine, so dequantize"),
    "a text": (GOOD, {**SAID, "bits": "4"}, "a has '4' bits in groups of 64 values"),
    "no groups": (GOOD, {**SAID, "group_size": 0}, "a has 4 bits in groups of 0 values"),
    "another mode": (
        GOOD,
        {**SAID, "mode": "nf4"},
        "a is in mode 'nf4'; qgemm reads MLX's affine, mxfp4, mxfp8, nvfp4",
    ),
    "groups of small floats": (GOOD, {**SAID, "mode": "mxfp4"}, "a has 4 bits in groups of 64 values in mode mxfp4"),
    "small groups": (
        affine(4, 8, 4, 128),
        {**SAID, "group_size": 8},
        "groups of 8 columns; qgemm computes groups of",
    ),
    "fewer words": (GOOD, {**SAID, "bits": 6}, r"a.weight is torch.uint32 \[4, 16\]; it must be \[N, words of 6 bits"),
    "other groups": (
        GOOD,
        {**SAID, "group_size": 32},
        r"a.scales is torch.float16 \[4, 2\]; it must be of a float dtype",
    ),
    "no scales of its own": ({**GOOD, "scales": GOOD["scales"][:2]}, SAID, r"a.scales is torch.float16 \[2, 2\]"),
    "no biases": ({name: GOOD[name] for name in ("weight", "scales")}, SAID, "a.biases is missing"),
    "whole scales": ({**GOOD, "scales": GOOD["scales"].view(torch.int16)}, SAID, "a.scales is torch.int16"),
    "scales of small floats": (
        GOOD,
        {"mode": "mxfp4", "bits": 4, "group_size": 32},
        r"a.scales is torch.float16 \[4, 2\]; it must be torch.uint8, \[4, 4\]",
    ),
    "experts elsewhere": (affine(4, 64, 2, 4, 128), SAID, r"a.weight is torch.uint32 \[2, 4, 16\]; it must be"),
    "no settings": (GOOD, {"a": False}, "don't tell how many bits a has, and in which groups: put the quantization"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    tensors, settings, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, tensors, 4, 128, settings, "quantization_config")


@pytest.mark.parametrize("kind", ["qwen3_next", "gemma3", None, 7])
def test_models_that_mlx_changes(kind: Any, tmp_path: Path) -> None:
    config = {} if kind is None else {"model_type": kind}
    if kind is None:
        assert load(tmp_path, GOOD, 4, 128, SAID, **config)
        return
    with pytest.raises(CheckpointError, match=f"model_type is {kind!r}, whose weights MLX may store in another form"):
        load(tmp_path, GOOD, 4, 128, SAID, **config)


@pytest.mark.parametrize("leaf", ["scales", "biases"])
def test_nan(leaf: str, tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in GOOD.items()}
    tensors[leaf][3, 1] = torch.nan
    with pytest.raises(CheckpointError, match=rf"a\.{leaf} holds NaN"):
        load(tmp_path, tensors, 4, 128, SAID)
    octets = small_floats("nvfp4", 4, 128)
    octets["scales"][1, 1] = 0x7F
    with pytest.raises(CheckpointError, match=r"a\.scales holds NaN"):
        load(tmp_path, octets, 4, 128, {"mode": "nvfp4", "bits": 4, "group_size": 16})
