"""compressed-tensors' packed 4-bit weights: read as that library wrote them, written for it, damaged and refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import qgemm
from checkpoint.foreign import edit_quantization, edit_tensors, logits, needs_the_library, relative, same_tensors
from qgemm.checkpoint import CheckpointError
from qgemm.checkpoint.pack_quantized import pack_words, unpack_words
from qgemm.nn import QuantLinear, WeightOnlyLinear
from qgemm.numerics.packing import pack_codes

LAYER = "model.layers.0.self_attn.q_proj"
SCHEMES = pytest.mark.parametrize("scheme", ["int4", "int4-channel"])


def llama(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Of two groups in most layers, three in some."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


def quantized(scheme: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return qgemm.quantize_model(llama(dtype), scheme, skip=["model.layers.1.mlp.up_proj"])


def write_with_library(folder: Path, scheme: str) -> None:
    """A bfloat16 Llama quantized by compressed-tensors, saved by transformers."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    model = llama()
    size = {"strategy": "group", "group_size": 128} if scheme == "int4" else {"strategy": "channel"}
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": True, **size}}
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head", "re:.*layers.1.mlp.up_proj"])
    apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        if (found := getattr(module, "quantization_scheme", None)) is not None:
            rows = module.weight.detach().unflatten(1, (-1, 128 if scheme == "int4" else module.in_features))
            scale, _ = calculate_qparams(rows.amin(-1), rows.amax(-1), found.weights)
            module.weight_scale.data.copy_(scale)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="compressed-tensors takes Python 3.11 or newer")
@pytest.mark.parametrize("K", [1, 7, 8, 9, 70])
def test_words_are_those_of_compressed_tensors(K: int) -> None:
    from compressed_tensors.compressors.pack_quantized import pack_to_int32

    values = torch.randint(-8, 8, (5, K), dtype=torch.int8)
    words = pack_to_int32(values, 4)
    fields = (values + 8).to(torch.uint8)
    assert torch.equal(unpack_words(words, K), fields)
    assert torch.equal(pack_words(fields), words)


@needs_the_library
@SCHEMES
def test_what_the_library_wrote(scheme: str, tmp_path: Path) -> None:
    write_with_library(tmp_path, scheme)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["format"] == "pack-quantized"
    loaded = qgemm.load_quantized(tmp_path)
    layer, stored = loaded.get_submodule(LAYER), load_file(tmp_path / "model.safetensors")
    assert isinstance(layer, WeightOnlyLinear)
    assert layer.scheme.name == scheme
    words = stored[f"{LAYER}.weight_packed"]
    assert torch.equal(layer.weight, pack_codes(unpack_words(words, layer.in_features) ^ 8))
    assert layer.weight_scale.dtype == torch.bfloat16
    assert torch.equal(layer.weight_scale, stored[f"{LAYER}.weight_scale"])
    assert type(loaded.model.layers[1].mlp.up_proj) is nn.Linear
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    wanted = logits(theirs)  # which unpacks the weights, in the model's dtype
    torch.testing.assert_close(layer.dequantize(torch.bfloat16).weight, theirs.get_submodule(LAYER).weight)
    assert relative(logits(loaded), wanted) < 0.01
    # It is saved as qgemm's own, and comes back.
    qgemm.save_quantized(loaded, tmp_path / "ours")
    again = qgemm.load_quantized(tmp_path / "ours")
    assert same_tensors(again, loaded)
    assert torch.equal(logits(again), logits(loaded))


@SCHEMES
def test_the_files(scheme: str, tmp_path: Path) -> None:
    model = quantized(scheme, torch.float32)
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors", max_shard_size="100KB")
    loaded = qgemm.load_quantized(tmp_path)
    assert same_tensors(loaded, model)
    assert torch.equal(logits(loaded), logits(model))
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["format"] == "pack-quantized"
    (group,) = config["config_groups"].values()
    assert group["weights"]["num_bits"] == 4
    assert group["input_activations"] is None
    assert config["ignore"] == ["model.layers.1.mlp.up_proj", "lm_head"]


@needs_the_library
@SCHEMES
def test_the_library_loads_it(scheme: str, tmp_path: Path) -> None:
    model = quantized(scheme)
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = model.get_submodule(LAYER)
    assert relative(logits(theirs), logits(model)) < 0.02
    # The library reads scales in the model's dtype.
    dequantized = ours.dequantize(torch.bfloat16).weight
    torch.testing.assert_close(theirs.get_submodule(LAYER).weight, dequantized, rtol=0.01, atol=0)
    assert not hasattr(theirs.lm_head, "quantization_scheme")


