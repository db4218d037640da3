"""Checkpoints loaded in another scheme than theirs: the layers are those that the float weights would give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families.schemes import input_scale_for
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import qgemm
from checkpoint.foreign import edit_tensors, relative, same_tensors
from checkpoint.models import Net, swap_linears, tiny_llama
from checkpoint.packers import Layer, linears, write
from checkpoint.rewriting import rewrite_file
from checkpoint.samples import IDS, SAMPLES, load_sample
from qgemm import CheckpointError, QuantLinear
from qgemm.checkpoint import requantize
from qgemm.checkpoint.load import find_matching
from qgemm.nn import LinearLayer, QuantLayer, linear_class
from qgemm.scheme import resolve_scheme

NAMES = [
    "ct-fp8-block",
    "ct-fp8-static",
    "ct-nvfp4a16",
    "gptq-4bit-g64-asym-desc-act",
    "awq-gemm-g32-skip",
    "bnb-nf4-double",
    "bnb-fp4",
    "torchao-fp8wo",
]


def by_way_of_float(layer: LinearLayer, scheme: str) -> dict[str, Tensor]:
    return linear_class(scheme).from_linear(layer.dequantize(torch.float32), scheme).state_dict()


def same(layer: nn.Module, state: dict[str, Tensor]) -> bool:
    own = layer.state_dict()
    return own.keys() == state.keys() and all(torch.equal(own[leaf], value) for leaf, value in state.items())


@pytest.mark.parametrize("name", NAMES)
def test_int8_of_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requantize, "_PIECE", 1000)  # several pieces, the last one shorter
    model: Any = qgemm.load_quantized(SAMPLES / name, scheme="int8")
    plain = load_sample(name)[0]
    layers = {key: layer for key, layer in plain.named_modules() if isinstance(layer, LinearLayer)}
    assert layers
    for key, layer in layers.items():
        made = model.get_submodule(key)
        assert type(made) is QuantLinear
        assert same(made, by_way_of_float(layer, "int8")), key
    with torch.no_grad():
        assert relative(model.float()(IDS).logits, plain(IDS).logits) < 0.1


@pytest.mark.parametrize("scheme", ["int8-hadamard", "int4-32", "int8-weight", "mxfp4", "nvfp4", "nf4"])
def test_other_schemes(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requantize, "_PIECE", 200)
    layer = Layer()
    layer.scale[:8] /= 16  # the global scale is that of the largest piece
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    folder = write(tmp_path, {"a": {**layer.gptq(), "bias": torch.randn(16).half()}}, config)
    made: Any = qgemm.load_quantized(folder, model=linears(bias=True, a=(16, 64)), scheme=scheme)["a"]
    linear = nn.Linear(64, 16)
    linear.weight.data = layer.weight
    wanted = linear_class(scheme).from_linear(linear, scheme).state_dict()
    assert all(torch.equal(value, wanted[leaf]) for leaf, value in made.state_dict().items() if leaf != "bias")
    assert made.bias.dtype == torch.float16


def test_layers_that_have_the_scheme_stay(tmp_path: Path) -> None:
    model = qgemm.quantize_model(Net(), {"block.0": "int4-16", "*": "int8"})
    qgemm.save_quantized(model, tmp_path / "a")
    loaded = qgemm.load_quantized(tmp_path / "a", model=Net, scheme="int8")
    assert isinstance(loaded, Net)
    assert loaded.again is loaded.block[0]
    assert same(loaded.block[0], by_way_of_float(model.block[0], "int8"))
    assert same(loaded.block[3], model.block[3].state_dict())
    assert loaded.head.weight is loaded.embed.weight
    # What was loaded so is saved as what it is.
    qgemm.save_quantized(loaded, tmp_path / "b")
    assert same(qgemm.load_quantized(tmp_path / "b", model=Net), loaded.state_dict())


@pytest.mark.parametrize(
    "scheme", ["int8-static", "int8-static-asymmetric", "int8-hadamard", "int8-outliers-16", "fp8-block"]
)
def test_of_every_kind_of_layer(scheme: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(64, 16, bias=name == "a") for name in "ab"})
    kept = {"outlier_columns": 2 * torch.arange(16)} if "outliers" in scheme else {}
    for name in "ab":
        input_scale = input_scale_for(resolve_scheme(scheme))
        model[name] = linear_class(scheme).from_linear(model[name], scheme, input_scale, **kept)
    qgemm.save_quantized(model, tmp_path)

    def build() -> nn.Module:
        return nn.ModuleDict({name: nn.Linear(64, 16, bias=name == "a") for name in "ab"})

    loaded: Any = qgemm.load_quantized(tmp_path, model=build, scheme="int8")
    for name in "ab":
        if scheme.startswith("int8-static"):  # whose values are int8's already
            assert torch.equal(loaded[name].stored("weight"), model[name].stored("weight"))
            assert torch.equal(loaded[name].weight_scale, model[name].weight_scale)
            bias = model[name].float_bias()
            assert bias is None or torch.equal(loaded[name].bias, bias)
        else:
            assert same(loaded[name], by_way_of_float(model[name], "int8"))


def test_weights_stay_where_only_activations_differ(tmp_path: Path) -> None:
    layers = {"a": Layer(), "b": Layer(bits=8, group_size=64, symmetric=True)}
    layers["b"].scale.abs_()
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    folder = write(tmp_path, {name: layer.gptq() for name, layer in layers.items()}, config)
    sizes = {"a": (16, 64), "b": (16, 64)}
    plain: Any = qgemm.load_quantized(folder, model=linears(**sizes))
    for name, scheme in (("a", "int4-32-asymmetric-int8"), ("b", "int8")):
        loaded: Any = qgemm.load_quantized(folder, model=linears(**sizes), scheme=scheme)
        assert loaded[name].scheme.name == scheme
        assert torch.equal(loaded[name].dequantize(torch.float32).weight, layers[name].weight)
        assert torch.equal(loaded[name].stored("weight"), plain[name].stored("weight"))
    # Products of int8 have no scales below 0.
    layers["b"].scale[3] *= -1
    folder = write(tmp_path, {name: layer.gptq() for name, layer in layers.items()}, config)
    loaded = qgemm.load_quantized(folder, model=linears(**sizes), scheme="int8")
    assert same(loaded["b"], by_way_of_float(qgemm.load_quantized(folder, model=linears(**sizes))["b"], "int8"))


@pytest.mark.parametrize(("before", "after"), [("int4-32", "int4-32-int8"), ("int4-32-int8", "int4-32")])
def test_symmetric_weights_stay_where_only_activations_differ(before: str, after: str, tmp_path: Path) -> None:
    """Though new scales would be rounded otherwise, to multiples of a step."""
    model = nn.ModuleDict({"a": nn.Linear(96, 16)})
    quantized: Any = qgemm.quantize_model(model, before)
    qgemm.save_quantized(quantized, tmp_path)
    loaded: Any = qgemm.load_quantized(tmp_path, model=linears(a=(16, 96), bias=True), scheme=after)
    assert loaded["a"].scheme.name == after
    assert torch.equal(loaded["a"].stored("weight"), quantized["a"].stored("weight"))
    assert torch.equal(loaded["a"].weight_scale, quantized["a"].weight_scale)


def expert_layers(seed: int, **sizes: Any) -> dict[str, Layer]:
    names = [f"model.layers.0.mlp.experts.{e}.{leaf}_proj" for e in range(3) for leaf in ("gate", "up", "down")]
    return {name: Layer(32, 32, seed=seed + i, **sizes) for i, name in enumerate(names)}


def write_mixture(folder: Path, layers: dict[str, Layer]) -> None:
    """GPTQ's files of a mixture, which have a layer for each expert."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 8}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=3, num_experts_per_tok=2))
    tensors = {name: value for name, value in model.state_dict().items() if ".mlp.experts." not in name}
    for name, layer in layers.items():
        tensors |= {f"{name}.{leaf}": value.contiguous() for leaf, value in layer.gptq().items()}
    save_file(tensors, folder / "model.safetensors")
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}
    about = {**model.config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps({**about, "quantization_config": config}))


