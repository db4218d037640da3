"""``hadamard``: the kernel against the definition, in float64."""

import pytest
import torch

from qgemm.kernels.hadamard import dispatch, launcher
from qgemm.kernels.launch.device import device_limits
from qgemm.numerics.hadamard import block_size, hadamard

# Each size of a block; 3 rows are fewer blocks than a tile has.
WIDTHS = [16, 3 * 32, 64, 128, 256, 7 * 512, 1024, 2048, 3 * 4096]
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


@DTYPES
@pytest.mark.parametrize("K", WIDTHS)
def test_it_is_rounded_once(K: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(3, K, device=device).to(dtype)
    exact = hadamard(x.double())
    size = exact.square().reshape(3, -1, block_size(K)).mean(-1).sqrt().repeat_interleave(block_size(K), 1)
    out = launcher.hadamard(x)
    assert out.dtype == dtype
    assert ((out.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 2**-20 * size).all()


@DTYPES
def test_many_small_blocks_and_strides(dtype: torch.dtype, device: torch.device) -> None:
    blocks = launcher.FEW_ROWS * device_limits(device).num_sms + 5  # so that a tile has more rows
    x = torch.randn(32, blocks, device=device).to(dtype).t()
    out = launcher.hadamard(x)
    assert out.is_contiguous()
    assert torch.equal(out, launcher.hadamard(x.contiguous()))
    assert torch.equal(launcher.hadamard(torch._neg_view(-x)), out)
    torch.testing.assert_close(out.double(), hadamard(x.double()), rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert launcher.hadamard(x[:0]).shape == (0, 32)


def test_sums_of_float16_do_not_overflow_on_the_way(device: torch.device) -> None:
    x = torch.full((1, 4096), 1000.0, device=device, dtype=torch.float16)
    out = launcher.hadamard(x)
    assert out[0, 0] == 64000
    assert not out[0, 1:].any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("K", [96, 2048])
def test_what_is_not_finite_stays_so(value: float, K: int, device: torch.device) -> None:
    x = torch.randn(3, K, device=device).bfloat16()
    x[1, 5] = value
    out = launcher.hadamard(x)
    assert not out[1, : block_size(K)].isfinite().any()
    assert out[::2].isfinite().all()


def test_what_the_kernel_does_not_take_is_computed_all_the_same(device: torch.device) -> None:
    for shape, dtype in (((3, 24), torch.bfloat16), ((2, 8192), torch.float16), ((3, 64), torch.float32)):
        x = torch.randn(shape, device=device).to(dtype)
        assert not launcher.fits(x)
        assert torch.equal(dispatch.hadamard(x), hadamard(x))
    x = torch.randn(3, 64, device=device).bfloat16()
    assert launcher.fits(x)
    torch.testing.assert_close(dispatch.hadamard(x), hadamard(x))
