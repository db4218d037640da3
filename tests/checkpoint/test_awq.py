"""AWQ's checkpoints: AutoAWQ's own, and layers packed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import qgemm
from checkpoint.packers import Layer, linears, write
from checkpoint.samples import layers_in, logit_error
from qgemm import CheckpointError
from qgemm.checkpoint import packed_layers

SCHEMES = {"awq-gemm-g128": "int4-asymmetric", "awq-gemm-g32-skip": "int4-32-asymmetric"}
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def read(folder: Path) -> Any:
    return qgemm.load_quantized(folder, model=linears(a=(16, 64)))


@pytest.mark.parametrize("name", SCHEMES)
def test_samples(name: str) -> None:
    layers = layers_in(SCHEMES[name], name)
    assert len(layers) == (14 if name == "awq-gemm-g128" else 12)
    assert any("down_proj" in key for key in layers) == (name == "awq-gemm-g128")
    assert logit_error(name) < 1e-6


@pytest.mark.parametrize("own_file", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_by_the_documented_layout(
    symmetric: bool, own_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_layers, "_PIECE", 500)  # eight rows at a time
    layer = Layer(symmetric=symmetric)
    write(tmp_path, {"a": layer.awq()}, None if own_file else {**CONFIG, "zero_point": not symmetric})
    if own_file:
        own = {"zero_point": not symmetric, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
        (tmp_path / "quant_config.json").write_text(json.dumps(own))
    model = read(tmp_path)
    assert (model["a"].weight_zero_point is None) == symmetric
    assert torch.equal(model["a"].dequantize(torch.float32).weight, layer.weight)


def test_the_version_for_exllama_has_the_same_tensors(tmp_path: Path) -> None:
    layer = Layer()
    model = read(write(tmp_path, {"a": layer.awq()}, {**CONFIG, "version": "exllama", "zero_point": True}))
    assert torch.equal(model["a"].dequantize(torch.float32).weight, layer.weight)


def test_groups_in_an_order_of_their_own(tmp_path: Path) -> None:
    layer = Layer(g_idx=(torch.arange(64) // 32)[torch.randperm(64)])
    model = read(write(tmp_path, {"a": {**layer.awq(), "g_idx": layer.g_idx}}, {**CONFIG, "zero_point": True}))
    assert model["a"].input_order is not None
    assert torch.equal(model["a"].dequantize(torch.float32).weight, layer.weight)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gemv": ({"version": "gemv"}, {}, r"AWQ's version is 'gemv'; qgemm reads 'gemm', so dequantize it"),
    "gemv_fast": ({"version": "gemv_fast"}, {}, r"version is 'gemv_fast'"),
    "signed": (
        {"pack_method": "reorder", "zero_point": False},
        {},
        "it was written by Quark for AWQ, with zero_point f",
    ),
    "a number": ({"version": 4}, {}, r"version is 4"),
    "laid out as gemv": ({}, {"qweight": (16, 8)}, r"a.qweight is torch.int32 \[16, 8\]; it must be \[K, 16 / 8\]"),
    "laid out as gptq": ({}, {"qweight": (8, 16)}, r"no quantization_config of GPTQ, and no symmetric layers tell"),
    "8 bits": ({"bits": 8}, {"qzeros": (2, 4)}, r"layer a has 8 bits; qgemm reads AWQ of 4 bits, so deq"),
    "K of 48": ({}, {"qweight": (48, 2)}, r"layer a has the shape \[16, 48\]; the model's is \[16, 64\]"),
    "one zero": ({}, {"qzeros": (1, 2)}, r"a.qzeros is torch.int32 \[1, 2\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    config, tensors, message = REFUSED[case]
    shapes = {leaf: torch.zeros(shape, dtype=torch.int32) for leaf, shape in tensors.items()}
    with pytest.raises(CheckpointError, match=message):
        read(write(tmp_path, {"a": {**Layer().awq(), **shapes}}, {**CONFIG, **config}))
