"""SmoothQuant's scales against the paper's formula, and what they do to models with outlier channels."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES
from families.mixtures import MIXTURES
from torch import Tensor, nn

import qgemm
from calibration.blocks import block_of, llama_with_outliers
from qgemm.calibration.gptq import GPTQ
from qgemm.calibration.method import LayerWork
from qgemm.calibration.smoothquant import ALPHAS, SmoothQuant, smoothed_loss, smoothing_scales
from qgemm.calibration.statistics import InputStatistics, StatisticsSum
from qgemm.nn import QuantLinear
from qgemm.nn.linear_layer import linear_weight
from qgemm.numerics.formats import INT8
from qgemm.scheme import SCHEMES, QuantScheme, TensorScheme


def seen_of(x: Tensor) -> InputStatistics:
    total = StatisticsSum(rows=len(x))
    total.add(x)
    assert total.result is not None
    return total.result


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_scales_are_the_papers(alpha: float) -> None:
    rng = np.random.default_rng(0)
    x, first, second = rng.normal(size=(20, 12)) * 10, rng.normal(size=(7, 12)), rng.normal(size=(9, 12))
    x_max = np.abs(x).max(axis=0)
    w_max = np.maximum(np.abs(first).max(axis=0), np.abs(second).max(axis=0))
    expected = np.power(x_max, alpha) / np.power(w_max, 1 - alpha)
    got = smoothing_scales(torch.tensor(x_max), torch.tensor(w_max), alpha)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5)


def test_channels_of_zeros_stay() -> None:
    scales = smoothing_scales(torch.tensor([0.0, 3.0, 0.0, 4.0]), torch.tensor([2.0, 0.0, 0.0, 1.0]), 0.5)
    assert scales.tolist() == [1, 1, 1, 2]


@pytest.mark.slow(quick=["llama", "bert"])
@pytest.mark.parametrize("alpha", [0.5, "search"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "phi3", "falcon", "opt", "t5", "qwen2_moe", "bert"])
def test_the_float_function_stays(family: str, alpha: Any) -> None:
    example = {**FAMILIES, **MIXTURES}[family]()
    expected = example.output()
    block = block_of(example.model, example.inputs)
    before = {name: linear_weight(work.module).clone() for name, work in block.layers.items()}
    SmoothQuant(alpha).apply(block)
    assert (example.output() - expected).norm() < 2e-5 * expected.norm()
    if alpha == 0.5:
        noted = {name for name, work in block.layers.items() if work.notes}
        changed = {
            name for name, work in block.layers.items() if not torch.equal(linear_weight(work.module), before[name])
        }
        # Values' rows are divided for the layer after, whether or not their own input is scaled.
        assert set(block.layers) - changed <= noted
        assert changed


def test_paper_scales_reach_the_layers() -> None:
    model, inputs = llama_with_outliers(30)
    block = block_of(model, inputs)
    names = [f"model.layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    weights = [linear_weight(block.layers[name].module).clone() for name in names]
    x_max = block.collect(names[:1])[names[0]].channel_amax
    SmoothQuant(0.5, through_linear=False).apply(block)
    w_max = torch.cat(weights).abs().amax(0)
    scales = (x_max / w_max).sqrt()
    for name, weight in zip(names, weights, strict=True):
        torch.testing.assert_close(linear_weight(block.layers[name].module), weight * scales)
    after = block.collect(names[:1])[names[0]].channel_amax
    # Both as large in every channel.
    torch.testing.assert_close(after, torch.cat([w * scales for w in weights]).abs().amax(0))


@pytest.mark.parametrize("scheme", ["int8", "int8-static"])
@pytest.mark.parametrize("alpha", [0.5, "search"])
def test_outlier_channels_lose_their_harm(scheme: str, alpha: Any) -> None:
    model, inputs = llama_with_outliers(100)
    with torch.no_grad():
        expected = model(**inputs).logits
    smoothed = copy.deepcopy(model)
    SmoothQuant(alpha).apply(block_of(smoothed, inputs, scheme=scheme))
    errors = []
    for float_model in (model, smoothed):
        calibration = [inputs] if scheme == "int8-static" else None
        quantized = qgemm.quantize_model(copy.deepcopy(float_model), scheme, calibration=calibration, progress=False)
        with torch.no_grad():
            errors.append(float((quantized(**inputs).logits - expected).norm()))
    assert errors[1] < 0.2 * errors[0]


@pytest.mark.parametrize("scheme", ["int8", "int8-static"])
def test_the_loss_is_that_of_the_quantized_layer(scheme: str) -> None:
    x, scales = torch.randn(50, 64) * torch.linspace(0.1, 5, 64), torch.linspace(0.5, 2, 64)
    linear = nn.Linear(64, 24, bias=False)
    wanted = linear(x)
    loss = smoothed_loss(LayerWork("", linear, SCHEMES[scheme]), seen_of(x), scales)
    with torch.no_grad():
        linear.weight *= scales
    amax = (x / scales).abs().max()
    layer: Any = QuantLinear.from_linear(linear, scheme, amax / INT8.steps if scheme == "int8-static" else None)
    error = (layer(x / scales) - wanted).square().sum().item() / wanted.square().sum().item()
    assert loss == pytest.approx(error, rel=1e-3)


def test_an_asymmetric_input_errs_less_where_values_lie_on_one_side() -> None:
    x, linear = torch.rand(200, 64), nn.Linear(64, 24)
    losses = []
    for symmetric in (True, False):
        activation = TensorScheme("int8", "tensor", symmetric=symmetric)
        scheme = QuantScheme("test", TensorScheme("int8", "channel"), activation)
        losses.append(smoothed_loss(LayerWork("", linear, scheme), seen_of(x), torch.ones(64)))
    assert losses[1] < losses[0]


def test_search_finds_the_least_loss_or_leaves_a_layer_alone() -> None:
    model, inputs = llama_with_outliers(100)
    block = block_of(model, inputs)
    name = "model.layers.0.self_attn.o_proj"
    works = {other: block.layers[other] for other in block.layers if ".layers.0.self_attn." in other}
    block.layers = works
    qkv = [works[f"model.layers.0.self_attn.{each}_proj"] for each in "qkv"]
    (seen,) = block.collect([qkv[0].name], rows=512).values()
    weights = [linear_weight(work.module).clone() for work in qkv]
    w_max = torch.cat(weights).abs().amax(0)

    def loss(scales: Tensor) -> float:
        return sum(smoothed_loss(work, seen, scales) for work in qkv)

    losses = {alpha: loss(smoothing_scales(seen.channel_amax, w_max, alpha)) for alpha in ALPHAS}
    best = min(losses, key=lambda alpha: losses[alpha])
    assert losses[best] < 0.1 * loss(torch.ones(64))
    SmoothQuant("search", through_linear=False).apply(block)
    scales = smoothing_scales(seen.channel_amax, w_max, best)
    torch.testing.assert_close(linear_weight(qkv[0].module), weights[0] * scales)
    assert works[name].notes == [
        "smoothquant: not scaled: its input comes from a linear layer, and through_linear is off"
    ]


class GainNorm(nn.Module):
    """A norm's gain without the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_where_nothing_is_to_gain_weights_stay() -> None:
    # Whole numbers with 127 in every row are rounded to themselves.
    reach = torch.linspace(1, 100, 32)
    x, weight = (
        torch.randn(n, 32).mul(each).round().clamp(-127, 127) for n, each in ((40, reach), (24, reach.flip(0)))
    )
    x[:, 3] = weight[:, 20] = 127
    model = nn.Sequential(GainNorm(), nn.Linear(32, 24))
    with torch.no_grad():
        model[1].weight.copy_(weight)
    block = block_of(model, {"input": x})
    SmoothQuant("search").apply(block)
    assert block.layers["1"].notes == []
    assert torch.equal(linear_weight(model[1]), weight)
    assert torch.equal(model[0].weight, torch.ones(32))
    SmoothQuant(0.5).apply(block)
    assert not torch.equal(linear_weight(model[1]), weight)


