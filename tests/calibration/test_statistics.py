"""Statistics of a layer's inputs against what NumPy makes of all rows at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from qgemm.calibration.statistics import InputStatistics, StatisticsSum


def added(calls: list[Tensor], *, second_moment: bool = False, rows: int = 0) -> InputStatistics:
    total = StatisticsSum(second_moment=second_moment, rows=rows)
    for x in calls:
        total.add(x)
    assert total.result is not None
    return total.result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_and_magnitudes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    calls = [torch.randn(shape, generator=generator).to(dtype) for shape in [(2, 5, 24), (0, 24), (24,), (1, 9, 24)]]
    x = torch.cat([call.reshape(-1, 24) for call in calls]).double().numpy()
    seen = added(calls, second_moment=True)
    assert seen.tokens == len(x) == 20
    np.testing.assert_array_equal(seen.channel_amax.numpy(), np.abs(x).max(0).astype(np.float32))
    np.testing.assert_allclose(seen.mean.numpy(), x.mean(0), rtol=1e-5, atol=1e-6)
    assert seen.second_moment is not None
    assert seen.second_moment.dtype == seen.mean.dtype == torch.float32
    np.testing.assert_allclose(seen.second_moment.numpy(), x.T @ x / len(x), rtol=1e-5, atol=1e-6)
    assert seen.rows is None
    assert added(calls).second_moment is None
    # A sum in float32 would round the 3.
    assert added([torch.tensor([[value]]) for value in (2.0**24, 3.0, -(2.0**24))]).mean == 1.0


def test_the_second_moment_gives_the_error_of_a_layers_output() -> None:
    x, error = torch.randn(50, 16), torch.randn(8, 16)
    seen = added(list(x.split(7)), second_moment=True)
    assert seen.second_moment is not None
    wanted = (x @ error.T).square().sum() / 50
    torch.testing.assert_close(torch.trace(error @ seen.second_moment @ error.T), wanted)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 31, 32, 33, 100, 1000])
def test_rows_are_spread_evenly_however_they_come(count: int) -> None:
    x = torch.arange(count, dtype=torch.float32)[:, None].expand(count, 3)
    rows = added(list(x.split(1)), rows=8).rows
    assert rows is not None
    assert len(rows) == min(count, 8)
    steps = rows[:, 0].diff()
    assert (steps > 0).all()
    if count > 8:
        # Two neighbours are at most twice as far apart as two others.
        assert steps.max() <= 2 * steps.min()
        assert rows[-1, 0] >= count - 1 - 2 * steps.max()
    for pieces in (3, 7, 64, 1000):
        again = added(list(x.split(pieces)), rows=8).rows
        assert again is not None
        assert torch.equal(again, rows)


def test_rows_are_copies_in_their_own_dtype() -> None:
    x = torch.ones(4, 3, dtype=torch.bfloat16)
    rows = added([x], rows=4).rows
    x.zero_()
    assert rows is not None
    assert torch.equal(rows, torch.ones(4, 3, dtype=torch.bfloat16))


def test_nothing_and_nan() -> None:
    total = StatisticsSum()
    assert total.add(torch.empty(0, 3)) is None
    assert total.result is None
    with pytest.raises(ValueError, match="x holds NaN or Inf"):
        total.add(torch.tensor([[1.0, float("inf")]]))
