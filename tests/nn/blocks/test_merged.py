"""Layers that are computed by one product: where their values lie, and that they stay the layers' own."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import accelerate
import pytest
import safetensors.torch
import torch
from torch import nn

from qgemm import QuantLinear
from qgemm.nn import linear_class
from qgemm.nn.blocks.merged import MergedWeights, why_apart
from qgemm.nn.shard import Shard, Style
from qgemm.ops import quant_linear

SIZES = (64, 32, 48)


def layers(bias: bool = False) -> list[QuantLinear]:
    return [QuantLinear.from_linear(nn.Linear(64, size, bias)) for size in SIZES]


def compute(merged: MergedWeights, x: torch.Tensor) -> torch.Tensor:
    operands = merged.operands()
    assert operands is not None
    return quant_linear(x, *operands)


def is_side_by_side(merged: MergedWeights) -> bool:
    weights = [layer.stored("weight") for layer in merged.layers]
    return len({weight.untyped_storage().data_ptr() for weight in weights}) == 1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_product_has_the_bits_of_three(bias: bool, dtype: torch.dtype) -> None:
    parts = layers(bias)
    x = torch.randn(5, 64).to(dtype)
    expected = torch.cat([layer(x) for layer in parts], dim=-1)
    merged = MergedWeights(parts)
    assert is_side_by_side(merged)
    assert torch.equal(compute(merged, x), expected)
    assert torch.equal(torch.cat([layer(x) for layer in parts], dim=-1), expected)


@pytest.mark.parametrize("scheme", ["int4-32", "fp8-weight", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layers_are_merged_under_autocast(scheme: str, dtype: torch.dtype) -> None:
    parts = [linear_class(scheme).from_linear(nn.Linear(64, 32), scheme) for _ in range(2)]
    for layer in parts:  # as nvfp4 has to have
        if layer.whole_names:
            layer.weight_global_scale.data.copy_(parts[0].weight_global_scale)
    with torch.autocast("cpu", dtype=dtype):
        assert is_side_by_side(MergedWeights(parts))


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("merges", [False, True])
def test_inference_mode_is_that_of_the_layers(made: bool, merges: bool) -> None:
    with torch.inference_mode(made):
        parts = layers(bias=True)
    x = torch.randn(5, 64)
    with torch.inference_mode():
        expected = [layer(x) for layer in parts]
    with torch.inference_mode(merges):
        merged = MergedWeights(parts)
    for _ in range(2):
        with torch.inference_mode():
            assert all(torch.equal(layer(x), out) for layer, out in zip(parts, expected, strict=True))
        assert all(layer.stored("weight").is_inference() == made for layer in parts)
        with torch.inference_mode(merges):
            merged.separate()


def test_parameters_stay_the_same_objects_under_their_names() -> None:
    model = nn.ModuleList(layers(bias=True))
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    MergedWeights(list(model))  # type: ignore[arg-type]
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, (parameter, value) in before.items():
        assert after[name] is parameter
        assert torch.equal(parameter, value)


def _cast(model: nn.ModuleList) -> nn.ModuleList:
    return model.to(torch.bfloat16)


def _load(model: nn.ModuleList) -> nn.ModuleList:
    model.load_state_dict(nn.ModuleList(layers(bias=True)).state_dict())
    return model


def _assign(model: nn.ModuleList) -> nn.ModuleList:
    model.load_state_dict(nn.ModuleList(layers(bias=True)).state_dict(), assign=True)
    return model


def _replace(model: nn.ModuleList) -> nn.ModuleList:
    other: Any = QuantLinear.from_linear(nn.Linear(64, 32))
    model[1].weight, model[1].bias = other.weight, other.bias
    return model


def _set_data(model: nn.ModuleList) -> nn.ModuleList:
    parameter = model[1].get_parameter("weight")
    parameter.data = parameter.detach().flip(0)
    return model


def _write(model: nn.ModuleList) -> nn.ModuleList:
    with torch.no_grad():
        model[2].get_parameter("bias").fill_(3.0)
    return model


@pytest.mark.parametrize("change", [_cast, _load, _assign, _replace, _set_data, _write, copy.deepcopy])
def test_the_product_follows_what_happens_to_a_layer(change: Any) -> None:
    model = nn.ModuleList(layers(bias=True))
    merged = MergedWeights(list(model))  # type: ignore[arg-type]
    x = torch.randn(3, 64)
    before = compute(merged, x)
    model = change(model)
    merged = model[0].merged  # type: ignore[assignment]
    expected = torch.cat([layer(x) for layer in model], dim=-1)
    assert torch.equal(compute(merged, x), expected)
    assert is_side_by_side(merged)
    assert torch.equal(before, expected) == (change is copy.deepcopy)


def test_a_move_places_the_values_at_once() -> None:
    # Code that is compiled next never asks where they lie.
    model = nn.ModuleList(layers(bias=True))
    merged = MergedWeights(list(model))  # type: ignore[arg-type]
    model.to(torch.bfloat16)
    assert merged._operands is not None
    assert merged._operands.bias is not None
    assert merged._operands.bias.dtype == torch.bfloat16
    model.load_state_dict(model.state_dict(), assign=True)
    assert merged._operands is not None


def test_a_copy_has_memory_of_its_own() -> None:
    model = nn.ModuleList(layers())
    MergedWeights(list(model))  # type: ignore[arg-type]
    copied = copy.deepcopy(model)
    assert copied[0].merged is not model[0].merged
    assert copied[0].merged.layers == tuple(copied)  # type: ignore[union-attr]
    with torch.no_grad():
        copied[0].get_parameter("weight_scale").fill_(1.0)
    assert not torch.equal(copied[0](torch.ones(1, 64)), model[0](torch.ones(1, 64)))


def test_values_that_are_side_by_side_already_are_not_copied() -> None:
    merged = MergedWeights(layers(bias=True))
    model, x = nn.ModuleList(merged.layers), torch.randn(5, 64)
    expected = compute(merged, x)
    model.share_memory()
    assert torch.equal(compute(merged, x), expected)
    assert all(parameter.is_shared() for parameter in model.parameters())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    addresses = [parameter.data_ptr() for parameter in loaded.parameters()]
    assert torch.equal(compute(loaded[0].merged, x), expected)
    assert [parameter.data_ptr() for parameter in loaded.parameters()] == addresses


@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4-32"])
def test_code_that_drops_tensors_which_share_a_storage_saves_all(scheme: str, tmp_path: Path) -> None:
    parts = [linear_class(scheme).from_linear(nn.Linear(64, size), scheme) for size in SIZES]
    merged, model = MergedWeights(parts), nn.ModuleList(parts)
    assert is_side_by_side(merged)
    state = model.state_dict()
    for name, parameter in model.named_parameters():
        assert state[name].data_ptr() == parameter.data_ptr()
        assert state[name].untyped_storage().nbytes() == parameter.nbytes
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    safetensors.torch.save_model(model, tmp_path / "other.safetensors")
    for file in ("model.safetensors", "other.safetensors"):
        loaded = safetensors.torch.load_file(tmp_path / file)
        assert loaded.keys() == state.keys()
        assert all(
            torch.equal(loaded[name].view(torch.uint8), value.view(torch.uint8)) for name, value in state.items()
        )
    expected = [value.clone() for value in state.values()]
    del merged, parts, model  # the values keep the memory alive
    assert all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(state.values(), expected, strict=True)
    )


def test_values_of_a_state_dict_can_be_changed_in_place() -> None:
    # As torch.distributed.checkpoint does.
    merged, x = MergedWeights(layers()), torch.randn(5, 64)
    others = nn.ModuleList(layers())
    expected = torch.cat([layer(x) for layer in others], dim=-1)
    for name, value in nn.ModuleList(merged.layers).state_dict().items():
        value.copy_(others.state_dict()[name])
    assert torch.equal(compute(merged, x), expected)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_rows_of_one_memory_in_any_order(order: tuple[int, ...]) -> None:
    weight, scale = torch.randint(-127, 127, (3, 16)).to(torch.int8), torch.rand(3) + 0.1
    parts = [QuantLinear(16, 1, bias=False) for _ in order]
    for layer, place in zip(parts, order, strict=True):
        row = slice(place, place + 1)
        layer.load_state_dict({"weight": weight[row], "weight_scale": scale[row]}, assign=True)
    x = torch.randn(5, 16)
    assert torch.equal(compute(MergedWeights(parts), x), torch.cat([layer(x) for layer in parts], dim=-1))


def test_without_values_there_is_no_product() -> None:
    model = nn.ModuleList([QuantLinear(64, size, device="meta") for size in SIZES])
    merged = MergedWeights(list(model))  # type: ignore[arg-type]
    assert merged.operands() is None
    model.load_state_dict(nn.ModuleList(layers(bias=True)).state_dict(), assign=True)
    x = torch.randn(3, 64)
    assert torch.equal(compute(merged, x), torch.cat([layer(x) for layer in model], dim=-1))


def test_separate_gives_each_layer_its_own_memory() -> None:
    parts = layers()
    merged = MergedWeights(parts)
    values = [layer.stored("weight").clone() for layer in parts]
    merged.separate()
    assert not is_side_by_side(merged)
    assert all(torch.equal(layer.stored("weight"), value) for layer, value in zip(parts, values, strict=True))
    assert all(layer.merged is None for layer in parts)


def _static(scale: float) -> QuantLinear:
    return QuantLinear.from_linear(nn.Linear(64, 32), "int8-static", scale)


def _hooked() -> QuantLinear:
    layer = QuantLinear.from_linear(nn.Linear(64, 32))
    layer.register_forward_hook(lambda *_: None)
    return layer


def _shard(style: Style, columns: int = 64, is_open: bool = False) -> QuantLinear:
    layer = QuantLinear.from_linear(nn.Linear(columns, 64))
    layer.cut(Shard(style, None, 0, 2, is_open))
    return layer


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: _shard("column"), "a layer is split among processes, and gathers its outputs"),
        (lambda: _shard("row", 128), "a layer is split among processes, and takes its part of a whole input"),
        (lambda: nn.Linear(64, 32), "of class Linear, which isn't a quantized layer's"),
        (lambda: QuantLinear.from_linear(nn.Linear(32, 32)), "has 64 inputs, a layer 32"),
        (lambda: _static(0.1), "is int8, a layer int8-static"),
        (_hooked, "has hooks"),
    ],
)
def test_what_cant_be_merged(other: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        MergedWeights([QuantLinear.from_linear(nn.Linear(64, 32)), other()])


def test_a_shard_beside_whole_layers() -> None:
    """Its outputs are those that the layer beside it reads, as without a merge."""
    layers, x = [_shard("column", is_open=True), QuantLinear.from_linear(nn.Linear(64, 48))], torch.randn(3, 64)
    expected = torch.cat([layer(x) for layer in layers], dim=-1)
    assert expected.shape == (3, 32 + 48)
    assert torch.equal(compute(MergedWeights(layers), x), expected)


def test_a_bias_that_some_layers_have() -> None:
    layers = [QuantLinear.from_linear(nn.Linear(64, 32, bias=bias)) for bias in (False, True, False)]
    x = torch.randn(3, 64)
    expected = torch.cat([layer(x) for layer in layers], dim=-1)
    merged = MergedWeights(layers)
    assert torch.equal(compute(merged, x), expected)
    assert [layer.bias is None for layer in layers] == [True, False, True]
    with torch.no_grad():
        layers[1].get_parameter("bias").add_(1)
    assert torch.equal(compute(merged, x), torch.cat([layer(x) for layer in layers], dim=-1))
    assert not torch.equal(compute(merged, x), expected)
    merged.separate()
    assert torch.equal(torch.cat([layer(x) for layer in layers], dim=-1)[:, :32], expected[:, :32])


def test_static_scales_must_be_equal() -> None:
    x = torch.randn(3, 64)
    equal = [_static(0.1), _static(0.1)]
    expected = torch.cat([layer(x) for layer in equal], dim=-1)
    merged = MergedWeights(equal)
    assert torch.equal(compute(merged, x), expected)
    with pytest.raises(ValueError, match="input_scale of a layer differs"):
        MergedWeights([_static(0.1), _static(0.2)])
    equal[1].load_state_dict({**equal[1].state_dict(), "input_scale": torch.tensor(0.2)})
    assert merged.operands() is None


@pytest.mark.parametrize("scheme", ["int4", "int4-32-asymmetric", "int8-weight", "fp8-weight", "mxfp4"])
def test_layers_with_quantized_weights_alone(scheme: str) -> None:
    parts = [linear_class(scheme).from_linear(nn.Linear(64, size), scheme) for size in SIZES]
    x = torch.randn(5, 64)
    expected = torch.cat([layer(x) for layer in parts], dim=-1)
    merged = MergedWeights(parts)
    operands = merged.operands()
    assert operands is not None
    assert operands.weight.values.shape[0] == sum(SIZES)
    residual = torch.randn(5, sum(SIZES))
    torch.testing.assert_close(operands.product(x, x.dtype), expected)
    torch.testing.assert_close(operands.product(x, x.dtype, residual), expected + residual)
    assert all(layer.stored("weight").untyped_storage().nbytes() == operands.weight.values.nbytes for layer in parts)


def test_scales_of_blocks() -> None:
    """Rows of a block are of one layer: all but the last have whole blocks."""
    sizes = (256, 128, 100)
    parts = [linear_class("fp8-block").from_linear(nn.Linear(144, size), "fp8-block") for size in sizes]
    x, residual = torch.randn(5, 144), torch.randn(5, sum(sizes))
    expected = torch.cat([layer(x) for layer in parts], dim=-1)
    merged = MergedWeights(parts)
    operands = merged.operands()
    assert operands is not None
    assert not operands.reads_rows
    torch.testing.assert_close(operands.product(x, x.dtype), expected)
    torch.testing.assert_close(operands.product(x, x.dtype, residual), expected + residual)
    assert parts[2].stored("weight_scale").shape == (1, 2)
    assert why_apart(parts[::-1]) == "a layer has 100 outputs, which aren't whole blocks of 128"


def test_global_scales_must_be_equal() -> None:
    floats = [nn.Linear(64, 32), nn.Linear(64, 32)]
    nn.init.constant_(floats[1].weight, 7.3)
    one, other = (linear_class("nvfp4").from_linear(each, "nvfp4") for each in floats)
    assert why_apart([one, other]) == "weight_global_scale of a layer differs from its siblings'"
    assert why_apart([one]) == ""
