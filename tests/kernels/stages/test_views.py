"""Views alone: any strides, 64-bit offsets, and not one access outside the matrix.

Matrices stand inside a larger buffer of poison (NaN to read, 77 to overwrite), so an access outside shows.
"""

import pytest
import torch
import triton
import triton.language as tl

from qgemm.kernels.stages import (
    BiasView,
    InputView,
    Tile,
    make_bias_view,
    make_input_view,
    make_output_view,
    make_scale_view,
    make_tensor_view,
)

BM, BN = 16, 32


@triton.jit
def load_kernel(
    src, out, pid_m, pid_n, M, N, stride_m, stride_n,
    BM: tl.constexpr, BN: tl.constexpr, BOUNDARY: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    view = make_input_view(src, M, N, stride_m, stride_n)
    values = view.load(Tile(pid_m, pid_n, BM, BN), BOUNDARY, rows=ROWS, cols=COLS)
    tl.store(out + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :], values)


@triton.jit
def tile_ptrs_kernel(src, out, inside, pid_m, pid_n, M, N, stride_m, stride_n, BM: tl.constexpr, BN: tl.constexpr):
    ptrs, mask = make_tensor_view(src, M, N, stride_m, stride_n).tile_ptrs(Tile(pid_m, pid_n, BM, BN))
    offsets = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(out + offsets, tl.load(ptrs))
    tl.store(inside + offsets, mask.to(tl.int8))


@triton.jit
def copy_kernel(src, dst, M, N, stride_m, stride_n, BM: tl.constexpr, BN: tl.constexpr, LIMIT: tl.constexpr):
    """Copies contiguous ``src [M, N]`` into ``dst``; ``LIMIT``: only columns below it within each tile."""
    tile = Tile(tl.program_id(0), tl.program_id(1), BM, BN)
    values = make_input_view(src, M, N, N, 1).load(tile, True)
    out = make_output_view(dst, M, N, stride_m, stride_n)
    if LIMIT is None:
        out.store(values, tile)
    else:
        mask = (tl.arange(0, BM) < BM)[:, None] & (tl.arange(0, BN) < LIMIT)[None, :]
        out.store(values, tile, mask=mask)


@triton.jit
def double(x):
    return 2.0 * x


