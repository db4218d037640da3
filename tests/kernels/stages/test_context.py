"""``GemmContext`` alone: the accumulator's type, and the loop over K at its edges."""

import pytest
import torch
import triton
import triton.language as tl

from qgemm.kernels.stages import INTERPRETING, GemmContext, Tile, make_output_view, make_tensor_view

BM, BN, BK = 16, 32, 32


@triton.jit
def accumulator_kernel(out, QUANTIZED: tl.constexpr, ACC_DTYPE: tl.constexpr, WANTED: tl.constexpr):
    ctx = GemmContext(16, 32, 32, 1, acc_dtype=ACC_DTYPE, quantized=QUANTIZED)
    acc = ctx.init_accumulator()
    tl.static_assert(acc.dtype == WANTED)
    tl.store(out + tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :], acc)


@triton.jit
def defaults_kernel(out):
    ctx = GemmContext(16, 32, 64, 5)
    tl.static_assert(ctx.num_xcds == 1)
    tl.static_assert(ctx.group_size_m == 8)
    tl.static_assert(ctx.chunk_size == 1)
    tl.static_assert(ctx.cache_modifier_a == ".cg")
    tl.static_assert(ctx.cache_modifier_b == ".cg")
    tl.static_assert(ctx.acc_dtype == tl.float32)
    tl.static_assert(ctx.allow_tf32)
    tl.static_assert(ctx.even_k)
    tl.static_assert(not ctx.quantized)
    tl.static_assert(ctx.group_size_n == 1)
    tl.store(out, ctx.block_m + ctx.block_n + ctx.block_k + ctx.num_sms)


@triton.jit
def reduce_axis_kernel(
    A, B, C, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, QUANTIZED: tl.constexpr,
    ACC_DTYPE: tl.constexpr, ALLOW_TF32: tl.constexpr,
):  # fmt: skip
    ctx = GemmContext(
        BM, BN, BK, 1, even_k=EVEN_K, quantized=QUANTIZED, acc_dtype=ACC_DTYPE, allow_tf32=ALLOW_TF32,
        cache_modifier_a="", cache_modifier_b=".cg",
    )  # fmt: skip
    out_tile = Tile(tl.program_id(0), tl.program_id(1), BM, BN)
    a = make_tensor_view(A, M, K, stride_am, stride_ak)
    b = make_tensor_view(B, K, N, stride_bk, stride_bn)
    acc = ctx.reduce_axis(a, b, out_tile)
    make_output_view(C, M, N, stride_cm, stride_cn).store(acc, out_tile)


@triton.jit
def reduce_tile_kernel(
    A, B, C, M, N, K, k_idx, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BOUNDARY: tl.constexpr
):
    """The product of one K block, added to what C holds."""
    ctx = GemmContext(BM, BN, BK, 1, quantized=True)
    tile = Tile(tl.program_id(0), tl.program_id(1), BM, BN)
    c = make_output_view(C, M, N, N, 1)
    acc = c.load(tile, boundary=True)
    acc = ctx.reduce_tile(make_tensor_view(A, M, K, K, 1), make_tensor_view(B, K, N, N, 1), tile, k_idx, acc, BOUNDARY)
    c.store(acc, tile)


def run_reduce_axis(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    quantized: bool = False,
    acc_dtype: tl.dtype = tl.float32,
    allow_tf32: bool = False,
    even_k: bool | None = None,
) -> torch.Tensor:
    (M, K), N = a.shape, b.shape[1]
    grid = (triton.cdiv(M, BM), triton.cdiv(N, BN))
    even_k = K % BK == 0 if even_k is None else even_k
    reduce_axis_kernel[grid](
        a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(),
        BM, BN, BK, even_k, quantized, acc_dtype, allow_tf32,
    )  # fmt: skip
    return c


def in_poison(values: torch.Tensor, poison: float) -> torch.Tensor:
    """The same values inside a larger buffer of poison."""
    rows, cols = values.shape
    buffer = torch.full((rows + 2 * BK, cols + 2 * BK), poison, device=values.device).to(values.dtype)
    buffer[BK : BK + rows, BK : BK + cols] = values
    return buffer[BK : BK + rows, BK : BK + cols]


