"""``Format``: the numbers of each, and what values become, against what the formulas say."""

import pytest
import torch

from qgemm.numerics.formats import BNB_FP4, FORMATS, FP4, INT4, INT8, MIN_SCALE, NF4, Format

FORMS = [*FORMATS.values(), INT8.asymmetric, INT4.asymmetric]
FOUR_BITS = pytest.mark.parametrize("form", [INT4, INT4.asymmetric, FP4, NF4, BNB_FP4])


def test_the_numbers() -> None:
    assert (INT8.low, INT8.high, INT8.steps, INT8.max_k) == (-127, 127, 127, 131_071)
    assert (INT8.asymmetric.low, INT8.asymmetric.high, INT8.asymmetric.steps) == (-128, 127, 255)
    assert (INT4.low, INT4.high, INT4.steps) == (-8, 7, 7.5)
    assert (INT4.asymmetric.low, INT4.asymmetric.high, INT4.asymmetric.steps) == (-8, 7, 15)
    assert MIN_SCALE == 2.0**-126


@pytest.mark.parametrize("form", FORMS)
def test_a_row_holds_together(form: Format) -> None:
    if not form.storage.is_floating_point:
        assert form.high - form.low < 2**form.bits
    bounds = torch.tensor([form.low, form.high, 0.0])
    stored = form.store(bounds.clone())
    assert stored.dtype == form.storage
    assert torch.equal(form.to_float(stored), bounds)
    assert form.range_of(stored) == (form.low, form.high)
    if form.storage == torch.int8 and form.bits == 8:
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
    assert form.to_float(stored).tolist() == [form.low, form.low, form.high, form.high, 0, 0]
    assert form.nearest_(quotients)[4].isnan()


def test_whole_values_round_half_to_even() -> None:
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 2.5000002])
    assert INT8.store(values).tolist() == [0, 2, 2, 0, -2, 3]


def test_a_float_format_takes_its_nearest_value() -> None:
    e4m3 = Format("e4m3", torch.float8_e4m3fn, 8, -448.0, 448.0, 448.0)
    values = torch.tensor([17.1, 449.0, -1000.0, 0.001])  # between 16 and 18, beyond either end, about 0.5 * 2^-9
    assert e4m3.nearest_(values).tolist() == [18.0, 448.0, -448.0, 2.0**-9]


@FOUR_BITS
def test_every_code_of_four_bits(form: Format, device: torch.device) -> None:
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    values = form.decode(codes)
    assert values.dtype == torch.float32
    stored = form.store(values.clone())
    assert torch.equal(form.to_float(stored), values)
    assert torch.equal(form.decode(form.to_codes(stored)), values)
    assert form.decode(torch.tensor([form.zero_code], dtype=torch.uint8)).tolist() == [0.0]
    if form.bits == 4 and form.table is None:
        assert values.tolist() == [*range(8), *range(-8, 0)]
        assert form.to_codes(form.store(torch.tensor([-3.2, 6.9]))).tolist() == [-3 & 15, 7]


@pytest.mark.parametrize("form", [FP4, NF4, BNB_FP4])
def test_codes_of_the_nearest_values(form: Format) -> None:
    assert form.table is not None
    quotients = torch.linspace(form.low * 1.1, form.high * 1.1, 20011, dtype=torch.float64).float()
    table = torch.tensor(form.table)
    error = (form.decode(form.encode(quotients)) - quotients).abs()
    assert torch.equal(error, (table - quotients[:, None]).abs().amin(1))
    assert torch.equal(form.nearest_(quotients.clone()), form.decode(form.encode(quotients)))
    assert form.encode(torch.tensor([torch.nan, -0.0])).tolist() == [form.zero_code] * 2
    assert form.range_of(torch.tensor([3, 16], dtype=torch.uint8))[0] != 0  # no code: NaN
    assert str(form.range_of(torch.tensor([3, 16], dtype=torch.uint8))) == "(nan, nan)"


@pytest.mark.parametrize(("form", "name"), [(NF4, "nf4"), (BNB_FP4, "fp4")])
def test_the_codebooks_of_bitsandbytes(form: Format, name: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(form.decode(torch.arange(16, dtype=torch.uint8)), functional.get_4bit_type(name, device="cpu"))


def test_what_has_a_codebook() -> None:
    assert [name for name, form in FORMATS.items() if form.has_codebook] == ["nf4", "bnb-fp4"]
    assert BNB_FP4.encode(torch.tensor([0.0, -0.0, 0.002, -0.002])).tolist() == [0, 0, 0, 0]  # never 8, which is 0 too


def test_halves_of_e2m1_go_to_even_codes() -> None:
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert FP4.encode(halves).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert FP4.decode(FP4.encode(-halves)).tolist() == [0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0]
    assert FP4.nearest_(halves.double().clone()).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


@pytest.mark.parametrize("form", [FP4, NF4, BNB_FP4])
def test_codes_beside_the_middle_of_two_values(form: Format) -> None:
    """The two float32 next to it, and itself if it is one: then the even code."""
    assert form.table is not None
    values = torch.tensor(form.table, dtype=torch.float64)
    ordered = values.unique()
    middles = ((ordered[1:] + ordered[:-1]) / 2).float()
    beside = [middles.nextafter(torch.full_like(middles, end)) for end in (-torch.inf, torch.inf)]
    x = torch.cat([middles, *beside])
    gaps = (x.double()[:, None] - values).abs()
    nearest = gaps == gaps.amin(1, keepdim=True)
    codes = form.encode(x).long()
    assert nearest.gather(1, codes[:, None]).all()
    is_tie = (nearest & (values != values[codes][:, None])).any(1)
    assert is_tie.any()
    assert (codes[is_tie] % 2 == 0).all()