def assert_experts(experts: Any, layers: dict[str, Layer]) -> None:
    for e in range(3):
        weights = [layers[f"model.layers.0.mlp.experts.{e}.{leaf}_proj"].weight for leaf in ("gate", "up", "down")]
        for name, weight in (("gate_up_proj", torch.cat(weights[:2])), ("down_proj", weights[2])):
            linear = nn.Linear(*weight.t().shape, bias=False)
            linear.weight.data = weight
            wanted = QuantLinear.from_linear(linear)
            assert torch.equal(experts.stored(name)[e], wanted.stored("weight"))
            assert torch.equal(experts.stored(f"{name}_scale")[e], wanted.weight_scale)


def test_experts_in_an_order_of_their_own_become_int8(tmp_path: Path) -> None:
    # For which there are no fused experts.
    layers = expert_layers(0, group_size=16, g_idx=(torch.arange(32) // 16)[torch.randperm(32)])
    write_mixture(tmp_path, layers)
    with pytest.raises(CheckpointError, match=r"experts.0.gate_proj is an expert in int4-16-asymmetric-ordered"):
        qgemm.load_quantized(tmp_path)
    experts: Any = qgemm.load_quantized(tmp_path, scheme="int8").model.layers[0].mlp.experts
    assert experts.scheme.name == "int8"
    assert_experts(experts, layers)


def test_fused_experts_become_int8(tmp_path: Path) -> None:
    layers = expert_layers(10, group_size=16)
    (tmp_path / "gptq").mkdir()
    write_mixture(tmp_path / "gptq", layers)
    model: Any = qgemm.load_quantized(tmp_path / "gptq")
    assert model.model.layers[0].mlp.experts.scheme.name == "int4-16-asymmetric"
    up = model.model.layers[0].mlp.experts.dequantize(torch.float32)["gate_up_proj"][1, 32:]
    assert torch.equal(up, layers["model.layers.0.mlp.experts.1.up_proj"].weight)
    qgemm.save_quantized(model, tmp_path / "own")
    loaded: Any = qgemm.load_quantized(tmp_path / "own", scheme="int8")
    assert_experts(loaded.model.layers[0].mlp.experts, layers)


def test_experts_of_gpt_oss_become_int8() -> None:
    model: Any = qgemm.load_quantized(SAMPLES / "mxfp4-gpt-oss", scheme="int8")
    plain: Any = load_sample("mxfp4-gpt-oss")[0]
    for ours, theirs in zip(model.model.layers, plain.model.layers, strict=True):
        experts, wanted = ours.mlp.experts, theirs.mlp.experts
        assert (experts.scheme.name, wanted.scheme.name) == ("int8", "mxfp4")
        for name, weight in wanted.dequantize(torch.float32).items():
            if not name.endswith("_bias"):
                scale = experts.stored(f"{name}_scale")[..., None]
                assert float((experts.stored(name) * scale - weight).abs().max()) < float(scale.max()) * 0.51
        assert torch.equal(experts.down_proj_bias.float(), wanted.down_proj_bias.float())


@pytest.mark.parametrize(
    ("name", "scheme", "kept"),
    [
        ("nvfp4-modelopt", "int8", []),
        ("ct-w4afp8-packed", "int4-int8", []),
        ("fp8-block128-ue8m0", "fp8-block", ["scales of activations stay in float32"]),
        ("ct-fp8-kv", "int8", ["its scales of keys and values are not used"]),
    ],
)
def test_what_is_asked_of_activations_is_noted_where_they_stay(name: str, scheme: str, kept: list[str]) -> None:
    notes = find_matching(SAMPLES / name, scheme=resolve_scheme(scheme)).contents.notes
    assert len(notes) == len(kept)
    assert all(text in note for text, note in zip(kept, notes, strict=True))


def test_schemes_that_need_data_are_refused() -> None:
    for scheme in ("int8-static", "int8-outliers-16"):
        with pytest.raises(ValueError, match=rf"scheme is '{scheme}', which needs data"):
            qgemm.load_quantized(SAMPLES / NAMES[0], scheme=scheme)
    name = r"model\.layers\.0\.\S+"
    with pytest.raises(ValueError, match=rf"which needs data to run the model on, and {name} has the scheme 'int4"):
        qgemm.load_quantized(SAMPLES / "gptq-4bit-g128-sym", scheme="fp8-static")
    with pytest.raises(ValueError, match="scheme is 'int7'"):
        qgemm.load_quantized(SAMPLES / NAMES[0], scheme="int7")


@pytest.mark.parametrize("name", ["fp8-tensor-static", "ct-fp8-static"])
def test_layers_that_have_a_static_scheme_keep_it(name: str) -> None:
    loaded = qgemm.load_quantized(SAMPLES / name, scheme="fp8-static")
    assert same_tensors(loaded, qgemm.load_quantized(SAMPLES / name))
    assert any(isinstance(each, QuantLayer) and each.scheme.name == "fp8-static" for each in loaded.modules())
    # And in from_pretrained.
    options = {"quantization_config": qgemm.QGemmConfig("fp8-static"), "dtype": loaded.config.dtype}
    assert same_tensors(transformers.AutoModelForCausalLM.from_pretrained(SAMPLES / name, **options), loaded)


def test_weights_that_overflow_name_the_layer(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    layer = Layer()
    folder = write(tmp_path, {"a": {**layer.gptq(), "scales": torch.full((2, 16), 3e38)}}, config)
    model = linears(a=(16, 64))()
    before = model["a"]
    with pytest.raises(CheckpointError, match=r"model.safetensors: a.qweight: weight holds NaN or Inf"):
        qgemm.load_quantized(folder, model=model, scheme="int8")
    assert model["a"] is before


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "no file holds 0.weight_scale of a layer with the scheme 'int4-32'"),
        (torch.ones(16, 1), r"0.weight_scale is torch.float32 \[16, 1\]; it must be torch.bfloat16 \[16, 2\], as the"),
        (torch.ones(16, 2, dtype=torch.int8), r"0.weight_scale is torch.int8 \[16, 2\]; it must be torch.bfloat16"),
    ],
)
def test_what_does_not_fit_its_layer_is_not_converted(value: Tensor | None, problem: str, tmp_path: Path) -> None:
    qgemm.save_quantized(qgemm.quantize_model(nn.Sequential(nn.Linear(64, 16)), "int4-32"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | {"0.weight_scale": value}
    rewrite_file(file, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(CheckpointError, match=problem):
        qgemm.load_quantized(tmp_path, model=lambda: nn.Sequential(nn.Linear(64, 16)), scheme="int8")


def test_nothing_is_kept_of_what_was_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While others are still read: a model would be there twice."""
    taken: list[nn.Module] = []
    take = requantize._take
    monkeypatch.setattr(requantize, "_take", lambda layer, values: (taken.append(layer), take(layer, values)))
    qgemm.load_quantized(SAMPLES / "awq-gemm-g128", scheme="int8")
    count = len(taken)
    qgemm.save_quantized(swap_linears(tiny_llama(False)), tmp_path, format="compressed-tensors")
    name = "model.embed_tokens.weight"
    values, scale = torch.randint(-127, 128, (97, 32), dtype=torch.int8), torch.rand(97, 1)
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: values, f"{name}_scale": scale}))
    with pytest.warns(UserWarning, match="restored to float"):
        qgemm.load_quantized(tmp_path)
    assert len(taken) > count > 0
    assert all(parameter.is_meta for layer in taken for parameter in layer.parameters())
