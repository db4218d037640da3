"""The commands on checkpoints of every scheme."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import FAMILIES
from families.schemes import EVERY_LAYER, in_models, quantized_model
from safetensors.torch import load_file

import qgemm
from cli.command import run_failing, run_json
from qgemm.nn import LinearLayer


def relative_errors(float_folder: Path, folder: Path) -> dict[str, float]:
    tensors, errors = load_file(float_folder / "model.safetensors"), {}
    for name, module in qgemm.load_quantized(folder).named_modules():
        if isinstance(module, LinearLayer):
            wanted, got = tensors[f"{name}.weight"].double(), module.dequantize(torch.float32).weight.detach().double()
            errors[f"{name}.weight"] = float((got - wanted).norm() / wanted.norm())
    return errors


@pytest.mark.slow(quick=["int8", "int4"])
@pytest.mark.parametrize("scheme", in_models(EVERY_LAYER))
def test_inspect_and_compare(scheme: str, tmp_path: Path) -> None:
    FAMILIES["llama"]().model.save_pretrained(tmp_path / "float")
    model = type(FAMILIES["llama"]().model).from_pretrained(tmp_path / "float")
    qgemm.save_quantized(quantized_model(model, scheme), tmp_path / "quantized")

    seen = run_json("inspect", tmp_path / "quantized")
    assert seen["loads"]
    assert seen["problems"] == []
    quantized = [layer for layer in seen["layers"] if layer["quantized"]]
    assert {layer["scheme"] for layer in quantized} == {scheme}
    shapes = {name: [layer.out_features, layer.in_features] for name, layer in linears(model)}
    assert {layer["name"]: layer["shape"] for layer in quantized} == shapes

    found = run_json("compare", tmp_path / "float", tmp_path / "quantized")
    wanted = relative_errors(tmp_path / "float", tmp_path / "quantized")
    errors = {layer["name"]: layer["relative_error"] for layer in found["layers"] if layer["quantized"]}
    assert errors == pytest.approx(wanted, rel=1e-4)


def linears(model: torch.nn.Module) -> list[tuple[str, LinearLayer]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LinearLayer)]


def test_quantize_and_convert(tmp_path: Path) -> None:
    FAMILIES["llama"]().model.save_pretrained(tmp_path / "float")
    document = run_json("quantize", tmp_path / "float", tmp_path / "int4", "--scheme", "int4-channel")
    assert document["bytes_after"] < 0.55 * document["bytes_before"]  # rows of 64 values take the space of 256
    run_json("convert", tmp_path / "int4", tmp_path / "theirs", "--to", "compressed-tensors")
    seen = run_json("inspect", tmp_path / "theirs")
    assert seen["loads"]
    assert {layer["storage"] for layer in seen["layers"] if layer["quantized"]} == {"int4"}
    assert run_json("compare", tmp_path / "int4", tmp_path / "theirs")["largest_error"] == 0
    message = run_failing("quantize", tmp_path / "float", tmp_path / "no", "--scheme", "int8-static-asymmetric")
    assert "the scheme 'int8-static-asymmetric' needs a text to run the model on: pass --text FILE" in message
