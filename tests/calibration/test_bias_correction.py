"""Bias correction against NumPy, and against the mean output of the quantized layer."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qgemm.calibration.bias_correction import BiasCorrection, mean_output_error
from qgemm.calibration.method import Block, Call, LayerWork, QuantizedWeight
from qgemm.calibration.statistics import StatisticsSum
from qgemm.nn import QuantLinear
from qgemm.numerics.formats import INT8
from qgemm.scheme import SCHEMES


def block_of(layer: nn.Module, x: Tensor, scheme: str = "int8") -> tuple[Block, LayerWork]:
    work = LayerWork("0", layer, SCHEMES[scheme])
    model = nn.Sequential(layer)
    return Block("", model, model, {"0": work}, [Call((part,)) for part in x.split(100)]), work


def one_sided(rows: int) -> Tensor:
    """Inputs with a mean, as after ReLU, and a few channels that are always large."""
    x = torch.randn(rows, 64).relu()
    x[:, [3, 50]] += 20
    return x


def test_the_weights_part_is_numpys() -> None:
    x = torch.randn(300, 12) + 1
    layer = nn.Linear(12, 5)
    values = torch.randint(-127, 128, (5, 12), dtype=torch.int8)
    scale = torch.rand(5) / 100 + 0.001
    # Of a weight alone: the input stays in float.
    work = LayerWork("0", layer, replace(SCHEMES["int8"], activation=None), QuantizedWeight(values, scale))
    total = StatisticsSum(rows=300)
    total.add(x)
    assert total.result is not None
    got = mean_output_error(work, total.result).numpy()
    W, mean = layer.weight.detach().numpy().astype(np.float64), x.numpy().astype(np.float64).mean(axis=0)
    W_q = values.numpy().astype(np.float64) * scale.numpy()[:, None]
    np.testing.assert_allclose(got, (W - W_q) @ mean, rtol=1e-5)


@pytest.mark.parametrize("scheme", ["int8", "int8-static"])
def test_the_quantized_layer_is_right_on_average(scheme: str) -> None:
    x = one_sided(1000)
    layer = nn.Linear(64, 24)
    wanted = layer(x).mean(0)
    input_scale = x.abs().max() / INT8.steps if scheme == "int8-static" else None
    errors = []
    for corrected in (False, True):
        linear = copy.deepcopy(layer)
        block, _ = block_of(linear, x, scheme)
        if corrected:
            BiasCorrection().apply(block)
        quantized: Any = QuantLinear.from_linear(linear, scheme, input_scale)
        errors.append((quantized(x).mean(0) - wanted).norm().item())
    # All rows were kept, so that nothing but rounding of sums is left.
    assert errors[1] < 1e-3 * errors[0]


def test_other_inputs_of_the_kind_gain_too() -> None:
    layer = nn.Linear(64, 24)
    corrected = copy.deepcopy(layer)
    BiasCorrection().apply(block_of(corrected, one_sided(500))[0])
    x = one_sided(500)
    errors = [
        (QuantLinear.from_linear(each, "int8")(x) - layer(x)).square().mean().item() for each in (layer, corrected)
    ]
    # Measured: 0.82. What is left is different from token to token.
    assert errors[1] < 0.9 * errors[0]


def test_a_decided_weight_counts() -> None:
    x = one_sided(300)
    layer = nn.Linear(64, 24)
    block, work = block_of(layer, x)
    work.weight = QuantizedWeight(torch.zeros(24, 64, dtype=torch.int8), torch.ones(24))
    before = layer.bias.detach().clone()
    BiasCorrection().apply(block)
    torch.testing.assert_close(layer.bias, before + layer.weight @ x.mean(0), rtol=1e-4, atol=1e-4)


def test_what_has_no_bias_or_saw_nothing_says_so() -> None:
    layer = nn.Linear(64, 24, bias=False)
    block, work = block_of(layer, one_sided(10))
    BiasCorrection().apply(block)
    assert layer.bias is None
    assert work.notes == ["bias-correction: it has no bias"]
    layer = nn.Linear(64, 24)
    block, work = block_of(layer, torch.empty(0, 64))
    before = layer.bias.detach().clone()
    BiasCorrection().apply(block)
    assert torch.equal(layer.bias, before)
    assert work.notes == ["bias-correction: it saw no tokens"]