@triton.jit
def epilogue_kernel(
    acc, dst, a_scale, b_scale, bias, M, N, length, stride_a, stride_b, stride_bias,
    BM: tl.constexpr, BN: tl.constexpr, AXIS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    tile = Tile(tl.program_id(0), tl.program_id(1), BM, BN)
    values = make_input_view(acc, M, N, N, 1).load(tile, True)
    scale = make_scale_view(a_scale, b_scale, M, N, stride_a, stride_b) if a_scale is not None else None
    bias_view = make_bias_view(bias, length, stride_bias, AXIS) if bias is not None else None
    make_output_view(dst, M, N, N, 1).store(values, tile, scale=scale, bias=bias_view, activation=ACTIVATION)


@triton.jit
def direct_views_kernel(src, bias, dst, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """The views by their own names, with strides that are constants."""
    tile = Tile(0, 0, BM, BN)
    values = InputView(src, M, N, N, 1).load(tile, boundary=True, cache_modifier="")
    make_output_view(dst, M, N, N, 1).store(values, tile, bias=BiasView(bias, N, 1))


def grid(M: int, N: int) -> tuple[int, int]:
    return triton.cdiv(M, BM), triton.cdiv(N, BN)


def in_poison(M: int, N: int, layout: str, poison: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An ``M x N`` view of poison with poison before, after and between its rows; ``._base`` is all of it."""
    if layout == "row":
        return torch.full((M + 40, N + 70), poison, dtype=dtype, device=device)[20 : 20 + M, 35 : 35 + N]
    if layout == "column":
        return torch.full((N + 70, M + 40), poison, dtype=dtype, device=device)[35 : 35 + N, 20 : 20 + M].t()
    # Every second row and every third column of a larger matrix.
    return torch.full((2 * M + 40, 3 * N + 90), poison, dtype=dtype, device=device)[
        20 : 20 + 2 * M : 2, 30 : 30 + 3 * N : 3
    ]


LAYOUTS = ["row", "column", "strided"]
# (M, N, pid_m, pid_n) with 16 x 32 tiles
TILES = [
    (32, 64, 1, 1),  # inside
    (20, 40, 1, 1),  # sticks out both ways
    (20, 64, 1, 0),  # rows only
    (32, 40, 0, 1),  # columns only
    (1, 1, 0, 0),  # a single element
    (5, 3, 0, 0),  # wraps round several times
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("M", "N", "pid_m", "pid_n"), TILES)
def test_load_with_boundary_gives_zero_beyond_the_edges(
    M: int, N: int, pid_m: int, pid_n: int, layout: str, device: torch.device
) -> None:
    src = in_poison(M, N, layout, torch.nan, torch.float32, device)
    src.copy_(torch.rand(M, N, device=device) + 1)
    expected = torch.zeros((pid_m + 1) * BM, (pid_n + 1) * BN, device=device)
    rows, cols = min(M, expected.shape[0]), min(N, expected.shape[1])
    expected[:rows, :cols] = src[:rows, :cols]
    for edge in ("wrap", "inside"):
        out = torch.empty(BM, BN, device=device)
        load_kernel[(1,)](src, out, pid_m, pid_n, M, N, *src.stride(), BM, BN, True, edge, edge)
        assert torch.equal(out, expected[pid_m * BM :, pid_n * BN :])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("M", "N", "pid_m", "pid_n"), TILES)
def test_load_without_boundary_wraps_round(
    M: int, N: int, pid_m: int, pid_n: int, layout: str, device: torch.device
) -> None:
    src = in_poison(M, N, layout, torch.nan, torch.float32, device)
    src.copy_(torch.rand(M, N, device=device))
    rows = torch.arange(pid_m * BM, (pid_m + 1) * BM, device=device)
    cols = torch.arange(pid_n * BN, (pid_n + 1) * BN, device=device)
    expected = src[rows[:, None] % M, cols[None, :] % N]
    out = torch.empty(BM, BN, device=device)
    load_kernel[(1,)](src, out, pid_m, pid_n, M, N, *src.stride(), BM, BN, False, "wrap", "wrap")
    assert torch.equal(out, expected)
    masked_rows = torch.empty(BM, BN, device=device)
    load_kernel[(1,)](src, masked_rows, pid_m, pid_n, M, N, *src.stride(), BM, BN, False, "mask", "wrap")
    assert torch.equal(masked_rows, torch.where((rows < M)[:, None], expected, 0.0))
    out = torch.empty(BM, BN, device=device)
    inside = torch.empty(BM, BN, dtype=torch.int8, device=device)
    tile_ptrs_kernel[(1,)](src, out, inside, pid_m, pid_n, M, N, *src.stride(), BM, BN)
    assert torch.equal(out, expected)
    assert torch.equal(inside.bool(), (rows < M)[:, None] & (cols < N)[None, :])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_of_a_tile_known_to_lie_inside(layout: str, device: torch.device) -> None:
    src = in_poison(32, 64, layout, torch.nan, torch.float32, device)
    src.copy_(torch.rand(32, 64, device=device))
    out = torch.empty(BM, BN, device=device)
    load_kernel[(1,)](src, out, 1, 1, 32, 64, *src.stride(), BM, BN, False, "inside", "inside")
    assert torch.equal(out, src[16:, 32:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("M", "N"), [(32, 64), (20, 40), (1, 1), (17, 33)])
@pytest.mark.parametrize("limit", [None, 7])
def test_store_writes_the_matrix_and_nothing_else(
    M: int, N: int, limit: int | None, layout: str, device: torch.device
) -> None:
    src = torch.randint(-50, 50, (M, N), dtype=torch.int32, device=device)
    dst = in_poison(M, N, layout, 77, torch.int32, device)
    expected_buffer = dst._base.clone()
    expected = expected_buffer.as_strided(dst.size(), dst.stride(), dst.storage_offset())
    written = torch.arange(N, device=device) % BN < (BN if limit is None else limit)
    expected[:, written] = src[:, written]
    copy_kernel[grid(M, N)](src, dst, M, N, *dst.stride(), BM, BN, limit)
    assert torch.equal(dst._base, expected_buffer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32])
def test_store_casts_to_the_matrix(dtype: torch.dtype, device: torch.device) -> None:
    # float16 and bfloat16 must round the larger ones, to nearest even.
    limit = 128 if dtype == torch.int8 else 30_000
    src = torch.randint(-limit, limit, (20, 40), dtype=torch.int32, device=device)
    dst = torch.empty(20, 40, dtype=dtype, device=device)
    copy_kernel[grid(20, 40)](src, dst, 20, 40, 40, 1, BM, BN, None)
    assert torch.equal(dst, src.to(dtype))


@pytest.mark.parametrize("stride_of", ["rows", "columns"])
@pytest.mark.parametrize("step", [2**30, 2**31 + 16])  # offsets beyond 2^31 by a product; a stride beyond it by itself
def test_offsets_are_64_bit(step: int, stride_of: str, device: torch.device) -> None:
    count = 3 if step == 2**30 else 2  # the last row starts at 2^31 or later
    # Offsets that wrap round to negative ones lie in it, too. Only a few pages are touched.
    storage = torch.empty(2**31 + (count - 1) * step + 64, dtype=torch.int8, device=device)
    shape, strides = ((count, 8), (step, 1)) if stride_of == "rows" else ((8, count), (1, step))
    far = storage.as_strided(shape, strides, 2**31)
    far.zero_()
    values = torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
    copy_kernel[(1, 1)](values, far, *shape, *strides, BM, BN, None)
    assert torch.equal(far, values)

    out = torch.empty(BM, BN, dtype=torch.int8, device=device)
    load_kernel[(1,)](far, out, 0, 0, *shape, *strides, BM, BN, True, "wrap", "wrap")
    assert torch.equal(out[: shape[0], : shape[1]], values)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("length", ["M", "N"])  # whichever is passed, the output bounds the reads
@pytest.mark.parametrize(("M", "N"), [(20, 70), (70, 20), (32, 32)])
@pytest.mark.parametrize("stride", [1, 2])
def test_bias_view(M: int, N: int, length: str, axis: int, stride: int, device: torch.device) -> None:
    acc = torch.randint(-1000, 1000, (M, N), dtype=torch.int32, device=device)
    count = N if axis == 1 else M
    buffer = torch.full((stride * 128,), torch.nan, device=device)
    bias = buffer[: count * stride : stride]
    bias.copy_(torch.rand(count, device=device))
    out = torch.empty(M, N, device=device)
    epilogue_kernel[grid(M, N)](
        acc, out, None, None, bias, M, N, M if length == "M" else N, 0, 0, stride, BM, BN, axis, None
    )
    assert torch.equal(out, acc.float() + (bias if axis == 1 else bias[:, None]))


@pytest.mark.parametrize(("stride_a", "stride_b"), [(1, 1), (0, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_epilogue_is_scale_then_bias_then_activation_then_cast(
    stride_a: int, stride_b: int, out_dtype: torch.dtype, device: torch.device
) -> None:
    M, N = 20, 40
    acc = torch.randint(-(2**20), 2**20, (M, N), dtype=torch.int32, device=device)
    # Powers of 2, so that the scaled sums are exact and the order of steps is all that is compared.
    a_scale = torch.exp2(torch.randint(-9, 0, (M if stride_a else 1,), device=device).float())
    b_scale = torch.exp2(torch.randint(-9, 0, (N if stride_b else 1,), device=device).float())
    bias = torch.randint(-9, 9, (N,), device=device).float()
    out = torch.empty(M, N, dtype=out_dtype, device=device)
    epilogue_kernel[grid(M, N)](acc, out, a_scale, b_scale, bias, M, N, N, stride_a, stride_b, 1, BM, BN, 1, double)
    expected = 2 * (acc.double() * a_scale.double()[:, None] * b_scale.double() + bias.double())
    assert torch.equal(out, expected.float().to(out_dtype))


def test_store_of_infinities_and_nan(device: torch.device) -> None:
    values = torch.tensor([[torch.inf, -torch.inf, torch.nan, -0.0, 3.4e38]], device=device)
    bias = torch.zeros(5, device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.empty(1, 5, dtype=dtype, device=device)
        direct_views_kernel[(1,)](values, bias, out, 1, 5, BM, BN)
        assert torch.equal(out.nan_to_num(nan=7.0), values.to(dtype).nan_to_num(nan=7.0))


def test_views_by_their_own_names(device: torch.device) -> None:
    src, bias = torch.rand(9, 30, device=device), torch.rand(30, device=device)
    out = torch.empty(9, 30, device=device)
    direct_views_kernel[(1,)](src, bias, out, 9, 30, BM, BN)
    assert torch.equal(out, src + bias)
