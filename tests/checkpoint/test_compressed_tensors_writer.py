"""What qgemm writes for compressed-tensors, of every scheme: read by the library, by transformers and by qgemm."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import qgemm
from checkpoint.foreign import logits, needs_the_library, relative, same_tensors
from checkpoint.library import decompressed, linears
from qgemm.checkpoint.compressed_tensors_writer import format_of
from qgemm.nn import linear_class
from qgemm.scheme import resolve_scheme

WRITTEN = {
    "int4": "pack-quantized",
    "int4-32": "pack-quantized",
    "int4-channel": "pack-quantized",
    "int4-64-asymmetric": "pack-quantized",
    "int4-channel-asymmetric": "pack-quantized",
    "int8-weight": "pack-quantized",
    "int8-weight-64-asymmetric": "pack-quantized",
    "int8": "int-quantized",
    "int8-static": "int-quantized",
    "int8-static-asymmetric": "int-quantized",
    "int4-int8": "int-quantized",
    "int4-32-asymmetric-int8": "int-quantized",
    "int4-channel-int8": "int-quantized",
    "fp8": "float-quantized",
    "fp8-static": "float-quantized",
    "fp8-block": "float-quantized",
    "fp8-weight": "naive-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}


def test_every_scheme_with_a_format_is_here() -> None:
    assert {scheme: format_of(resolve_scheme(scheme)) for scheme in WRITTEN} == WRITTEN
    for scheme in ("nf4", "int4-ordered", "int8-hadamard", "int8-outliers-16"):
        assert format_of(resolve_scheme(scheme)) is None


def quantized(scheme: str) -> nn.Module:
    torch.manual_seed(0)
    shape = (9, 384) if resolve_scheme(scheme).weight.group_size else (9, 30)
    model = linears((130, 200) if scheme == "fp8-block" else shape)
    has_zero_point = resolve_scheme(scheme).has_zero_point
    input_scale = (0.03, -20) if has_zero_point else 0.03 if scheme.endswith("-static") else None
    model[0] = linear_class(scheme).from_linear(model[0], scheme, input_scale)
    return model.eval()


@needs_the_library
@pytest.mark.parametrize("scheme", WRITTEN)
def test_one_layer_read_by_the_library(scheme: str, tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    model = quantized(scheme)
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    layer = model[0]
    again = qgemm.load_quantized(tmp_path, model=lambda: linears((layer.out_features, layer.in_features)))
    assert again[0].scheme == layer.scheme
    assert same_tensors(again, model)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["format"] == WRITTEN[scheme]
    parsed = QuantizationConfig.model_validate(config)
    (group,) = parsed.config_groups.values()
    assert (group.format, group.input_activations is None) == (WRITTEN[scheme], layer.scheme.is_weight_only)
    scale_dtypes = {"mxfp4": torch.uint8, "mxfp8": torch.uint8, "nvfp4": torch.float8_e4m3fn}  # as in its own presets
    assert group.weights.scale_dtype == scale_dtypes.get(scheme)
    stored = load_file(tmp_path / "model.safetensors")
    own = {name.removeprefix("0."): tensor for name, tensor in stored.items()}
    theirs = decompressed(own, config["config_groups"]["group_0"])
    ours = layer.dequantize(torch.float32).weight
    if theirs.dtype == torch.float32:
        assert torch.equal(theirs, ours)
    else:  # of fp4 and mx formats it gives bfloat16, and rounds scales to that before
        torch.testing.assert_close(theirs, ours.to(theirs.dtype), rtol=0.02, atol=0)


@pytest.mark.parametrize("bias", [0.0, 0.1, 1000.0])
def test_a_bias_without_the_share_of_the_zero_point(bias: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(30, 9)
    linear.bias.data = torch.randn(9) * bias
    model = nn.Sequential(
        linear_class("int8-static-asymmetric").from_linear(linear, "int8-static-asymmetric", (0.03, -20))
    )
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    stored = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(stored["0.bias"], linear.bias, rtol=1e-6, atol=1e-6)
    again = qgemm.load_quantized(tmp_path, model=lambda: nn.Sequential(nn.Linear(30, 9)))
    assert again[0].has_bias
    x = torch.randn(5, 30)
    q = (torch.round(x / stored["0.input_scale"]) + stored["0.input_zero_point"]).clamp(-128, 127)
    product = (q.double() + 20) * 0.03 @ (stored["0.weight"] * stored["0.weight_scale"]).double().T
    for layer in (model[0], again[0]):
        torch.testing.assert_close(layer(x).double(), product + stored["0.bias"], rtol=1e-6, atol=1e-5)


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


# By how much logits differ. Of fp4 and mx formats the library makes weights in bfloat16, with which it then needs
# activations in that; of int8 activations it takes the scale as max / 127.5, qgemm as max / 127.
LIMITS = {
    "int4": 1e-5,
    "int4-32-asymmetric": 1e-5,
    "int8-weight": 1e-5,
    "fp8-weight": 1e-5,
    "fp8": 1e-4,
    "fp8-block": 1e-4,
    "int4-int8": 0.06,
    "mxfp4": 0.03,
    "mxfp8": 0.03,
    "nvfp4": 0.03,
}


@pytest.mark.slow(quick=["int4"])
@needs_the_library
@pytest.mark.parametrize("scheme", LIMITS)
def test_transformers_loads_it(scheme: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if scheme in ("mxfp4", "mxfp8", "nvfp4") else torch.float32
    model = qgemm.quantize_model(llama(dtype), scheme, skip=["model.layers.1.mlp.up_proj"])
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors", max_shard_size="1MB")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert relative(logits(theirs), logits(model)) < LIMITS[scheme]
    assert not hasattr(theirs.lm_head, "quantization_scheme")
    assert same_tensors(qgemm.load_quantized(tmp_path), model)


@needs_the_library
def test_many_schemes_in_one_model(tmp_path: Path) -> None:
    model: Any = qgemm.quantize_model(llama(torch.float32), "int4")
    wanted = {"q_proj": "int8", "k_proj": "int4-channel", "v_proj": "int4", "o_proj": "fp8-weight"}
    for layer in model.model.layers:
        for name, scheme in wanted.items():
            linear = getattr(layer.self_attn, name).dequantize(torch.float32)
            setattr(layer.self_attn, name, linear_class(scheme).from_linear(linear, scheme))
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert config["ignore"] == ["lm_head"]
    loaded: Any = qgemm.load_quantized(tmp_path)
    assert same_tensors(loaded, model)
    attention = loaded.model.layers[0].self_attn
    assert {name: getattr(attention, name).scheme.name for name in wanted} == wanted
    assert torch.equal(logits(loaded), logits(model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert relative(logits(theirs), logits(model)) < 0.03


@pytest.mark.parametrize(
    ("K", "scheme", "message"),
    [
        (200, "int4", "0 has 200 input columns, not a multiple of the group size 128"),
        (208, "int4-int8", "0 has 208 input columns, not a multiple of the group size 128"),
        (200, "mxfp4", "0 has 200 input columns, not a multiple of the group size 32"),
        (256, "int8-hadamard", "0 has the scheme 'int8-hadamard', which compressed-tensors can't store"),
        (256, "nf4", "0 has the scheme 'nf4', which compressed-tensors can't store"),
        (256, "int4-float-zeros", "0 has the scheme 'int4-float-zeros', which compressed-tensors can't store"),
    ],
)
def test_what_is_not_written(K: int, scheme: str, message: str, tmp_path: Path) -> None:
    model = qgemm.quantize_model(nn.Sequential(nn.Linear(K, 8)), scheme)
    with pytest.raises(ValueError, match=message) as refusal:
        qgemm.save_quantized(model, tmp_path / "new", format="compressed-tensors")
    assert not (tmp_path / "new").exists()
    schemes = re.findall('"(.*?)"', str(refusal.value).partition("load or quantize it with scheme=")[2])
    assert schemes
    for other in schemes:
        made = qgemm.quantize_model(nn.Sequential(nn.Linear(K, 8)), other)
        qgemm.save_quantized(made, tmp_path / other, format="compressed-tensors")
