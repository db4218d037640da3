"""What qgemm writes for compressed-tensors: loaded by that library through transformers, and by qgemm again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import qgemm
from checkpoint.foreign import edit_quantization, logits, needs_the_library, relative, same_tensors
from checkpoint.models import Net, quantized_net, tiny_llama
from qgemm import QuantLinear

LAYER = "model.layers.0.self_attn.q_proj"

# The library quantizes activations as well. With the same static scale it gets the same numbers; a scale per token it
# takes as max / 127.5, qgemm as max / 127. In bfloat16 it divides and rounds in bfloat16, which moves values to the
# next of the 256 steps; steps are coarse here with one scale for all layers (quantizing alone is 7 %).
LIMITS = {
    (torch.float32, "int8"): 0.006,
    (torch.float32, "int8-static"): 1e-5,
    (torch.float32, "int8-static-asymmetric"): 1e-5,
    (torch.bfloat16, "int8"): 0.012,
    (torch.bfloat16, "int8-static"): 0.06,
    (torch.bfloat16, "int8-static-asymmetric"): 0.12,  # zero points are added in bfloat16, too
}


def quantized_llama(scheme: str = "int8", dtype: torch.dtype = torch.float32, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = tiny_llama(tied).to(dtype).eval()
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    scales = {"int8-static": dict.fromkeys(names, 0.03), "int8-static-asymmetric": dict.fromkeys(names, (0.03, -20))}
    return qgemm.quantize_model(model, scheme, skip=["model.layers.1.mlp.up_proj"], input_scales=scales.get(scheme))


def test_the_files(tmp_path: Path) -> None:
    model = quantized_llama("int8-static", torch.bfloat16)
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    tensors = load_file(tmp_path / "model.safetensors")
    weight, scale = tensors[f"{LAYER}.weight"], tensors[f"{LAYER}.weight_scale"]
    assert (weight.dtype, list(weight.shape)) == (torch.int8, [32, 32])
    assert (scale.dtype, list(scale.shape)) == (torch.float32, [32, 1])
    assert list(tensors[f"{LAYER}.input_scale"].shape) == [1]
    assert not any("rotary" in name for name in tensors)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["format"] == "int-quantized"
    assert quantization["quantization_status"] == "compressed"
    assert quantization["ignore"] == ["model.layers.1.mlp.up_proj", "lm_head"]
    (group,) = quantization["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["weights"]["strategy"] == "channel"
    assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == ("tensor", False)


@pytest.mark.slow
@needs_the_library
def test_a_checkpoint_that_took_the_place_of_another(tmp_path: Path) -> None:
    # Its files have other names than transformers looks for by itself.
    qgemm.save_quantized(quantized_llama(), tmp_path, format="compressed-tensors")
    (tmp_path / "generation_config.json").write_text("{}")
    model = quantized_llama("int8-static", tied=True)
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors", max_shard_size="10KB", overwrite=True)
    assert not (tmp_path / "model.safetensors").exists()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert relative(logits(loaded), logits(model)) < LIMITS[torch.float32, "int8-static"]
    assert loaded.generation_config.bos_token_id == model.generation_config.bos_token_id
    assert same_tensors(qgemm.load_quantized(tmp_path), model)


# Tied or not, in turn; both with --complete.
READ = [
    pytest.param(scheme, dtype, tied, marks=[] if (number + place) % 2 == tied else [pytest.mark.complete])
    for number, scheme in enumerate(("int8", "int8-static", "int8-static-asymmetric"))
    for place, dtype in enumerate((torch.float32, torch.bfloat16))
    for tied in (False, True)
]


@pytest.mark.slow
@needs_the_library
@pytest.mark.parametrize(("scheme", "dtype", "tied"), READ)
def test_the_library_loads_it(scheme: str, dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    model = quantized_llama(scheme, dtype, tied)
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    layer, ours = theirs.get_submodule(LAYER), model.get_submodule(LAYER)
    assert torch.equal(layer.weight, ours.weight)
    assert torch.equal(layer.weight_scale[:, 0], ours.weight_scale.to(dtype))
    assert not hasattr(theirs.lm_head, "quantization_scheme")
    assert not hasattr(theirs.model.layers[1].mlp.up_proj, "quantization_scheme")
    assert relative(logits(theirs), logits(model)) < LIMITS[dtype, scheme]
    dequantized = theirs.get_submodule(LAYER)
    torch.testing.assert_close(dequantized.weight, ours.dequantize(dtype).weight, rtol=0.01, atol=0)


@pytest.mark.parametrize("scheme", ["int8", "int8-static", "int8-static-asymmetric"])
def test_qgemm_loads_it_bit_for_bit(scheme: str, tmp_path: Path) -> None:
    model = quantized_llama(scheme, tied=True)
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors", max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) >= 3
    loaded = qgemm.load_quantized(tmp_path)
    assert same_tensors(loaded, model)
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@needs_the_library
def test_two_schemes_in_one_model(tmp_path: Path) -> None:
    model = quantized_llama()
    static = QuantLinear.from_linear(model.get_submodule(LAYER).dequantize(), "int8-static", 0.03)
    model.model.layers[0].self_attn.q_proj = static
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    loaded = qgemm.load_quantized(tmp_path)
    assert loaded.get_submodule(LAYER).scheme.name == "int8-static"
    assert torch.equal(logits(loaded), logits(model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.get_submodule(LAYER).quantization_scheme.input_activations.dynamic is False
    assert relative(logits(theirs), logits(model)) < 0.03


def test_a_model_that_is_not_of_transformers(tmp_path: Path) -> None:
    model = quantized_net()
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    loaded = qgemm.load_quantized(tmp_path, model=Net)
    # The library has no way to say that two tensors are one: each is in the files.
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert isinstance(loaded.block[0], QuantLinear)


def test_a_loaded_foreign_checkpoint_is_saved_as_qgemm(tmp_path: Path) -> None:
    model = quantized_llama()
    qgemm.save_quantized(model, tmp_path / "theirs", format="compressed-tensors")
    loaded = qgemm.load_quantized(tmp_path / "theirs")
    qgemm.save_quantized(loaded, tmp_path / "ours")
    again = qgemm.load_quantized(tmp_path / "ours")
    assert same_tensors(again, model)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "qgemm"


def gpt2(cls: type[Any] = transformers.GPT2LMHeadModel, width: int = 32) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "n_embd": width, "n_layer": 1, "n_head": 2, "n_positions": 64, "pad_token_id": 0}
    return cls(transformers.GPT2Config(**sizes)).eval()


def refusal_of(model: nn.Module, folder: Path, format: str = "compressed-tensors") -> str:
    with pytest.raises(ValueError, match=r"Conv1D|packed") as refusal:
        qgemm.save_quantized(model, folder, format=format)
    assert not folder.exists()
    return str(refusal.value)


@pytest.mark.parametrize(("scheme", "width"), [("int8", 32), ("int4-32", 32), ("int4-32-int8", 32), ("int8", 34)])
def test_conv1d_is_refused(scheme: str, width: int, tmp_path: Path) -> None:
    """GPTQ has it, in words of 4 values and more; without it, nothing of this model is quantized."""
    model = qgemm.quantize_model(gpt2(width=width), scheme)
    said, _, ways = refusal_of(model, tmp_path / "new").partition(": ")
    assert (
        said
        == "transformer.h.0.attn.c_attn is a Conv1D in GPT2LMHeadModel, and compressed-tensors supports only nn.Linear"
    )
    wanted = ['save it with format="qgemm"']
    if scheme == "int4-32":
        wanted.append('save it with format="gptq"')
        qgemm.save_quantized(model, tmp_path / "gptq", format="gptq")
    elif width == 32:
        others = ["int8-weight"] if scheme == "int8" else ["int4-32", "int4-channel", "int8-weight"]
        qgemm.save_quantized(model, tmp_path / "ours")
        for other in others:
            loaded = qgemm.load_quantized(tmp_path / "ours", scheme=other)
            qgemm.save_quantized(loaded, tmp_path / other, format="gptq")
        named = " or ".join(", ".join(f'"{other}"' for other in others).rsplit(", ", 1))
        wanted.append(f'load or quantize it with scheme={named} and save it with format="gptq"')
    assert ways == ", or ".join(wanted)


def test_conv1d_is_left_in_float(tmp_path: Path) -> None:
    def quantized(**options: Any) -> nn.Module:
        model = gpt2(transformers.GPT2ForSequenceClassification, width=34)
        return qgemm.quantize_model(model, include=["score"], **options)

    said = refusal_of(quantized(), tmp_path / "new")
    way = 'save it with format="qgemm", or quantize the float model with '
    names = [f"transformer.h.0.{leaf}" for leaf in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    assert said.partition(": ")[2] == f"{way}{', '.join(map(repr, names))} in skip"
    model = quantized(skip=names)
    qgemm.save_quantized(model, tmp_path / "new", format="compressed-tensors")
    assert same_tensors(qgemm.load_quantized(tmp_path / "new"), model)
    # vLLM's layers of GPT-2 are linear ones.
    assert json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]["ignore"] == names


@pytest.mark.parametrize(("format", "library"), [("compressed-tensors", "compressed-tensors"), ("gptq", "GPTQ")])
def test_attention_with_packed_weights_is_refused(format: str, library: str, tmp_path: Path) -> None:
    def quantized(**options: Any) -> nn.Module:
        layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval()
        return qgemm.quantize_model(layers, "int8-weight", **options)

    said = refusal_of(quantized(), tmp_path / "new", format)
    assert said == (
        f"layers.0.self_attn was an nn.MultiheadAttention, whose packed weights {library} can't store: save it with "
        "format=\"qgemm\", or quantize the float model with 'layers.0.self_attn', 'layers.1.self_attn' in skip"
    )
    qgemm.save_quantized(quantized(skip=["layers.0.self_attn", "layers.1.self_attn"]), tmp_path / "new", format=format)
    alone = qgemm.quantize_model(nn.ModuleList([nn.MultiheadAttention(32, 2)]), "int8-weight")
    assert refusal_of(alone, tmp_path / "alone", format).endswith('can\'t store: save it with format="qgemm"')


def test_an_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"format is 'gguf'; it must be one of \('qgemm', "):
        qgemm.save_quantized(quantized_llama(), tmp_path, format="gguf")


def test_what_is_written_is_checked_when_it_is_read(tmp_path: Path) -> None:
    qgemm.save_quantized(quantized_llama(), tmp_path, format="compressed-tensors")
    edit_quantization(tmp_path, lambda q: q["config_groups"]["group_0"]["weights"].update(symmetric=False))
    with pytest.raises(
        qgemm.CheckpointError, match=r"such as layer model.layers.0.\S+, has int8 input.* asymmetric int8 weights"
    ):
        qgemm.load_quantized(tmp_path)
