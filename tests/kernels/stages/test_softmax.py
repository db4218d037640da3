"""A softmax over blocks, by a kernel of a few lines, against PyTorch's in float64."""

import pytest
import torch
import triton
import triton.language as tl

from qgemm.kernels.stages.softmax import add_scores, normalize

ROWS, N, BLOCK = 4, 100, 16


@triton.jit
def mean_kernel(
    scores, values, factors, lse, out, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, FACTORS: tl.constexpr
):  # fmt: skip
    """``lse`` of ``scores [ROWS, N]``, and ``out [ROWS]``: the values, times their factors, weighted."""
    rows, offsets = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, 1), tl.float32)
    for start in range(0, N, BLOCK):
        n = start + offsets
        block = tl.load(scores + rows[:, None] * N + n[None, :], mask=(n < N)[None, :], other=float("-inf"))
        value = tl.load(values + n, mask=n < N, other=0.0)
        order = None
        if FACTORS:
            factor = tl.load(factors + n, mask=n < N, other=1.0)
            order = tl.floor(tl.log2(factor))
        top, total, decay, weights = add_scores(top, total, block, order)
        if FACTORS:
            weights *= factor[None, :]
        tl.device_assert(tl.max(tl.max(weights, axis=1), axis=0) < 2.0)
        sums = sums * decay[:, None] + tl.sum(weights * value[None, :], axis=1)[:, None]
    found, mean = normalize(top, total, sums)
    tl.store(lse + rows, found)
    tl.store(out + rows[:, None] + tl.arange(0, 1)[None, :], mean)


@pytest.mark.parametrize("factors", [False, True])
def test_blocks_are_one_softmax(factors: bool, device: torch.device) -> None:
    scores = torch.randn(ROWS, N, device=device) * 30
    scores[1, :40] = -torch.inf  # whole blocks
    scores[2] = -torch.inf
    scores[3, 90:] = 500.0  # a new largest one, late
    values = torch.randn(N, device=device)
    # 2^-30 to 2^30, which float16 doesn't have.
    factor = torch.exp2(torch.rand(N, device=device) * 60 - 30) if factors else torch.ones(N, device=device)
    lse, out = torch.empty(ROWS, device=device), torch.empty(ROWS, device=device)
    mean_kernel[(1,)](scores, values, factor, lse, out, N, ROWS, BLOCK, factors)
    exact = scores.double() * torch.log(torch.tensor(2.0, dtype=torch.float64))
    wanted = torch.softmax(exact, dim=1).nan_to_num(0.0) @ (values * factor).double()
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5 * float((values * factor).abs().max()))
    torch.testing.assert_close(lse.double(), torch.logsumexp(exact, dim=1) / exact.new_tensor(2.0).log())


def test_nan_is_not_lost(device: torch.device) -> None:
    scores = torch.zeros(ROWS, N, device=device)
    scores[1, 50] = torch.nan
    values, lse, out = (torch.ones(length, device=device) for length in (N, ROWS, ROWS))
    mean_kernel[(1,)](scores, values, values, lse, out, N, ROWS, BLOCK, False)
    assert out.isnan().tolist() == lse.isnan().tolist() == [False, True, False, False]
