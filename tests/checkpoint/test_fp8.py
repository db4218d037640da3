"""Checkpoints in fp8 of DeepSeek, transformers, AutoFP8 and FBGEMM: samples, other forms, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families.example import Example
from families.mixtures import MIXTURES
from integrations.folders import assert_same
from safetensors.torch import save_file
from torch import Tensor, nn

import qgemm
from checkpoint.fused_experts import BLOCKS, FBGEMM, in_blocks, transposed, write_experts
from checkpoint.samples import load_sample, logit_error, wrong_weights
from qgemm import CheckpointError, QuantExperts

Tensors = dict[str, Tensor]
SAMPLES = {
    "fp8-block128": "fp8-block",
    "fp8-block128-ue8m0": "fp8-block",
    "fp8-tensor-static": "fp8-static",
    "fbgemm-fp8": "fp8",
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples(name: str) -> None:
    model, warnings = load_sample(name)
    assert {layer.scheme.name for layer in model.modules() if hasattr(layer, "scheme")} == {SAMPLES[name]}
    assert wrong_weights(name) == []
    assert 1e-5 < logit_error(name) < 0.1  # activations are rounded, which the reference's aren't
    if name == "fbgemm-fp8":
        assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
        assert "activations are not cut off at activation_scale_ub (1200.0)" in warnings[0]
    elif name == "fp8-block128-ue8m0":
        assert len(warnings) == 1
        assert "scales of activations stay in float32, where the checkpoint asks for powers of two" in warnings[0]
    else:
        assert warnings == []


TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
ALONE = {"quant_method": "fp8", "activation_scheme": None, "kv_cache_scheme": None}  # of Quark


def layer_with(N: int = 576, K: int = 192, **others: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"weight": torch.randn(N, K).to(torch.float8_e4m3fn), **others}


def load(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any], N: int = 576, K: int = 192) -> Any:
    save_file({f"0.{leaf}": tensor for leaf, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return qgemm.load_quantized(folder, model=lambda: nn.Sequential(nn.Linear(K, N, bias=False)))[0]


@pytest.mark.parametrize("leaf", ["weight_scale_inv", "scale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_short_last_blocks(leaf: str, dtype: torch.dtype, tmp_path: Path) -> None:
    # 576 rows are four blocks and a half, as of DeepSeek's kv_a_proj_with_mqa; 192 are one and a half, not two of 96.
    scale = torch.exp2(torch.arange(10).view(5, 2) - 4.0).to(dtype)
    tensors = layer_with(**{leaf: scale})
    layer = load(tmp_path, tensors, BLOCKS)
    assert layer.scheme.name == "fp8-block"
    spread = scale.float().repeat_interleave(128, 0)[:576].repeat_interleave(128, 1)[:, :192]
    assert torch.equal(layer.dequantize(torch.float32).weight, tensors["weight"].float() * spread)


@pytest.mark.parametrize(
    ("scales", "quantization", "scheme"),
    [
        ({"weight_scale_inv": torch.tensor(0.5)}, TENSOR, "fp8"),
        ({"weight_scale_inv": torch.tensor(0.5)}, BLOCKS, "fp8"),
        ({"weight_scale": torch.tensor([0.5])}, TENSOR, "fp8"),
        ({"weight_scale": torch.tensor(0.5), "input_scale": torch.tensor(0.25)}, STATIC, "fp8-static"),
        ({"weight_scale_inv": torch.tensor(0.5), "activation_scale": torch.tensor([0.25])}, STATIC, "fp8-static"),
        ({"weight_scale": torch.full((576, 1), 0.5, dtype=torch.bfloat16)}, FBGEMM, "fp8"),
        ({"weight_scale": torch.tensor(0.5, dtype=torch.bfloat16)}, ALONE, "fp8-weight"),
        ({"weight_scale_inv": torch.tensor(0.5)}, ALONE, "fp8-weight"),
        ({"weight_scale_inv": torch.full((576, 1), 0.5)}, ALONE, "fp8-weight"),
    ],
)
def test_one_scale_for_a_tensor_or_a_channel(
    scales: dict[str, Tensor], quantization: dict[str, Any], scheme: str, tmp_path: Path
) -> None:
    tensors = layer_with(**scales)
    layer = load(tmp_path, tensors, quantization)
    assert layer.scheme.name == scheme
    assert torch.equal(layer.dequantize(torch.float32).weight, tensors["weight"].float() / 2)
    if scheme == "fp8-static":
        assert layer.input_scale.item() == 0.25


def test_a_quantized_cache_is_asked_for(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="its scales of keys and values are not used"):
        load(tmp_path, layer_with(weight_scale=torch.tensor(0.5)), {**TENSOR, "kv_cache_scheme": "static"})  # AutoFP8's


EXPERTS = {
    "gate_up_proj": torch.ones(2, 4, 4).to(torch.float8_e4m3fn),
    "gate_up_proj_scale_inv": torch.ones(2, 1, 1),
}
GRID = {"weight_scale_inv": torch.ones(5, 2)}


@pytest.mark.parametrize(
    ("scales", "quantization", "message"),
    [
        (GRID, {**BLOCKS, "weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]; qgemm computes blocks of"),
        (GRID, {**BLOCKS, "weight_block_size": 128}, r"is 128; qgemm computes blocks of 128 x 128, so dequantize it"),
        ({"weight_scale_inv": torch.ones(6, 2)}, BLOCKS, r"0.weight_scale_inv is .* \[6, 2\]; it must be .* \[5, 2\]"),
        (GRID, TENSOR, r"0.weight_scale_inv is torch.float32 \[5, 2\]; it must be"),
        (GRID, {**BLOCKS, "fmt": "e5m2"}, "fmt is 'e5m2'; qgemm reads fp8 in e4m3, so dequantize it"),
        (GRID, {**BLOCKS, "activation_scheme": None}, "activation_scheme is None; it must be 'dynamic' or 'static'"),
        (GRID, {**BLOCKS, "activation_scheme": "none"}, "activation_scheme is 'none'; it must be"),
        (
            GRID,
            {**BLOCKS, "activation_scheme": "static"},
            "activations are static, but layer 0 has no activation_scale",
        ),
        ({**GRID, "input_scale": torch.ones(1)}, BLOCKS, "activations are dynamic, but layer 0 has an input_scale"),
        ({**GRID, "input_scale": torch.ones(1)}, {**BLOCKS, "activation_scheme": "static"}, "blocks and static activ"),
        ({"weight_scale_inv": torch.full((5, 2), torch.nan)}, BLOCKS, "0.weight_scale_inv (is not finite|holds NaN)"),
        ({"weight_scale_inv": torch.ones(5, 2).int()}, BLOCKS, "0.weight_scale_inv is torch.int32"),
        ({"weight_scale": torch.ones(2, 1)}, FBGEMM, r"0.weight_scale is torch.float32 \[2, 1\]; it must be"),
        (
            {**GRID, "weight": torch.ones(576, 192)},
            BLOCKS,
            "0.weight is torch.float32 .* it must be torch.float8_e4m3fn",
        ),
        ({}, BLOCKS, "no file holds a quantized layer"),
        (
            {"weight_scale_inv": torch.ones(1), "scale": torch.ones(1, 1)},
            TENSOR,
            r"holds both 0\.(weight_scale_inv|scale) and 0\.(weight_scale_inv|scale); only one of them",
        ),
        (EXPERTS, {**BLOCKS, "weight_block_size": None}, "0 holds fused experts in fp8 without blocks"),
        ({**GRID, **EXPERTS, "gate_up_proj_scale_inv": torch.ones(2, 2)}, BLOCKS, r"it must be .* \[2, 1, 1\]"),
    ],
)
def test_what_is_refused(scales: dict[str, Tensor], quantization: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, {**layer_with(), **scales}, quantization)


@pytest.mark.parametrize(
    ("family", "scheme", "quantization", "edit"),
    [("qwen3_moe", "fp8-block", BLOCKS, in_blocks), ("llama4", "fp8", FBGEMM, transposed)],
)
def test_fused_experts(family: str, scheme: str, quantization: Any, edit: Any, tmp_path: Path) -> None:
    example = MIXTURES[family]()
    model: Any = qgemm.quantize_model(example.model, scheme)
    write_experts(model, tmp_path / "foreign", quantization, edit)
    loaded = qgemm.load_quantized(tmp_path / "foreign")
    assert isinstance(
        loaded.model.layers[1].get_submodule("mlp.experts" if family != "llama4" else "feed_forward.experts"),
        QuantExperts,
    )
    assert_same(loaded, model)
    assert torch.equal(Example(loaded, example.inputs).output(), example.output())


def test_experts_whose_gates_and_ups_alternate_are_refused(tmp_path: Path) -> None:
    # GPT-OSS's, of which nobody says in which order they would be.
    model: Any = qgemm.quantize_model(MIXTURES["gpt_oss"]().model, "fp8-block")
    write_experts(model, tmp_path / "foreign", BLOCKS, in_blocks)
    with pytest.raises(CheckpointError, match=r"quantizes .*experts, a GptOssExperts, which qgemm can't compute"):
        qgemm.load_quantized(tmp_path / "foreign")
