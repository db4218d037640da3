from collections.abc import Callable

import pytest
from torch import Tensor

Check = Callable[[Tensor, Tensor, Tensor], None]


@pytest.fixture(scope="session")
def assert_as_accurate() -> Check:
    """``check(out, reference, exact)``: the error against float64 is at most twice the reference's own."""

    def check(out: Tensor, reference: Tensor, exact: Tensor) -> None:
        assert out.dtype == reference.dtype
        assert out.shape == reference.shape == exact.shape
        if not exact.numel():
            return
        error = (out.double() - exact).abs().max()
        # A reference that happens to be exact still leaves the last bit of float32 arithmetic.
        allowed = 2 * (reference.double() - exact).abs().max() + 2.0**-22 * exact.abs().max()
        assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"

    return check
