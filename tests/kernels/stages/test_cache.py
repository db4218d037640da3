"""Int8 keys and values, block by block, by kernels of a few lines."""

import torch
import triton
import triton.language as tl

from qgemm.kernels.stages.cache import Int8Values, Rows, int8_keys

ROWS, L, D = 16, 64, 32


@triton.jit
def products_kernel(q, k, scale, out, last, ROWS: tl.constexpr, L: tl.constexpr, D: tl.constexpr):
    rows, n = tl.arange(0, ROWS), tl.arange(0, L)
    keys = int8_keys(tl.load(q + rows[:, None] * D + tl.arange(0, D)[None, :]), Rows(k, D), Rows(scale, 1), D)
    start = tl.zeros((), tl.int32)
    tl.store(out + rows[:, None] * L + n[None, :], keys.products(start, n, last))


@triton.jit
def sum_kernel(weights, v, scale, out, last, ROWS: tl.constexpr, L: tl.constexpr, D: tl.constexpr):
    rows, n, d = tl.arange(0, ROWS), tl.arange(0, L), tl.arange(0, D)
    values = Int8Values(Rows(v, D), Rows(scale, 1), D, D)
    given = tl.load(weights + rows[:, None] * L + n[None, :])
    start = tl.zeros((), tl.int32)
    sums = values.add(values.zeros(ROWS), tl.zeros((ROWS,), tl.float32), given, start, n, last)
    tl.store(out + rows[:, None] * D + d[None, :], values.whole(sums))


def test_queries_are_rounded_to_16_bits(device: torch.device) -> None:
    q = torch.randn(ROWS, D, device=device)
    q[0], q[1, 3], q[2, 4] = 0.0, torch.nan, -torch.inf
    q[3] *= 1e-6
    k = torch.randint(-127, 128, (L, D), dtype=torch.int8, device=device)
    scale, out = torch.rand(L, device=device), torch.empty(ROWS, L, device=device)
    products_kernel[(1,)](q, k, scale, out, L - 1, ROWS, L, D)
    exact = q.double() @ k.double().T * scale
    allowed = q.abs().amax(dim=1, keepdim=True) * 2.0**-16 * k.double().abs().sum(dim=1) * scale
    assert ((out - exact).abs() <= allowed)[:, :-1][[0, *range(3, ROWS)]].all()
    assert not out[0].any()
    assert out[1:3, :-1].isnan().all()
    assert not out[3:, -1].any()


def test_every_value_is_exact(device: torch.device) -> None:
    v = torch.randint(-128, 128, (L, D), dtype=torch.int8, device=device)
    v.view(-1)[:256] = torch.arange(-128, 128, device=device)
    weights = torch.zeros(ROWS, L, device=device)
    out, scale = torch.empty(ROWS, D, device=device), torch.full((L,), 0.5, device=device)
    for first in range(0, L, ROWS):  # a value a row
        weights.zero_()[:, first : first + ROWS].fill_diagonal_(2.0)
        sum_kernel[(1,)](weights, v, scale, out, L - 1, ROWS, L, D)
        wanted = v[first : first + ROWS].float()
        assert torch.equal(out, wanted if first + ROWS < L else torch.cat([wanted[:-1], wanted.new_zeros(1, D)]))
