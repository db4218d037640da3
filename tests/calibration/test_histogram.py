"""The histogram, against NumPy's."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from qgemm.calibration.histogram import BINS, Histogram


def histogram(values: Tensor) -> Histogram:
    return Histogram.of(values.abs(), float(values.abs().max()))


@pytest.mark.parametrize("spread", [1e-30, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_are_numpys(spread: float, dtype: torch.dtype) -> None:
    values = (torch.randn(5000, generator=torch.Generator().manual_seed(1)) * spread).to(dtype)
    found = histogram(values)
    magnitudes = values.double().abs().numpy()
    limit = 2.0 ** (np.floor(np.log2(magnitudes.max())) + 1)
    expected, _ = np.histogram(magnitudes, bins=BINS, range=(0.0, limit))
    assert found.bin_width == limit / BINS
    assert found.counts.tolist() == expected.tolist()


# A value on the edge of the range, alone zeros, subnormal numbers, the largest float32.
@pytest.mark.parametrize("largest", [1.0, 0.0, 1e-45, torch.finfo(torch.float32).max])
def test_every_value_is_counted(largest: float) -> None:
    values = torch.tensor([largest, 0.0, largest / 2])
    assert int(histogram(values).counts.sum()) == 3


def test_merging_in_any_order_is_one_pass() -> None:
    generator = torch.Generator().manual_seed(2)
    # Ranges from far below to far above each other's, and a piece of zeros.
    pieces = [torch.randn(999, generator=generator) * 10.0**power for power in (-20, -2, -1, 0, 1, 1)]
    pieces.insert(2, torch.zeros(5))
    expected = histogram(torch.cat(pieces))
    for order in ([0, 1, 2, 3, 4, 5, 6], [6, 4, 2, 0, 1, 3, 5], [5, 6, 0, 2, 4, 3, 1]):
        found = Histogram()
        for index in order:
            found = found.merge(histogram(pieces[index]))
        assert torch.equal(found.counts, expected.counts)
        assert found.amax == expected.amax


def test_a_tensor_of_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    expected = histogram(values)
    monkeypatch.setattr("qgemm.calibration.histogram._PIECE", 64)
    assert torch.equal(histogram(values).counts, expected.counts)


@pytest.mark.parametrize("percentile", [0.001, 1, 50, 99, 99.9, 100])
def test_percentile_is_within_a_bin_of_the_sorted_values(percentile: float) -> None:
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(4))
    found = histogram(values)
    # Of the values in order, the first with so many per cent at or before it. NumPy's own percentile rounds 99.9 % up.
    exact = values.abs().sort().values[math.ceil(Fraction(str(percentile)) * 20_000 / 100) - 1].item()
    assert exact <= found.percentile(percentile) <= exact + found.bin_width