@pytest.mark.parametrize(
    ("quantized", "acc_dtype", "wanted", "dtype"),
    [
        (True, tl.float32, tl.int32, torch.int32),
        (True, tl.float16, tl.int32, torch.int32),  # whatever acc_dtype says
        (False, tl.float32, tl.float32, torch.float32),
        (False, tl.float16, tl.float16, torch.float16),
    ],
)
def test_accumulator(
    quantized: bool, acc_dtype: tl.dtype, wanted: tl.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    out = torch.full((16, 32), 7, dtype=dtype, device=device)
    accumulator_kernel[(1,)](out, quantized, acc_dtype, wanted)
    assert not out.any()


def test_parameters_and_defaults(device: torch.device) -> None:
    out = torch.zeros(1, dtype=torch.int32, device=device)
    defaults_kernel[(1,)](out)
    assert out.item() == 16 + 32 + 64 + 5


@pytest.mark.slow(quick=["out_dtype0"])
@pytest.mark.parametrize("out_dtype", [torch.int32, torch.float32, torch.bfloat16])
def test_int8_sums_are_exact_whatever_the_output_is(out_dtype: torch.dtype, device: torch.device) -> None:
    # -128 * -128 * 2080 needs 26 bits: a float32 accumulator would lose the odd ones.
    M, N, K = 17, 33, 2080
    a = torch.full((M, K), -128, dtype=torch.int8, device=device)
    b = torch.full((K, N), -128, dtype=torch.int8, device=device)
    a[:, 0], b[0] = 127, 1
    c = run_reduce_axis(a, b, torch.empty(M, N, dtype=out_dtype, device=device), quantized=True, acc_dtype=tl.float32)
    exact = 127 + 128 * 128 * 2079
    assert torch.equal(c, torch.full_like(c, exact))
    if out_dtype == torch.int32:
        assert c[0, 0].item() == exact


@pytest.mark.parametrize(
    "K",
    [
        0,  # an empty sum
        1,
        BK - 1,  # less than one block
        BK,
        BK + 1,
        3 * BK - 5,
    ],
)
@pytest.mark.parametrize("even_k", [None, False])  # False must also be right where the block divides K
@pytest.mark.parametrize("layouts", ["row row", "row column", "column row", "column column"])
def test_reduce_axis_at_the_edges_of_k(K: int, even_k: bool | None, layouts: str, device: torch.device) -> None:
    M, N = 18, 40
    a = torch.randint(-128, 128, (M, K), dtype=torch.int8, device=device)
    b = torch.randint(-128, 128, (K, N), dtype=torch.int8, device=device)
    # The buffers' other elements must never be summed.
    a_view, b_view = in_poison(a, 111), in_poison(b, 101)
    if layouts.startswith("column"):
        a_view = in_poison(a.t(), 111).t()
    if layouts.endswith("column"):
        b_view = in_poison(b.t(), 101).t()
    c = torch.full((M, N), 7, dtype=torch.int32, device=device)
    run_reduce_axis(a_view, b_view, c, quantized=True, even_k=even_k)
    assert torch.equal(c.double(), a.double() @ b.double())


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("K", [64, 70, 5])
def test_float_operands(dtype: torch.dtype, K: int, device: torch.device) -> None:
    if dtype.itemsize == 1 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("no fp8 before sm_89")
    M, N = 33, 50
    a = torch.randn(M, K, device=device).to(dtype)
    b = torch.randn(K, N, device=device).to(dtype)
    c = run_reduce_axis(in_poison(a, torch.nan), in_poison(b, torch.nan), torch.empty(M, N, device=device))
    exact = a.double() @ b.double()
    reference_error = (a.float() @ b.float() - exact).abs().max()
    # Tensor cores align the products of one instruction before they add: fp8 keeps about 14 bits there.
    aligned = (a.double().abs() @ b.double().abs()).max() * 2.0 ** (-12 if dtype.itemsize == 1 else -20)
    assert (c - exact).abs().max() <= 2 * reference_error + aligned


def test_tf32_is_a_choice(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the interpreter computes float32 either way")
    a, b = torch.randn(32, 256, device=device), torch.randn(256, 32, device=device)
    exact = a.double() @ b.double()
    errors = [
        (run_reduce_axis(a, b, torch.empty(32, 32, device=device), allow_tf32=tf32) - exact).abs().max().item()
        for tf32 in (False, True)
    ]
    assert errors[0] < 1e-4 < errors[1] < 1e-1


def test_float16_accumulator(device: torch.device) -> None:
    a = torch.randint(-2, 3, (16, 64), device=device).half()
    b = torch.randint(-2, 3, (64, 32), device=device).half()
    c = run_reduce_axis(a, b, torch.empty(16, 32, device=device), acc_dtype=tl.float16)
    assert torch.equal(c.double(), a.double() @ b.double())


@pytest.mark.parametrize("k_idx", [0, 1, 2])
def test_reduce_tile_adds_one_block(k_idx: int, device: torch.device) -> None:
    M, N, K = 17, 33, 2 * BK + 7
    a = torch.randint(-128, 128, (M, K), dtype=torch.int8, device=device)
    b = torch.randint(-128, 128, (K, N), dtype=torch.int8, device=device)
    before = torch.randint(-1000, 1000, (M, N), dtype=torch.int32, device=device)
    c = before.clone()
    reduce_tile_kernel[(2, 2)](a, b, c, M, N, K, k_idx, BM, BN, BK, (k_idx + 1) * BK > K)
    block = slice(k_idx * BK, (k_idx + 1) * BK)
    assert torch.equal(c.double(), before.double() + a[:, block].double() @ b[block].double())


@pytest.mark.parametrize("quantized", [True, False])
def test_operands_that_contradict_quantized_are_refused(quantized: bool, device: torch.device) -> None:
    operands = torch.ones(32, 32, device=device).to(torch.float16 if quantized else torch.int8)
    with pytest.raises(Exception) as error:  # noqa: PT011  (the compiler's own error; the message is what counts)
        run_reduce_axis(operands, operands, torch.empty(32, 32, device=device), quantized=quantized)
    # The compiler reports each call on the way down as the cause of the one above.
    causes: list[BaseException | None] = [error.value]
    while causes[-1] is not None:
        causes.append(causes[-1].__cause__ or causes[-1].__context__)
    assert any("GemmContext(quantized=True)" in str(cause) for cause in causes)


def test_interpreting_says_where_kernels_run(device: torch.device) -> None:
    assert bool(INTERPRETING) is (device.type == "cpu")
