"""Checkpoints loaded in another scheme than theirs: the layers are those that the float weights would give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qgemm
from checkpoint.foreign import relative
from checkpoint.models import Net
from checkpoint.packers import Layer, linears, write
from checkpoint.samples import IDS, SAMPLES, load_sample
from qgemm import CheckpointError, QuantLinear
from qgemm.checkpoint import requantize
from qgemm.nn import LinearLayer, linear_class

NAMES = ["gptq-4bit-g64-asym-desc-act", "awq-gemm-g32-skip", "bnb-nf4-double", "torchao-fp8wo"]


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
        assert relative(model.float()(IDS).logits, plain(IDS).logits) < 0.06


@pytest.mark.parametrize("scheme", ["int8-hadamard", "int4-32", "int8-weight", "mxfp4", "nvfp4", "nf4"])
def test_other_schemes(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requantize, "_PIECE", 200)
    layer = Layer()
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


def test_schemes_that_need_data_are_refused() -> None:
    for scheme in ("int8-static", "int8-outliers-16"):
        with pytest.raises(ValueError, match=rf"scheme is '{scheme}', which needs data"):
            qgemm.load_quantized(SAMPLES / NAMES[0], scheme=scheme)
    with pytest.raises(ValueError, match="scheme is 'int7'"):
        qgemm.load_quantized(SAMPLES / NAMES[0], scheme="int7")


def test_weights_that_overflow_name_the_layer(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    layer = Layer()
    folder = write(tmp_path, {"a": {**layer.gptq(), "scales": torch.full((2, 16), 3e38)}}, config)
    model = linears(a=(16, 64))()
    before = model["a"]
    with pytest.raises(CheckpointError, match=r"a can't be quantized with scheme 'int8': weight holds NaN or Inf"):
        qgemm.load_quantized(folder, model=model, scheme="int8")
    assert model["a"] is before
