"""Zero points, and the corrections that take them off."""

import pytest
import torch

from qgemm.numerics.formats import MIN_SCALE
from qgemm.numerics.zero_points import correction, is_zero_point, range_to_scale


@pytest.mark.parametrize(
    ("low", "high"),
    [(-1.0, 1.0), (0.0, 6.0), (-3.5, 0.0), (-0.17, 12.3), (-1e-3, 900.0), (-1e-42, 1e-42), (-3e38, 3e38)],
)
def test_range_to_scale(low: float, high: float) -> None:
    scale, zero_point = range_to_scale(low, high)
    assert scale >= MIN_SCALE
    assert -128 <= zero_point <= 127
    # Both ends are within half a step of what the 256 values reach, and 0 is one of them.
    assert (-128 - zero_point) * scale <= low + 0.5000001 * scale
    assert (127 - zero_point) * scale >= high - 0.5000001 * scale
    assert scale * 255 <= max((high - low) * 1.0000001, 255 * MIN_SCALE)


def test_no_range() -> None:
    assert range_to_scale(0.0, 0.0) == (1.0, 0)


def test_the_correction_in_pieces(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    weight = torch.randint(-127, 128, (40, 70), dtype=torch.int8, device=device)
    arguments = (
        weight, torch.rand(40, device=device), torch.tensor(0.02, device=device), torch.tensor(-30, device=device)
    )  # fmt: skip
    whole = correction(*arguments)
    exact = weight.double().sum(1) * arguments[1].double() * float(arguments[2].double()) * -30
    torch.testing.assert_close(whole, exact, rtol=1e-14, atol=0)
    monkeypatch.setattr("qgemm.numerics.zero_points._PIECE", 200)
    assert torch.equal(correction(*arguments), whole)


@pytest.mark.parametrize(
    ("value", "fits"), [(-128.0, True), (127.0, True), (128.0, False), (0.5, False), (float("nan"), False)]
)
def test_is_zero_point(value: float, fits: bool) -> None:
    assert is_zero_point(value) is fits
