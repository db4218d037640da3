"""``Format``: the numbers of each, and what values become, against what the formulas say."""

import pytest
import torch

from qgemm.numerics.formats import FORMATS, INT4, INT8, MIN_SCALE, Format

FORMS = [*FORMATS.values(), INT8.asymmetric]


def test_the_numbers() -> None:
    assert (INT8.low, INT8.high, INT8.steps, INT8.max_k) == (-127, 127, 127, 131_071)
    assert (INT8.asymmetric.low, INT8.asymmetric.high, INT8.asymmetric.steps) == (-128, 127, 255)
    assert (INT4.low, INT4.high, INT4.steps) == (-8, 7, 7.5)
    assert MIN_SCALE == 2.0**-126


@pytest.mark.parametrize("form", FORMS)
def test_a_row_holds_together(form: Format) -> None:
    if not form.storage.is_floating_point:
        assert form.high - form.low < 2**form.bits
    bounds = torch.tensor([form.low, form.high])
    assert torch.equal(bounds.to(form.storage).float(), bounds.float())
    if form.accumulator == torch.int32:
        largest = 2 ** (2 * form.bits - 2)  # of the lowest value that the storage has, with itself
        assert largest * form.max_k < 2**31 <= largest * (form.max_k + 1)


@pytest.mark.parametrize("form", FORMS)
def test_scale_of(form: Format) -> None:
    amax = torch.tensor([form.steps, 2.5 * form.steps, 0.0, 1e-45, torch.inf, torch.nan])
    scale = form.scale_of(amax)
    assert scale.dtype == torch.float32
    assert scale[:4].tolist() == [1.0, 2.5, 1.0, MIN_SCALE]
    assert scale[4:].isnan().all()
    assert form.scale_of(amax.half()).dtype == torch.float32


@pytest.mark.parametrize("form", FORMS)
def test_values_saturate_and_have_no_nan(form: Format) -> None:
    quotients = torch.tensor([-1e9, -torch.inf, 1e9, torch.inf, torch.nan, 0.0])
    stored = form.store(quotients.clone())
    assert stored.dtype == form.storage
    assert stored.tolist() == [form.low, form.low, form.high, form.high, 0, 0]
    assert form.nearest_(quotients)[4].isnan()


def test_whole_values_round_half_to_even() -> None:
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 2.5000002])
    assert INT8.store(values).tolist() == [0, 2, 2, 0, -2, 3]


def test_a_float_format_takes_its_nearest_value() -> None:
    e4m3 = Format("e4m3", torch.float8_e4m3fn, 8, -448.0, 448.0, 448.0, torch.float32)
    values = torch.tensor([17.1, 449.0, -1000.0, 0.001])  # between 16 and 18, beyond either end, about 0.5 * 2^-9
    assert e4m3.nearest_(values).tolist() == [18.0, 448.0, -448.0, 2.0**-9]
