"""Groups: rounding, scales and zero points as they are stored, and what values stand for."""

import numpy as np
import pytest
import torch
from torch import Tensor

from qgemm.numerics.formats import BNB_FP4, FORMATS, FP4, FP8, INT4, INT8, NF4, Format
from qgemm.numerics.groups import (
    SCALE_DTYPES,
    dequantize,
    float_scale,
    global_scale_of,
    grouped,
    quantize_groups,
    round_scale,
    spread,
    steps_of,
    store_scale,
    store_values,
)
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import packed_width

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
# Below, at and beyond a group; whole and ragged last groups.
WIDTHS = [1, 7, 31, 32, 33, 64, 70, 256]


def by_hand(weight: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales from the formula, a group at a time."""
    N, K = weight.shape
    q, scales = np.zeros((N, K), np.int8), np.ones((N, -(-K // group_size)), np.float32)
    for n in range(N):
        for g in range(scales.shape[1]):
            part = weight[n, g * group_size : (g + 1) * group_size]
            if part.any():
                scales[n, g] = max(np.float32(np.abs(part).max()) / np.float32(7.5), np.finfo(np.float32).tiny)
            q[n, g * group_size : (g + 1) * group_size] = np.clip(np.round(part / scales[n, g]), -8, 7)
    return q, scales


@pytest.mark.parametrize("group_size", [1, 32, 128])
@pytest.mark.parametrize("K", WIDTHS)
def test_quantize_groups(K: int, group_size: int, device: torch.device) -> None:
    weight = torch.randn(5, K, device=device) * torch.logspace(-3, 3, 5, device=device)[:, None]
    weight[2, : K // 2] = 0
    q, scale, _ = quantize_groups(weight, group_size)
    wanted, scales = by_hand(weight.cpu().numpy(), group_size)
    assert np.array_equal(q.cpu().numpy(), wanted)
    assert np.array_equal(scale.cpu().numpy(), scales)
    assert scale.shape == (5, cdiv(K, group_size))
    error = (q * spread(scale, group_size, K) - weight).abs()
    assert (error <= spread(scale, group_size, K) * (0.5 + 1e-6)).all()


@DTYPES
def test_sixteen_bit_weights_are_rounded_as_the_floats_they_are(dtype: torch.dtype, device: torch.device) -> None:
    weight = torch.randn(5, 70, device=device).to(dtype)
    for mine, wanted in zip(quantize_groups(weight, 32)[:2], quantize_groups(weight.float(), 32)[:2], strict=True):
        assert torch.equal(mine, wanted)


def test_the_largest_value_of_either_sign(device: torch.device) -> None:
    q, scale, _ = quantize_groups(torch.tensor([[7.5, 1.0], [-7.5, 1.0]], device=device), 2)
    assert q.tolist() == [[7, 1], [-8, 1]]
    assert scale.tolist() == [[1.0], [1.0]]


def test_tiny_and_zero_groups(device: torch.device) -> None:
    weight = torch.tensor([[1e-44, -1e-44, 0, 0]], device=device)
    q, scale, _ = quantize_groups(weight, 2)
    assert q.tolist() == [[0, 0, 0, 0]]
    assert scale.tolist() == [[torch.finfo(torch.float32).tiny, 1.0]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_has_no_scale(value: float, device: torch.device) -> None:
    weight = torch.randn(2, 64, device=device)
    weight[1, 40] = value
    _, scale, _ = quantize_groups(weight, 32)
    assert scale.isnan().tolist() == [[False, False], [False, True]]


@pytest.mark.parametrize("form", [INT4.asymmetric, INT8.asymmetric])
@pytest.mark.parametrize("K", [1, 33, 70])
def test_zero_points(form: Format, K: int, device: torch.device) -> None:
    weight = torch.rand(6, K, device=device) + torch.tensor([-1.0, -0.5, 0, 1, -3, 0], device=device)[:, None]
    weight[5] = 0
    q, scale, zero = quantize_groups(weight, 32, form, "bfloat16")
    assert zero is not None
    assert zero.dtype == torch.int8
    assert torch.equal(scale, scale.bfloat16().float())
    low, high = -(2 ** (form.bits - 1)), 2 ** (form.bits - 1) - 1
    assert low <= q.amin() <= q.amax() <= high
    assert low <= zero.amin() <= zero.amax() <= high
    for n in range(6):
        for g in range(cdiv(K, 32)):
            part = weight[n, 32 * g : 32 * g + 32].double()
            least, most = min(part.amin().item(), 0.0), max(part.amax().item(), 0.0)
            if not part.any():
                assert (scale[n, g].item(), q[n, 32 * g : 32 * g + 32].unique().tolist()) == (1.0, [zero[n, g].item()])
                continue
            assert scale[n, g].item() == pytest.approx((most - least) / (high - low), rel=2**-8)
            assert zero[n, g].item() == np.clip(round(low - least / scale[n, g].item()), low, high)
    restored = (q.float() - spread(zero, 32, K)) * spread(scale, 32, K)
    # The zero point is rounded too; a scale rounded down may leave the last value half a step short.
    assert ((restored - weight).abs() <= spread(scale, 32, K) * 1.6).all()
    assert (restored[weight == 0] == 0).all()


@pytest.mark.parametrize("form", [INT4.with_float_zeros, INT8.with_float_zeros])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_float_zero_points(dtype: str, form: Format, device: torch.device) -> None:
    """The range needn't contain 0, and values are rounded with the scale and the zero point that are stored."""
    weight = torch.rand(4, 64, device=device) + torch.tensor([-1.0, 0, 3, -3], device=device)[:, None]
    weight[1, 32:] = 0.3
    q, scale, zero = quantize_groups(weight, 32, form, dtype)
    assert zero is not None
    assert zero.dtype == SCALE_DTYPES[dtype]
    restored = dequantize(store_values(q, form), scale, zero, None, form, 32, 64, torch.float32)
    # Rounding a zero point, or 255 steps, shifts the range, which may leave out the last value.
    bound = spread(scale, 32, 64) / 2 + 4 * torch.finfo(zero.dtype).eps
    bound[1, 32:] = torch.finfo(zero.dtype).eps
    assert ((restored - weight).abs() <= bound).all()
    inside = (q > form.low) & (q < form.high)
    assert ((restored - weight).abs() <= spread(scale, 32, 64) / 2 + 1e-6)[inside & (weight != weight[1, 32])].all()


def test_scales_of_powers_of_two(device: torch.device) -> None:
    scale = torch.tensor([1.0, 1.1, 1.2, 1.21, 2.0, 2.0**-126, 3e38, torch.nan, torch.inf], device=device)
    of_fp4 = [1.0, 1.0, 1.0, 2.0, 2.0, 2.0**-126, 2.0**127 * 2]
    assert round_scale(scale, "e8m0", FP4)[:6].tolist() == of_fp4[:6]
    assert round_scale(scale, "e8m0", FP8)[:5].tolist() == [1.0, 2.0, 2.0, 2.0, 2.0]
    rounded = round_scale(scale, "e8m0", FP4)
    assert rounded[7:].isnan().all()
    stored = store_scale(rounded, "e8m0")
    assert stored.dtype == torch.uint8
    assert stored[[0, 3, 5, 7]].tolist() == [127, 128, 1, 255]
    assert torch.equal(float_scale(stored)[:7], rounded[:7])
    assert float_scale(torch.tensor([0, 254, 255], dtype=torch.uint8)).tolist()[:2] == [2.0**-127, 2.0**127]
    assert float_scale(torch.tensor([255], dtype=torch.uint8)).isnan().all()


def test_e8m0_stores_whatever_it_has_read() -> None:
    bytes_ = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(store_scale(float_scale(bytes_), "e8m0"), bytes_)


def test_scales_of_e4m3(device: torch.device) -> None:
    weight = torch.randn(8, 64, device=device) * torch.logspace(-5, 1, 8, device=device)[:, None]
    weight[3] = 0
    unit = global_scale_of(weight.abs().amax(), FP4)
    assert unit.shape == (2,)
    assert torch.frexp(unit)[0].tolist() == [0.5, 0.5]  # powers of two
    _, scale, _ = quantize_groups(weight, 16, FP4, "e4m3", unit)
    assert (scale > 0).all()
    stored = store_scale(scale, "e4m3", unit)
    assert stored.dtype == torch.float8_e4m3fn
    assert 224 < stored.float().amax() <= 448
    assert stored[3].float().tolist() == [2.0**-9] * 4
    assert torch.equal(float_scale(stored, unit), scale)
    # It follows from the scales alone.
    again = global_scale_of(scale.amax() * FP4.steps, FP4)
    assert torch.equal(float_scale(store_scale(scale, "e4m3", again), again), scale)


def test_the_global_scale_of_zeros_follows_from_their_scales(device: torch.device) -> None:
    weight = torch.zeros(2, 32, device=device)
    unit = global_scale_of(weight.amax(), FP4)
    _, scale, _ = quantize_groups(weight, 16, FP4, "e4m3", unit)
    assert torch.equal(global_scale_of(scale.amax() * FP4.steps, FP4), unit)


@pytest.mark.parametrize("dtype", SCALE_DTYPES)
def test_scales_that_are_stored(dtype: str, device: torch.device) -> None:
    scale = torch.logspace(-6, 3, 40, device=device)[None]
    unit = global_scale_of(scale.amax() * 6, FP4) if dtype == "e4m3" else None
    rounded = round_scale(scale, dtype, FP4, unit)
    assert (rounded > 0).all()
    assert torch.equal(round_scale(rounded, dtype, FP8, unit), rounded)
    stored = store_scale(rounded, dtype, unit)
    assert stored.dtype == SCALE_DTYPES[dtype]
    assert torch.equal(float_scale(stored, unit), rounded)


def test_a_global_scale_divides_as_others_have_it() -> None:
    stored = torch.tensor([[3.5, -448.0]]).to(torch.float8_e4m3fn)
    factor, divisor = torch.tensor([0.3, 1.0]), torch.tensor([1.0, 3475.394])
    assert torch.equal(float_scale(stored, factor), stored.float() * torch.tensor(0.3))
    assert torch.equal(float_scale(stored, divisor), stored.float() / torch.tensor(3475.394))
    for unit in (factor, divisor):
        assert torch.equal(store_scale(float_scale(stored, unit), "e4m3", unit), stored)
        scale = float_scale(stored, unit).abs()
        torch.testing.assert_close(round_scale(scale, "e4m3", FP4, unit), scale)


def stored(
    N: int, K: int, group_size: int, device: torch.device, form: Format = INT4
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, these as they are stored, scales and zero points."""
    values = form.store(torch.randn(N, K, device=device) * form.high / 2)
    groups = N, cdiv(K, group_size)
    zero = torch.randint(-8, 9, groups, dtype=torch.int8, device=device)
    return values, store_values(values, form), torch.rand(groups, device=device) + 0.01, zero


@pytest.mark.parametrize("form", [INT4, INT8, FP8, FP4, NF4, BNB_FP4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dequantize(dtype: torch.dtype, form: Format, device: torch.device) -> None:
    values, packed, scale, zero = stored(9, 300, 32, device, form)
    assert packed.shape == (9, packed_width(300) if form.bits == 4 else 300)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    wanted = (form.to_float(values).to(exact) * spread(scale, 32, 300)).to(dtype)
    assert torch.equal(dequantize(packed, scale, None, None, form, 32, 300, dtype), wanted)
    wanted = ((form.to_float(values).to(exact) - spread(zero, 32, 300)) * spread(-scale, 32, 300)).to(dtype)
    assert torch.equal(dequantize(packed, -scale, zero, None, form, 32, 300, dtype), wanted)
    added = zero.float() / 7
    wanted = (form.to_float(values).to(exact) * spread(scale, 32, 300) + spread(added, 32, 300)).to(dtype)
    assert torch.equal(dequantize(packed, scale, added, None, form, 32, 300, dtype), wanted)


def test_dequantize_in_pieces(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    _, packed, scale, zero = stored(9, 70, 32, device)
    whole = dequantize(packed, scale, zero, None, INT4, 32, 70, torch.float32)
    monkeypatch.setattr("qgemm.numerics.groups._PIECE", 150)
    assert torch.equal(dequantize(packed, scale, zero, None, INT4, 32, 70, torch.float32), whole)


def test_nothing_to_round() -> None:
    for N, K in ((0, 16), (5, 0)):
        for form in FORMATS.values():
            q, scale, _ = quantize_groups(torch.zeros(N, K), 128, form)
            packed = store_values(q, form)
            assert dequantize(packed, scale, None, None, form, 128, K, torch.float32).shape == (N, K)


def test_scales_in_steps_are_multiples_that_bfloat16_holds(device: torch.device) -> None:
    weight = torch.randn(40, 1024, device=device) * torch.logspace(-30, 30, 40, device=device)[:, None]
    weight[3, :128], weight[4] = 0, 0
    scale = quantize_groups(weight, 128, INT4, "steps")[1]
    assert scale.bfloat16().float().equal(scale)
    step = steps_of(scale)
    assert step is not None
    multiples = scale / step[:, None]
    assert multiples.equal(multiples.round())
    assert 1 <= multiples.min() <= multiples.max() <= 16
    assert steps_of(store_scale(scale, "steps")).equal(step)  # type: ignore[union-attr]


@pytest.mark.parametrize("spread_of_groups", [0.0, 0.3, 1.0])
def test_steps_cost_little(spread_of_groups: float, device: torch.device) -> None:
    weight = torch.randn(64, 32, 128, device=device)
    weight = (weight * (spread_of_groups * torch.randn(64, 32, 1, device=device)).exp()).flatten(1)
    errors = []
    for dtype in ("bfloat16", "steps"):
        q, scale, _ = quantize_groups(weight, 128, INT4, dtype)
        errors.append((q * spread(scale, 128, 4096) - weight).square().mean())
    assert errors[1] <= errors[0] * (1.01 if spread_of_groups < 1 else 1.2)


def test_a_group_of_zeros_does_not_determine_the_step(device: torch.device) -> None:
    weight = torch.randn(2, 256, device=device) / 1000
    weight[0, :128] = 0
    q, scale, _ = quantize_groups(weight, 128, INT4, "steps")
    assert ((q * spread(scale, 128, 256) - weight).abs() <= 0.6 * weight.abs().amax() / INT4.steps).all()


def test_no_other_step_is_nearer(device: torch.device) -> None:
    scale = torch.rand(60, 8, device=device) + torch.linspace(0, 1, 60, device=device)[:, None]
    rounded = round_scale(scale, "steps")
    # All of four significant bits whose 16-fold reaches the largest scale.
    steps = torch.tensor([digits * 2.0**exponent for exponent in range(-9, -2) for digits in range(8, 16)]).to(device)
    multiples = (scale[:, None] / steps[:, None]).round().clamp(1, 16) * steps[:, None]
    errors = (multiples - scale[:, None]).square().sum(2).where(steps * 16 >= scale.amax(1, keepdim=True), torch.inf)
    torch.testing.assert_close((rounded - scale).square().sum(1), errors.amin(1))


@pytest.mark.parametrize("power", [-110, -80, 80, 120])  # squares of such scales are 0 or infinite in float32
def test_steps_don_t_depend_on_the_size_of_scales(power: int, device: torch.device) -> None:
    scale = torch.rand(60, 8, device=device) + torch.linspace(0, 1, 60, device=device)[:, None]
    assert round_scale(scale * 2.0**power, "steps").equal(round_scale(scale, "steps") * 2.0**power)


def test_scales_that_are_no_multiples_of_a_step(device: torch.device) -> None:
    scale = torch.rand(4, 9, device=device).bfloat16()
    assert steps_of(scale) is None
    scale[:] = 1
    assert steps_of(scale).equal(torch.ones(4, device=device))  # type: ignore[union-attr]
    scale[2, 3] = 17
    assert steps_of(scale) is None
    assert steps_of(scale[:, :0]).shape == (4,)  # type: ignore[union-attr]
    scale[2, 3] = torch.nan
    assert steps_of(scale) is None
    scale[2, 3] = -1
    assert steps_of(scale) is None


def test_rows_with_nan_keep_it(device: torch.device) -> None:
    weight = torch.randn(3, 256, device=device)
    weight[1, 5] = torch.nan
    scale = quantize_groups(weight, 128, INT4, "steps")[1]
    assert scale[1, 0].isnan()
    assert scale[[0, 2]].isfinite().all()


def test_groups_are_filled_up_with_zeros() -> None:
    rows = torch.randn(3, 130)
    groups = grouped(rows, 128)
    assert groups.shape == (3, 2, 128)
    assert torch.equal(groups.flatten(1)[:, :130], rows)
    assert not groups[:, 1, 2:].any()
