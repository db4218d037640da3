"""What a rotated layer, and one with outlier columns, round."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from qgemm.calibration.awq import AWQ
from qgemm.calibration.gptq import GPTQ
from qgemm.calibration.method import Block, Call, LayerWork, Method
from qgemm.calibration.rounded_part import rounded_input, rounded_moment, rounded_part, rounded_weight
from qgemm.calibration.rounding import MSEWeights, dequantize
from qgemm.calibration.statistics import InputStatistics, StatisticsSum
from qgemm.numerics.formats import INT8
from qgemm.numerics.hadamard import hadamard
from qgemm.scheme import INT8_ROWS, SCHEMES, QuantScheme


def work_of(scheme: QuantScheme, columns: list[int] | None = None) -> LayerWork:
    work = LayerWork("layer", nn.Linear(64, 24), scheme)
    work.outlier_columns = None if columns is None else torch.tensor(columns)
    return work


def rotated(scheme: QuantScheme) -> QuantScheme:
    assert scheme.activation is not None
    return replace(scheme, activation=replace(scheme.activation, rotation="hadamard"))


def seen_of(x: Tensor) -> InputStatistics:
    total = StatisticsSum(rows=len(x), second_moment=True)
    total.add(x)
    assert total.result is not None
    return total.result


def test_all_of_a_plain_layer_is_rounded() -> None:
    work = work_of(SCHEMES["int8"])
    x = torch.randn(50, 64)
    assert torch.equal(rounded_part(work, x), x)
    assert torch.equal(rounded_weight(work), work.module.weight)


@pytest.mark.parametrize("kind", ["rotation", "outliers"])
def test_parts_of_input_and_weight_give_the_output(kind: str) -> None:
    work = work_of(rotated(SCHEMES["int8"])) if kind == "rotation" else work_of(SCHEMES["int8"], [3, 40])
    x = torch.randn(50, 64)
    out = rounded_part(work, x) @ rounded_weight(work).T
    if kind == "outliers":
        out += x[:, [3, 40]] @ work.module.weight[:, [3, 40]].T
    else:
        assert not torch.allclose(rounded_part(work, x), x)
    torch.testing.assert_close(out, x @ work.module.weight.T)
    part = rounded_part(work, x)
    torch.testing.assert_close(rounded_moment(work, seen_of(x)), part.T @ part / 50)


@pytest.mark.parametrize("method", [GPTQ(), MSEWeights(), MSEWeights(by_input=True), AWQ()])
@pytest.mark.parametrize("kind", ["rotation", "outliers"])
def test_methods_decide_the_weight_of_the_part(kind: str, method: Method) -> None:
    work = work_of(rotated(SCHEMES["int8"])) if kind == "rotation" else work_of(SCHEMES["int8"], [3, 40])
    with torch.no_grad():
        work.module.weight[:, [3, 40]] *= 100  # type: ignore[operator]
    part = rounded_weight(work)
    x = torch.randn(200, 64) @ torch.randn(64, 64)
    model = nn.Sequential(work.module)
    method.apply(Block("", model, model, {"layer": work}, [Call((x,))]))
    assert work.weight is not None
    assert (dequantize(work.weight, INT8_ROWS) - part).norm() < 0.02 * part.norm()
    if kind == "outliers":
        assert not work.weight.values[:, [3, 40]].any()


@pytest.mark.parametrize("scheme", ["int8", "int8-static"])
def test_an_outlier_column_counts_for_no_scale(scheme: str) -> None:
    x = torch.randn(50, 64)
    x[:, 7] *= 1000
    part, rounded = rounded_input(work_of(SCHEMES[scheme], [7]), seen_of(x))
    assert not part[:, 7].any()
    assert not rounded[:, 7].any()
    # Half a step of a scale of about 4 / 127.
    assert (rounded - part).abs().max() < 0.02
    assert (rounded - part).abs().max() > 0.005


def test_a_static_range_is_that_of_all_tokens() -> None:
    x = torch.randn(50, 64)
    seen = replace(seen_of(x), channel_amax=torch.full((64,), 12.7))
    _, rounded = rounded_input(work_of(SCHEMES["int8-static"]), seen)
    assert torch.equal(rounded, (x / 0.1).round() * 0.1)
    _, rounded = rounded_input(work_of(SCHEMES["int8-static"]), seen, torch.full((64,), 2.0))
    torch.testing.assert_close(rounded, (x / 2 / 0.05).round() * 0.05)
    x = x / 8 + 0.25
    _, rounded = rounded_input(work_of(SCHEMES["int8-static-asymmetric"]), seen_of(x))
    step = (x.max() - x.min()) / 255
    torch.testing.assert_close(rounded, (x / step).round() * step)
    _, rounded = rounded_input(work_of(SCHEMES["int8-static-asymmetric"]), seen_of(x.abs() + 1))
    step = (x.abs().max() + 1) / 255  # from 0 on
    torch.testing.assert_close(rounded, ((x.abs() + 1) / step).round() * step)


@pytest.mark.parametrize("scheme", ["int8", "int8-static"])
def test_a_rotated_input_is_rounded_after_its_rotation(scheme: str) -> None:
    x = torch.randn(50, 64)
    x[:, 7] *= 100
    part, rounded = rounded_input(work_of(rotated(SCHEMES[scheme])), seen_of(x))
    assert torch.equal(part, hadamard(x))
    amax = part.abs().amax(1, keepdim=True) if scheme == "int8" else part.abs().max()
    torch.testing.assert_close(rounded, (part / (amax / INT8.steps)).round() * (amax / INT8.steps))


def test_rows_of_zeros_and_inputs_in_float() -> None:
    for scheme in SCHEMES.values():
        _, rounded = rounded_input(work_of(scheme), seen_of(torch.zeros(3, 64)))
        assert not rounded.any()
    x = torch.randn(3, 64)
    part, rounded = rounded_input(work_of(replace(SCHEMES["int8"], activation=None)), seen_of(x))
    assert torch.equal(rounded, x)
    assert torch.equal(part, x)
