"""Which columns stay in 16 bits, and what that saves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qgemm
from calibration.blocks import llama_with_outliers
from qgemm.calibration.gptq import GPTQ
from qgemm.calibration.method import Block, Call, LayerWork, Method, QuantizedWeight
from qgemm.calibration.outlier_columns import OutlierColumns, largest_columns
from qgemm.scheme import SCHEMES


def chosen(method: OutlierColumns, x: Tensor, scheme: str = "int8", decided: bool = False) -> LayerWork:
    layer = nn.Linear(x.shape[1], 8)
    work = LayerWork("0", layer, SCHEMES[scheme])
    work.weight = QuantizedWeight(torch.zeros(8, x.shape[1], dtype=torch.int8), torch.ones(8)) if decided else None
    model = nn.Sequential(layer)
    method.apply(Block("", model, model, {"0": work}, [Call((part,)) for part in x.split(5)]))
    return work


def inputs(columns: dict[int, float], K: int = 128) -> Tensor:
    """Of magnitudes below 1, but for one value in each of these columns."""
    x = torch.rand(20, K) - 0.5
    for place, (column, value) in enumerate(columns.items()):
        x[place % 20, column] = value
    return x


def test_columns_that_reach_the_threshold_and_the_next_largest() -> None:
    x = inputs({7: 6.0, 90: -50.0, 3: 5.9})
    work = chosen(OutlierColumns(), x, decided=True)
    assert work.scheme.name == "int8-outliers-16"
    assert work.outlier_columns is not None
    assert work.outlier_columns.dtype == torch.int64
    expected = sorted(sorted(range(128), key=lambda column: -float(x[:, column].abs().max()))[:16])
    assert work.outlier_columns.tolist() == expected
    assert {3, 7, 90} <= set(expected)
    # It was one of all columns.
    assert work.weight is None
    assert work.notes == ["its weight was decided before a later method changed what is rounded: put that one first"]


def test_counts_are_rounded_up() -> None:
    x = inputs({})
    assert [chosen(OutlierColumns(count=count), x).scheme.name for count in (1, 16, 17)] == [
        "int8-outliers-16",
        "int8-outliers-16",
        "int8-outliers-32",
    ]
    assert chosen(OutlierColumns(), inputs(dict.fromkeys(range(17), 7.0))).scheme.name == "int8-outliers-32"


def test_a_layer_without_outliers_stays() -> None:
    work = chosen(OutlierColumns(), inputs({4: 5.99}), decided=True)
    assert work.scheme is SCHEMES["int8"]
    assert work.outlier_columns is None
    assert work.weight is not None
    assert not work.notes
    assert chosen(OutlierColumns(), inputs({4: 6.0})).scheme.name == "int8-outliers-16"
    assert chosen(OutlierColumns(threshold=5.9), inputs({4: 5.99})).scheme.name == "int8-outliers-16"


def test_no_more_than_a_quarter() -> None:
    work = chosen(OutlierColumns(), inputs(dict.fromkeys(range(50), 7.0)))
    assert work.scheme.name == "int8-outliers-32"
    assert work.notes == ["outlier-columns: the largest 32 of 50"]
    work = chosen(OutlierColumns(), inputs({1: 7.0}, K=63))
    assert work.scheme is SCHEMES["int8"]
    assert work.notes == ["outlier-columns: it has too few columns, 63"]


def test_schemes_without_such_a_form_say_so() -> None:
    work = chosen(OutlierColumns(), inputs({1: 7.0}), "int4")
    assert work.scheme is SCHEMES["int4"]
    assert work.outlier_columns is None
    assert work.notes == ["outlier-columns: scheme 'int4' has no form with them"]


def test_a_layer_that_saw_nothing_says_so() -> None:
    work = chosen(OutlierColumns(), torch.empty(0, 128))
    assert work.scheme is SCHEMES["int8"]
    assert work.notes == ["outlier-columns: it saw no tokens"]


def test_of_equal_columns_the_first_come() -> None:
    assert largest_columns(torch.tensor([1.0, 2.0, 2.0, 1.0, 2.0]), 2).tolist() == [1, 2]


@pytest.mark.parametrize("scheme", ["int8", "int8-static"])
@pytest.mark.parametrize("then", [[], [GPTQ()]], ids=["nearest", "gptq"])
def test_outlier_channels_lose_their_harm(scheme: str, then: list[Method]) -> None:
    model, inputs = llama_with_outliers(100)
    with torch.no_grad():
        expected = model(**inputs).logits
    errors = []
    for recipe in ([], [OutlierColumns(), *then]):
        quantized: Any = copy.deepcopy(model)
        qgemm.quantize_model(quantized, scheme, calibration=[inputs], recipe=recipe)
        with torch.no_grad():
            errors.append(float((quantized(**inputs).logits - expected).norm()))
    assert {record.action for record in qgemm.report(quantized).quantized} == {scheme, f"{scheme}-outliers-16"}
    assert errors[1] < 0.2 * errors[0], errors


def test_settings() -> None:
    assert OutlierColumns.from_dict({"count": 32}) == OutlierColumns(count=32)
    for settings in ({"threshold": 0.0}, {"count": 0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            OutlierColumns.from_dict(settings)
