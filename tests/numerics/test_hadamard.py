"""``hadamard``: the rotation itself, against a matrix built from Sylvester's definition."""

import math

import pytest
import torch
from torch import Tensor

from qgemm.numerics.hadamard import MAX_PRODUCT_COLUMNS, block_size, hadamard

# Even and odd powers of two, on both sides of MAX_PRODUCT_COLUMNS; whole and odd numbers of blocks; no block at all.
WIDTHS = [0, 1, 2, 3, 4, 6, 8, 12, 24, 96, 128, 256, 384, 512, 1024, 1536, 2048, 4096 + 2048, 8192]


def definition(K: int) -> Tensor:
    """``H [K, K]``: entry (i, j) of a block is -1 to the number of bits that i and j share, over the root of n."""
    n = block_size(K)
    indices = torch.arange(n)
    shared = indices[:, None] & indices
    parity = torch.zeros_like(shared)
    while shared.any():
        parity ^= shared & 1
        shared >>= 1
    return torch.block_diag(*[(1.0 - 2.0 * parity).double() / math.sqrt(n)] * (K // n))


def test_block_size() -> None:
    assert [block_size(K) for K in (0, 1, 2, 3, 12, 384, 4096, 14336)] == [1, 1, 2, 1, 4, 128, 4096, 2048]


def test_the_definition_is_sylvester_s() -> None:
    H = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(5):
        H = torch.cat((torch.cat((H, H), 1), torch.cat((H, -H), 1)))
    assert torch.allclose(definition(32), H / math.sqrt(32), rtol=0, atol=1e-15)


@pytest.mark.parametrize("K", [K for K in WIDTHS if K <= 2048])
def test_a_product_with_the_matrix(K: int, device: torch.device) -> None:
    x = torch.randn(5, K, device=device, dtype=torch.float64)
    wanted = x if block_size(K) == 1 else x @ definition(K).to(device)
    torch.testing.assert_close(hadamard(x), wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("K", WIDTHS)
def test_it_is_its_own_inverse_and_keeps_the_norm(K: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(3, K, device=device).to(dtype)
    out = hadamard(x)
    assert out.dtype == dtype
    assert out.is_contiguous()
    # Up to three roundings each way; TF32 rounds to 10 bits of significand.
    eps = torch.finfo(dtype).eps if dtype != torch.float32 or not x.is_cuda else 2.0**-10
    size = x.float().norm(dim=-1, keepdim=True)
    assert ((hadamard(out).float() - x.float()).norm(dim=-1, keepdim=True) <= 4 * eps * size).all()
    assert ((out.float().norm(dim=-1, keepdim=True) - size).abs() <= 4 * eps * size).all()


@pytest.mark.parametrize("K", [256, 1024, 4096])
def test_whole_numbers_are_exact_where_the_root_is_one(K: int, device: torch.device) -> None:
    x = torch.zeros(2, K, device=device)
    x[0, 3], x[1, ::2] = 1.0, 1.0
    out = hadamard(x)
    assert torch.equal(out[0].abs(), torch.full((K,), K**-0.5, device=device))
    assert torch.equal(out[1].nonzero().flatten().cpu(), torch.tensor([0, 1]))
    assert (out[1, :2] == math.sqrt(K) / 2).all()


def test_the_scale_is_exact_in_16_bits(device: torch.device) -> None:
    # A root of two in the matrix would be rounded there, and every sum would be off alike.
    x = torch.zeros(1, 2048, device=device, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    assert (hadamard(x) == torch.tensor(2048**-0.5, device=device).bfloat16()).all()


def test_sums_of_float16_do_not_overflow_on_the_way(device: torch.device) -> None:
    x = torch.full((1, 4096), 512.0, device=device, dtype=torch.float16)
    out = hadamard(x)
    assert out[0, 0] == 32768
    assert not out[0, 1:].any()


def test_small_values_of_float16_do_not_vanish_on_the_way(device: torch.device) -> None:
    x = torch.randn(1, 4096, device=device).half() * 2**-6
    torch.testing.assert_close(hadamard(x).float(), hadamard(x.float()), rtol=2**-9, atol=2**-15)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("K", [96, 2048])
def test_what_is_not_finite_stays_so(value: float, K: int, device: torch.device) -> None:
    x = torch.randn(3, K, device=device)
    x[1, 5] = value
    out = hadamard(x)
    assert not out[1, : block_size(K)].isfinite().any()
    assert out[::2].isfinite().all()


@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (0, 64), (2, 0, 2048)])
def test_shapes(shape: tuple[int, ...], device: torch.device) -> None:
    x = torch.randn(shape, device=device, dtype=torch.float64)
    out = hadamard(x)
    assert out.shape == shape
    torch.testing.assert_close(out.reshape(-1, shape[-1]), hadamard(x.reshape(-1, shape[-1])))


def test_strides_and_autocast(device: torch.device) -> None:
    x = torch.randn(1024, 6, device=device)
    wanted = hadamard(x.t().contiguous())
    assert torch.equal(hadamard(x.t()), wanted)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(hadamard(x.t()), wanted)


def test_x_is_left_alone(device: torch.device) -> None:
    for K in (7, 32, 2 * MAX_PRODUCT_COLUMNS):
        x = torch.randn(3, K, device=device)
        before = x.clone()
        hadamard(x).zero_()
        assert torch.equal(x, before)
