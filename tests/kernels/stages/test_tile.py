"""``Tile`` alone: indices, wrapping, masks, and the two epilogue steps it owns."""

import pytest
import torch
import triton
import triton.language as tl

from qgemm.kernels.stages import Tile

BM, BN = 16, 32


@triton.jit
def indices_kernel(rows, cols, pid_m, pid_n, BM: tl.constexpr, BN: tl.constexpr):
    rm, rn = Tile(pid_m, pid_n, BM, BN).indices()
    tl.store(rows + tl.arange(0, BM), rm)
    tl.store(cols + tl.arange(0, BN), rn)


@triton.jit
def layout_kernel(
    rows, cols, masks, pid_m, pid_n, M, N,
    BM: tl.constexpr, BN: tl.constexpr, WRAP_M: tl.constexpr, WRAP_N: tl.constexpr,
):  # fmt: skip
    rm, rn, mask = Tile(pid_m, pid_n, BM, BN).layout(M, N, WRAP_M, WRAP_N)
    tl.store(rows + tl.arange(0, BM), rm)
    tl.store(cols + tl.arange(0, BN), rn)
    tl.store(masks + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :], mask.to(tl.int8))


@triton.jit
def scale_kernel(
    acc, out, a_scale, b_scale, pid_m, pid_n, M, N, stride_a, stride_b, BM: tl.constexpr, BN: tl.constexpr
):
    offsets = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    scaled = Tile(pid_m, pid_n, BM, BN).scale(tl.load(acc + offsets), a_scale, b_scale, M, N, stride_a, stride_b)
    tl.static_assert(scaled.dtype == tl.float32)
    tl.store(out + offsets, scaled)


@triton.jit
def bias_kernel(acc, out, bias, pid_m, pid_n, M, stride, BM: tl.constexpr, BN: tl.constexpr):
    offsets = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(out + offsets, Tile(pid_m, pid_n, BM, BN).bias(tl.load(acc + offsets), bias, M, stride))


@pytest.mark.parametrize(("pid_m", "pid_n"), [(0, 0), (3, 1), (1, 3)])
def test_indices(pid_m: int, pid_n: int, device: torch.device) -> None:
    rows = torch.empty(BM, dtype=torch.int32, device=device)
    cols = torch.empty(BN, dtype=torch.int32, device=device)
    indices_kernel[(1,)](rows, cols, pid_m, pid_n, BM, BN)
    assert rows.tolist() == list(range(pid_m * BM, (pid_m + 1) * BM))
    assert cols.tolist() == list(range(pid_n * BN, (pid_n + 1) * BN))


@pytest.mark.parametrize("wrap_m", [True, False])
@pytest.mark.parametrize("wrap_n", [True, False])
@pytest.mark.parametrize(
    ("M", "N"),
    [
        (64, 128),  # tile (1, 2) lies inside
        (20, 70),  # it sticks out both ways
        (16, 64),  # it lies wholly outside
        (3, 5),  # and wraps round several times
    ],
)
def test_layout_masks_raw_indices_and_then_wraps(
    M: int, N: int, wrap_m: bool, wrap_n: bool, device: torch.device
) -> None:
    rows = torch.empty(BM, dtype=torch.int32, device=device)
    cols = torch.empty(BN, dtype=torch.int32, device=device)
    masks = torch.empty(BM, BN, dtype=torch.int8, device=device)
    layout_kernel[(1,)](rows, cols, masks, 1, 2, M, N, BM, BN, wrap_m, wrap_n)
    raw_rows, raw_cols = torch.arange(BM, 2 * BM), torch.arange(2 * BN, 3 * BN)
    assert torch.equal(rows.cpu(), (raw_rows % M if wrap_m else raw_rows).int())
    assert torch.equal(cols.cpu(), (raw_cols % N if wrap_n else raw_cols).int())
    assert torch.equal(masks.cpu().bool(), (raw_rows < M)[:, None] & (raw_cols < N)[None, :])


@pytest.mark.parametrize(("stride_a", "stride_b"), [(1, 1), (3, 2), (0, 1), (1, 0), (0, 0)])
def test_scale_reads_by_stride_and_never_beyond_the_end(stride_a: int, stride_b: int, device: torch.device) -> None:
    M, N = 20, 40  # tile (1, 1) has 4 rows and 8 columns inside
    a_scale = torch.full((1 + (M + BM) * stride_a,), torch.nan, device=device)
    b_scale = torch.full((1 + (N + BN) * stride_b,), torch.nan, device=device)
    a_index = torch.arange(M, device=device) * stride_a
    b_index = torch.arange(N, device=device) * stride_b
    a_scale[a_index] = torch.rand(M, device=device) if stride_a else 0.3
    b_scale[b_index] = torch.rand(N, device=device) if stride_b else 0.7
    acc = torch.randint(-(2**20), 2**20, (BM, BN), dtype=torch.int32, device=device)
    out = torch.empty(BM, BN, device=device)
    scale_kernel[(1,)](acc, out, a_scale, b_scale, 1, 1, M, N, stride_a, stride_b, BM, BN)
    expected = acc[:4, :8].float() * a_scale[a_index][16:, None] * b_scale[b_index][32:]
    assert torch.equal(out[:4, :8], expected)
    assert not out.isnan().any(), "a scale beyond the end was read"


@pytest.mark.parametrize("stride", [1, 3, 0])
def test_bias_is_per_row(stride: int, device: torch.device) -> None:
    M = 20  # tile row 1 has 4 rows inside
    bias = torch.full((1 + (M + BM) * stride,), torch.nan, device=device)
    index = torch.arange(M, device=device) * stride
    bias[index] = torch.rand(M, device=device) if stride else 0.5
    acc = torch.randint(-(2**20), 2**20, (BM, BN), dtype=torch.int32, device=device)
    out = torch.empty(BM, BN, device=device)
    bias_kernel[(1,)](acc, out, bias, 1, 5, M, stride, BM, BN)
    assert torch.equal(out[:4], acc[:4].float() + bias[index][16:, None])
    assert not out.isnan().any(), "a bias beyond the end was read"