@needs_the_library
def test_three_schemes_in_one_model(tmp_path: Path) -> None:
    model = quantized("int4", torch.float32)
    layers = model.model.layers
    for name, cls, scheme in (("q_proj", QuantLinear, "int8"), ("k_proj", WeightOnlyLinear, "int4-channel")):
        for layer in layers:
            linear = getattr(layer.self_attn, name).dequantize(torch.float32)
            setattr(layer.self_attn, name, cls.from_linear(linear, scheme))
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    loaded = qgemm.load_quantized(tmp_path)
    assert same_tensors(loaded, model)
    attention = loaded.model.layers[0].self_attn
    schemes = [attention.q_proj.scheme.name, attention.k_proj.scheme.name, attention.v_proj.scheme.name]
    assert schemes == ["int8", "int4-channel", "int4"]
    assert torch.equal(logits(loaded), logits(model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert relative(logits(theirs), logits(model)) < 0.03


def weights(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda quantization: quantization["config_groups"]["group_0"]["weights"].update(values)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (weights(group_size=64), "has weights of 4 bits"),
        (weights(symmetric=False), "has weights of 4 bits"),
        (weights(num_bits=8), "leaves the input_activations in float|stored as 'pack-quantized'"),
        (weights(num_bits=3), "has weights of 3 bits"),
        (weights(type="float"), "has weights of 4 bits, 'float'"),
        (weights(dynamic=True), "has weights of 4 bits"),
        (weights(strategy="tensor"), "has weights of 4 bits"),
        (weights(strategy=["group"]), "has weights of 4 bits"),
        (
            lambda q: q["config_groups"]["group_0"].update(input_activations={"num_bits": 8, "type": "int"}),
            "has weights of 4 bits",
        ),
        (lambda q: q.update(quantization_status="frozen"), "quantization_status is 'frozen'"),
    ],
)
def test_configs_that_are_refused(edit: Callable[[dict[str, Any]], None], message: str, tmp_path: Path) -> None:
    qgemm.save_quantized(quantized("int4"), tmp_path, format="compressed-tensors")
    edit_quantization(tmp_path, edit)
    with pytest.raises(CheckpointError, match=message):
        qgemm.load_quantized(tmp_path)


def put(leaf: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({f"{LAYER}.{leaf}": make(tensors[f"{LAYER}.{leaf}"])})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (put("weight_packed", lambda t: t.long()), r"weight_packed is torch.int64 \[256, 32\]; it must be int32"),
        (put("weight_packed", lambda t: t[:, 1:]), r"it says \[256, 256\], and weight_packed is \[256, 31\]|shape"),
        (put("weight_packed", lambda t: t.flatten()), "weight_packed is torch.int32"),
        (put("weight_scale", lambda t: t.int()), "weight_scale is torch.int32"),
        (put("weight_scale", lambda t: t[:, :1]), r"weight_scale has shape \[256, 1\]; the model's is \[256, 2\]"),
        (put("weight_scale", lambda t: t[1:]), r"weight_scale is torch.bfloat16 \[255, 2\]"),
        (put("weight_scale", lambda t: t * torch.nan), "weight_scale holds NaN or Inf"),
        (put("weight_scale", lambda t: t / 0), "weight_scale holds NaN or Inf"),
        (put("weight_shape", lambda t: t.flip(0) + 1), r"weight_shape: it says \[257, 257\], and weight_packed is"),
        (put("weight_shape", lambda t: t[:1]), r"weight_shape is torch.int64 \[1\]"),
        (lambda t: t.pop(f"{LAYER}.weight_shape"), "weight_shape is missing"),
        (lambda t: t.pop(f"{LAYER}.weight_scale"), "weight_scale is missing"),
        (lambda t: t.pop(f"{LAYER}.weight_packed"), "has a weight_scale but no weight|says? nothing|activations are"),
        (lambda t: t.update({f"{LAYER}.weight_g_idx": torch.zeros(256)}), "has a weight_g_idx"),
        (
            lambda t: t.update({f"{LAYER}.weight_zero_point": torch.ones(32, 2, dtype=torch.int32)}),
            "the zero point is not 0",
        ),
    ],
)
def test_tensors_that_are_refused(edit: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path) -> None:
    qgemm.save_quantized(quantized("int4"), tmp_path, format="compressed-tensors")
    edit_tensors(tmp_path, edit)
    with pytest.raises(CheckpointError, match=message):
        qgemm.load_quantized(tmp_path)


def test_a_config_that_says_nothing_of_packed_weights(tmp_path: Path) -> None:
    qgemm.save_quantized(qgemm.quantize_model(llama(), "int8"), tmp_path, format="compressed-tensors")
    edit_tensors(tmp_path, lambda t: t.update({f"{LAYER}.weight_packed": torch.zeros(256, 32, dtype=torch.int32)}))
    with pytest.raises(CheckpointError, match="has a weight_packed, which the config doesn't mention"):
        qgemm.load_quantized(tmp_path)


@pytest.mark.parametrize(
    ("linear", "scheme", "message"),
    [
        (nn.Linear(200, 8), "int4", "0 has 200 input columns, not a multiple of the group size 128"),
        (nn.Linear(256, 8), "int8-hadamard", "0 has the scheme 'int8-hadamard', which compressed-tensors can't store"),
    ],
)
def test_what_is_not_written(linear: nn.Linear, scheme: str, message: str, tmp_path: Path) -> None:
    model = qgemm.quantize_model(nn.Sequential(linear), scheme)
    with pytest.raises(ValueError, match=message):
        qgemm.save_quantized(model, tmp_path / "new", format="compressed-tensors")
    assert not (tmp_path / "new").exists()
