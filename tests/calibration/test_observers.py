"""Each observer, against its formula in NumPy and float64."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
import torch
from torch import Tensor

from qgemm.calibration import OBSERVERS, MeanSquaredError, MinMax, MovingAverage, Observer, Percentile
from qgemm.calibration.histogram import Histogram
from qgemm.calibration.observers import resolve_observer, squared_error
from qgemm.kernels.reference import quantize_rows_reference
from qgemm.numerics.formats import MIN_SCALE
from qgemm.scheme import SCHEMES, resolve_scheme

ORDERLESS = [MinMax, Percentile, MeanSquaredError]


def batches(count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 40, 16, generator=generator) * (1 + i % 3) for i in range(count)]


def observed(observer: Observer, xs: list[Tensor]) -> Observer:
    return reduce(lambda seen, x: seen.update(x), xs, observer)


def state(observer: Observer) -> list[object]:
    values = vars(observer).values()
    return [value.tolist() if isinstance(value, Tensor) else value for value in values]


@pytest.mark.parametrize("name", OBSERVERS)
def test_what_every_observer_keeps(name: str) -> None:
    xs = batches()
    seen = observed(OBSERVERS[name](), xs)
    rows = np.concatenate([x.numpy().reshape(-1, 16) for x in xs])
    assert seen.tokens == len(rows)
    assert seen.channel_amax is not None
    assert seen.channel_amax.tolist() == np.abs(rows).max(0).tolist()
    assert seen.channel_min.tolist() == rows.min(0).tolist()
    assert seen.channel_max.tolist() == rows.max(0).tolist()
    assert seen.amax == np.abs(rows).max()


def test_min_max() -> None:
    xs = batches()
    assert observed(MinMax(), xs).scale() == max(float(x.abs().max()) for x in xs) / 127


@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize("shift", [-3.0, 0.0, 5.0, 100.0])
def test_scales_with_a_zero_point(name: str, shift: float) -> None:
    xs = [x + shift for x in batches()]
    seen = observed(OBSERVERS[name](), xs)
    scale, zero_point = seen.scale_and_zero_point()
    rows, clip = torch.cat(xs).flatten(), seen.scale() * 127
    low, high = min(max(float(rows.min()), -clip), 0.0), max(min(float(rows.max()), clip), 0.0)
    assert scale == pytest.approx((high - low) / 255, rel=1e-6)
    assert zero_point == max(-128, min(127, round(-128 - low / scale)))
    asymmetric, symmetric = (resolve_scheme(scheme) for scheme in ("int8-static-asymmetric", "int8-static"))
    assert seen.input_scale(asymmetric) == (scale, zero_point)
    assert seen.input_scale(symmetric) == seen.scale()
    if name == "min-max":
        q, _ = quantize_rows_reference(rows, torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int8))
        error = ((q.double() - zero_point) * scale - rows.double()).abs().max()
        # Nothing saturates by more than a rounding of the zero point.
        assert error <= scale * 1.001


def test_zeros_and_nothing_with_a_zero_point() -> None:
    assert MinMax().update(torch.zeros(3, 4)).scale_and_zero_point() == (1.0, 0)
    with pytest.raises(ValueError, match="no values were seen"):
        MinMax().scale_and_zero_point()


def test_moving_average() -> None:
    xs = batches()
    average = None
    for x in xs:
        amax = np.abs(x.double().numpy()).max()
        average = amax if average is None else 0.8 * average + 0.2 * amax
    assert observed(MovingAverage(0.8), xs).scale() == pytest.approx(average / 127, rel=1e-12)


def test_merged_moving_averages_count_by_their_batches() -> None:
    xs = batches()
    first, second = observed(MovingAverage(), xs[:2]), observed(MovingAverage(), xs[2:])
    expected = (2 * first.scale() + 4 * second.scale()) / 6
    assert first.merge(second).scale() == pytest.approx(expected, rel=1e-12)
    assert first.merge(second).scale() == second.merge(first).scale()


def test_percentile() -> None:
    xs = batches()
    exact = np.percentile(np.abs(torch.stack(xs).double().numpy()), 99, method="inverted_cdf")
    found = observed(Percentile(99.0), xs)
    assert exact <= found.scale() * 127 <= exact + found.amax / 2048
    assert observed(Percentile(100), xs).scale() == observed(MinMax(), xs).scale()


def with_outliers() -> Tensor:
    x = torch.randn(3000, 64, generator=torch.Generator().manual_seed(1))
    x[7, 3] = 40.0
    return x


def test_squared_error_is_the_integral_over_each_bin() -> None:
    found = Histogram.of(with_outliers().abs(), 40.0)
    clips = torch.tensor([40.0, 17.0, 5.0, 1.3, 0.2], dtype=torch.float64)
    # 4000 points within each bin that holds anything, spread evenly.
    used = found.counts.nonzero().flatten().numpy()
    x = (used[:, None] + (np.arange(4000) + 0.5) / 4000) * found.bin_width
    for clip, error in zip(clips.tolist(), squared_error(found, clips).tolist(), strict=True):
        step = clip / 127
        difference = x - step * np.minimum(np.round(x / step), 127)
        expected = ((difference**2).mean(1) * found.counts.numpy()[used]).sum() / found.bin_width**2
        assert error == pytest.approx(expected, rel=1e-5)


def test_mse_takes_the_best_clip_of_the_grid() -> None:
    x = with_outliers()
    found = MeanSquaredError().update(x)
    clips = 40.0 * 2.0 ** (-np.arange(257) / 32)
    values = x.double().numpy()

    def error(clip: float) -> float:
        step = clip / 127
        return float(((values - step * np.clip(np.round(values / step), -127, 127)) ** 2).sum())

    errors = np.array([error(clip) for clip in clips])
    chosen = int(np.argmin(np.abs(clips - found.scale() * 127)))
    assert found.scale() == pytest.approx(clips[chosen] / 127, rel=1e-12)
    # The histogram doesn't know where in a bin a value lies. One step of the grid beside the best is as good.
    assert abs(chosen - int(errors.argmin())) <= 1
    assert errors[chosen] <= 1.01 * errors.min()
    # One value of 40 among 192,000 of a normal distribution is better cut off.
    assert errors[chosen] < 0.6 * errors[0]
    assert found.scale() * 127 < 25


def test_mse_keeps_what_is_evenly_spread() -> None:
    x = torch.rand(1000, 16, generator=torch.Generator().manual_seed(5))
    assert MeanSquaredError().update(x).scale() == pytest.approx(float(x.max()) / 127, rel=0.03)


def test_the_scale_is_that_of_the_int8_layers() -> None:
    x = batches()[0]
    _, scales = quantize_rows_reference(x.reshape(1, -1))
    assert torch.tensor(MinMax().update(x).scale(), dtype=torch.float32) == scales[0]


@pytest.mark.parametrize("kind", ORDERLESS)
def test_any_order_and_any_batches_give_the_same_bits(kind: type[Observer]) -> None:
    xs = [*batches(), torch.zeros(2, 16), torch.full((1, 16), 1e-3), torch.full((1, 16), 900.0)]
    rows = torch.cat([x.reshape(-1, 16) for x in xs])
    expected = kind().update(rows)
    assert state(observed(kind(), xs[::-1])) == state(expected)
    left, right = observed(kind(), xs[1::2]), observed(kind(), xs[::2])
    assert state(left.merge(right)) == state(right.merge(left)) == state(expected)
    assert left.merge(right).scale() == expected.scale()


@pytest.mark.parametrize("name", OBSERVERS)
def test_nothing_zeros_and_the_smallest(name: str) -> None:
    blank = OBSERVERS[name]()
    assert blank.update(torch.empty(0, 16)) is blank
    with pytest.raises(ValueError, match="no values were seen"):
        blank.scale()
    zeros = blank.update(torch.zeros(2, 16))
    assert zeros.scale() == 1.0
    assert zeros.merge(blank) is zeros
    assert blank.update(torch.full((2, 16), 1e-45)).scale() == MIN_SCALE


@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_nan_and_inf_are_refused(name: str, dtype: torch.dtype, bad: float) -> None:
    x = torch.ones(3, 16, dtype=dtype)
    seen = OBSERVERS[name]().update(x)
    assert seen.scale() > 0
    x[1, 2] = bad
    with pytest.raises(ValueError, match="x holds NaN or Inf"):
        seen.update(x)


def test_only_like_is_merged() -> None:
    x = torch.ones(2, 16)
    with pytest.raises(ValueError, match=r"MinMax\(\) can't be merged with Percentile\(percentile=99.99\)"):
        MinMax().merge(Percentile())
    with pytest.raises(ValueError, match=r"Percentile\(percentile=99\) can't be merged"):
        Percentile(99).update(x).merge(Percentile(98).update(x))
    with pytest.raises(ValueError, match="16 and 8 columns"):
        MinMax().update(x).merge(MinMax().update(torch.ones(2, 8)))


def test_settings() -> None:
    with pytest.raises(ValueError, match="percentile is 0"):
        Percentile(0)
    with pytest.raises(ValueError, match="momentum is 1"):
        MovingAverage(1)
    with pytest.raises(ValueError, match=r"observer is 'max'; it must be one of \['min-max', 'moving-average', 'mse'"):
        resolve_observer("max")
    used = Percentile(90.0).update(torch.ones(2, 16))
    assert state(resolve_observer(used)) == state(Percentile(90.0))


def test_the_scale_of_fp8() -> None:
    x, scheme = torch.randn(4096, 16), SCHEMES["fp8-static"]
    x[0, 0] = 12  # which int8 clips
    assert MeanSquaredError().update(x).scale() < 12 / 127
    for observer in (MinMax(), MeanSquaredError()):
        assert observer.update(x).input_scale(scheme) == 12 / 448
    assert Percentile(90.0).update(x).input_scale(scheme) < 12 / 448