def test_layers_that_cannot_be_scaled_say_why() -> None:
    example = FAMILIES["bert"]()
    block = block_of(example.model, example.inputs)
    SmoothQuant().apply(block)
    assert block.layers["bert.encoder.layer.1.intermediate.dense"].notes == [
        "smoothquant: not scaled: scales in 'bert.encoder.layer.1.attention.output.LayerNorm' don't verifiably keep "
        "what the block computes"
    ]
    assert block.layers["bert.encoder.layer.1.attention.output.dense"].notes == []


def test_weights_that_were_decided_before_are_taken_back() -> None:
    example = FAMILIES["bert"]()
    block = block_of(example.model, example.inputs)
    GPTQ().apply(block)
    SmoothQuant().apply(block)
    late = "its weight was decided before a later method changed what is rounded: put that one first"
    layer = "bert.encoder.layer.1"
    # Scales of the second of these two go into the first.
    for name in ("attention.self.value", "attention.output.dense"):
        assert block.layers[f"{layer}.{name}"].weight is None
        assert late in block.layers[f"{layer}.{name}"].notes
    untouched = block.layers[f"{layer}.intermediate.dense"]
    assert untouched.weight is not None
    assert late not in untouched.notes


def test_inputs_in_float_need_no_smoothing() -> None:
    example = FAMILIES["llama"]()
    block = block_of(example.model, example.inputs)
    for work in block.layers.values():
        work.scheme = QuantScheme("weights", TensorScheme("int8", "channel"), None)
    before = {name: value.clone() for name, value in example.model.state_dict().items()}
    SmoothQuant().apply(block)
    assert all(torch.equal(value, before[name]) for name, value in example.model.state_dict().items())
    assert {note for work in block.layers.values() for note in work.notes} == {
        "smoothquant: not scaled: its input stays in float"
    }


def test_settings() -> None:
    method = SmoothQuant("search", through_linear=False)
    assert SmoothQuant.from_dict(method.to_dict()) == method
    assert SmoothQuant.from_dict({"alpha": 1}) == SmoothQuant(1.0)
    assert SmoothQuant(0).alpha == 0
    with pytest.raises(ValueError, match="alpha is None; it must be 0 to 1, or 'search'"):
        SmoothQuant(None)  # type: ignore[arg-type]
    for alpha in (-0.1, 1.5, "best"):
        with pytest.raises(ValueError, match="alpha"):
            SmoothQuant.from_dict({"alpha": alpha})
