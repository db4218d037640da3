"""The kernels that the stages API was specified by, as printed there, on operands whose results are exact.

Only the import line differs, and what the originals left out (``...``) is filled in. Values are small integers and
scales are powers of 2, so float32 holds every step exactly and results are compared with ``torch.equal``.
"""

import pytest
import torch
import triton
import triton.language as tl

from qgemm.kernels.stages import (
    GemmContext,
    ScheduleContext,
    make_bias_view,
    make_output_view,
    make_scale_view,
    make_tensor_view,
)

# (M, N): blocks are 16 x 32.
EVEN_SHAPES = [(32, 64), (64, 32)]
RAGGED_SHAPES = [
    (33, 50),  # one row and a part of a tile beyond the blocks, M < N
    (50, 33),  # M > N: a bias bounded by M would read beyond its end
    (7, 90),  # less than one block of rows
    (90, 7),  # less than one block of columns
    (1, 1),
]
LAYOUTS = ["row", "column"]


@triton.jit
def quantized_gemm(
    A, B, C, A_scale, B_scale, bias,
    M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_SMS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    # Matrix views
    tensorA = make_tensor_view(A, M, K, stride_am, stride_ak)
    tensorB = make_tensor_view(B, K, N, stride_bk, stride_bn)
    tensorC = make_output_view(C, M, N, stride_cm, stride_cn)

    # Epilogue views
    scale_view = make_scale_view(A_scale, B_scale, M, N)
    bias_view = make_bias_view(bias, M) if HAS_BIAS else None

    # Context and scheduler
    ctx = GemmContext(
        block_m=BLOCK_M, block_n=BLOCK_N, block_k=BLOCK_K,
        num_sms=NUM_SMS, quantized=True,
    )  # fmt: skip
    sched = ScheduleContext(M, N, K, ctx)

    # Persistent loop
    start, total, stride = sched.persistent_tile_range()
    for tile_id in range(start, total, stride):
        out_tile = sched.get_tile_from_idx(tile_id)
        acc = ctx.reduce_axis(tensorA, tensorB, out_tile)
        tensorC.store(acc, out_tile, scale=scale_view, bias=bias_view)


@triton.jit
def gemm_kernel(
    A, B, C, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SMS: tl.constexpr,
):  # fmt: skip
    # 1. Create matrix views - describe your data layout
    tensorA = make_tensor_view(A, M, K, stride_am, stride_ak)
    tensorB = make_tensor_view(B, K, N, stride_bk, stride_bn)
    tensorC = make_output_view(C, M, N, stride_cm, stride_cn)

    # 2. Create context - configure the GEMM
    ctx = GemmContext(
        block_m=BLOCK_M, block_n=BLOCK_N, block_k=BLOCK_K,
        num_sms=NUM_SMS,
    )  # fmt: skip

    # 3. Create scheduler - handle work distribution
    sched = ScheduleContext(M, N, K, ctx)

    # 4. Persistent tile loop
    start, total, stride = sched.persistent_tile_range()
    for tile_id in range(start, total, stride):
        out_tile = sched.get_tile_from_idx(tile_id)

        # 5. Compute and store
        acc = ctx.reduce_axis(tensorA, tensorB, out_tile)
        tensorC.store(acc, out_tile)


@triton.jit
def reduce_tile_kernel(
    A, B, C, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SMS: tl.constexpr,
):  # fmt: skip
    tensorA = make_tensor_view(A, M, K, stride_am, stride_ak)
    tensorB = make_tensor_view(B, K, N, stride_bk, stride_bn)
    tensorC = make_output_view(C, M, N, stride_cm, stride_cn)
    ctx = GemmContext(block_m=BLOCK_M, block_n=BLOCK_N, block_k=BLOCK_K, num_sms=NUM_SMS)
    sched = ScheduleContext(M, N, K, ctx)
    num_k_tiles = K // BLOCK_K
    start, total, stride = sched.persistent_tile_range()
    for tile_id in range(start, total, stride):
        out_tile = sched.get_tile_from_idx(tile_id)
        acc = ctx.init_accumulator()
        for k_idx in range(num_k_tiles):
            acc = ctx.reduce_tile(tensorA, tensorB, out_tile, k_idx, acc)
        tensorC.store(acc, out_tile)


@triton.jit
def streamk_kernel(
    A, B, C, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_SMS: tl.constexpr, STREAMK_TILES: tl.constexpr,
):  # fmt: skip
    tensorA = make_tensor_view(A, M, K, stride_am, stride_ak)
    tensorB = make_tensor_view(B, K, N, stride_bk, stride_bn)
    tensorC = make_output_view(C, M, N, stride_cm, stride_cn)
    ctx = GemmContext(block_m=BLOCK_M, block_n=BLOCK_N, block_k=BLOCK_K, num_sms=NUM_SMS, quantized=True)

    sched = ScheduleContext(M, N, K, ctx, streamk_tiles=STREAMK_TILES)

    # The tiles not left to Stream-K.
    start, total, stride = sched.persistent_tile_range()
    for tile_id in range(start, total, stride):
        out_tile = sched.get_tile_from_idx(tile_id)
        acc = ctx.init_accumulator()
        for k_idx in range(tl.cdiv(K, BLOCK_K)):
            acc = ctx.reduce_tile(tensorA, tensorB, out_tile, k_idx, acc, boundary=True)
        tensorC.store(acc, out_tile)

    start, end = sched.iter_range()
    for iter_id in range(start, end):
        pid_m, pid_n, k_iter = sched.get_iter(iter_id)
        # Process single K iteration...
        out_tile = sched.get_tile_from_coord(pid_m, pid_n)
        acc = ctx.reduce_tile(tensorA, tensorB, out_tile, k_iter, ctx.init_accumulator(), boundary=True)
        ptrs, mask = tensorC.tile_ptrs(out_tile)
        tl.atomic_add(ptrs, acc, mask=mask)


@triton.jit
def kernel(A, B, C, A_scale_ptr, B_scale_ptr, bias_ptr, M, N, K,
           stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
           stride_bias, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
           BLOCK_K: tl.constexpr, GROUP_SIZE_M: tl.constexpr,
           NUM_SMS: tl.constexpr, NUM_XCDS: tl.constexpr,
           EVEN_K: tl.constexpr, BIAS: tl.constexpr, ):  # fmt: skip
    # Create matrix views - just describe your matrices
    tensorA = make_tensor_view(A, M, K, stride_am, stride_ak)
    tensorB = make_tensor_view(B, K, N, stride_bk, stride_bn)
    tensorC = make_output_view(C, M, N, stride_cm, stride_cn)

    # Create epilogue views (optional scale and bias)
    scale_view = make_scale_view(A_scale_ptr, B_scale_ptr, M, N) if A_scale_ptr is not None else None
    bias_view = make_bias_view(bias_ptr, M, stride_bias) if BIAS else None

    # Construct GemmContext on device with ALL parameters
    ctx = GemmContext(
        BLOCK_M, BLOCK_N, BLOCK_K, NUM_SMS, NUM_XCDS, GROUP_SIZE_M,
        even_k=EVEN_K,
    )  # fmt: skip

    # Create schedule from GemmContext
    sched = ScheduleContext(M, N, K, ctx)

    # Persistent loop
    start, total, stride = sched.persistent_tile_range()
    for tile_id in range(start, total, stride):
        out_tile = sched.get_tile_from_idx(tile_id)

        # Compute GEMM
        acc = ctx.reduce_axis(tensorA, tensorB, out_tile)

        # Store with epilogue: scale -> bias -> convert -> store
        tensorC.store(acc, out_tile, scale=scale_view, bias=bias_view)


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    return values if layout == "row" else values.t().contiguous().t()


def small_integers(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randint(-8, 9, shape, device=device)


def powers_of_two(length: int, device: torch.device) -> torch.Tensor:
    return torch.exp2(torch.randint(-6, 3, (length,), device=device).float())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("M", "N"), EVEN_SHAPES + RAGGED_SHAPES)
def test_quantized_gemm(M: int, N: int, has_bias: bool, device: torch.device) -> None:
    K = 96
    a = torch.randint(-128, 128, (M, K), dtype=torch.int8, device=device)
    b = torch.randint(-128, 128, (N, K), dtype=torch.int8, device=device).t()
    a_scale, b_scale = powers_of_two(M, device), powers_of_two(N, device)
    # NaN beyond the bias's end: a read bounded by M instead of N would show.
    bias = torch.full((M + N + 64,), torch.nan, device=device)
    bias[:N] = small_integers(N, device=device)
    c = torch.empty(M, N, device=device)
    quantized_gemm[(3,)](
        a, b, c, a_scale, b_scale, bias, M, N, K, *a.stride(), *b.stride(), *c.stride(), 16, 32, 32, 3, has_bias
    )
    expected = (a.double() @ b.double()) * a_scale.double()[:, None] * b_scale.double()
    if has_bias:
        expected += bias[:N].double()
    assert torch.equal(c.double(), expected)


@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("b_layout", LAYOUTS)
@pytest.mark.parametrize("c_layout", LAYOUTS)
def test_any_mix_of_layouts(a_layout: str, b_layout: str, c_layout: str, device: torch.device) -> None:
    M, N, K = 33, 50, 64
    a = laid_out(torch.randint(-128, 128, (M, K), dtype=torch.int8, device=device), a_layout)
    b = laid_out(torch.randint(-128, 128, (K, N), dtype=torch.int8, device=device), b_layout)
    a_scale, b_scale = powers_of_two(M, device), powers_of_two(N, device)
    c = laid_out(torch.empty(M, N, device=device), c_layout)
    quantized_gemm[(3,)](
        a, b, c, a_scale, b_scale, None, M, N, K, *a.stride(), *b.stride(), *c.stride(), 16, 32, 32, 3, False
    )
    assert torch.equal(c.double(), (a.double() @ b.double()) * a_scale.double()[:, None] * b_scale.double())


@pytest.mark.parametrize("pattern", [gemm_kernel, reduce_tile_kernel])
@pytest.mark.parametrize(("M", "N"), EVEN_SHAPES + RAGGED_SHAPES)
def test_basic_pattern(pattern: triton.JITFunction, M: int, N: int, device: torch.device) -> None:
    K = 64
    a = small_integers(M, K, device=device).half()
    b = small_integers(K, N, device=device).half()
    c = torch.empty(M, N, device=device)
    pattern[(3,)](a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), 16, 32, 32, 3)
    assert torch.equal(c.double(), a.double() @ b.double())


@pytest.mark.parametrize("streamk_tiles", [0, 1, 5, 100])  # none, some, all and more than there are
@pytest.mark.parametrize("K", [31, 32, 100])  # less than a block, one block, a ragged last block
def test_streamk_loop(streamk_tiles: int, K: int, device: torch.device) -> None:
    M, N = 33, 50
    a = torch.randint(-128, 128, (M, K), dtype=torch.int8, device=device)
    b = torch.randint(-128, 128, (K, N), dtype=torch.int8, device=device)
    c = torch.zeros(M, N, dtype=torch.int32, device=device)
    streamk_kernel[(4,)](a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), 16, 32, 32, 4, streamk_tiles)
    assert torch.equal(c.double(), a.double() @ b.double())


@pytest.mark.slow(quick=["70-50-33"])
@pytest.mark.parametrize("epilogue", ["none", "bias", "scale", "scale and bias"])
@pytest.mark.parametrize(("M", "N"), EVEN_SHAPES + RAGGED_SHAPES)
@pytest.mark.parametrize("K", [64, 70, 5])  # whole blocks; a ragged last block; less than one block
def test_module_example(M: int, N: int, K: int, epilogue: str, device: torch.device) -> None:
    a = small_integers(M, K, device=device).half()
    b = small_integers(N, K, device=device).half().t()
    a_scale = powers_of_two(M, device) if "scale" in epilogue else None
    b_scale = powers_of_two(N, device) if "scale" in epilogue else None
    # Every second element, so that stride_bias matters; NaN between them and beyond.
    bias = torch.full((2 * (M + N) + 64,), torch.nan, device=device)
    bias[: 2 * N : 2] = small_integers(N, device=device)
    c = torch.empty(M, N, device=device)
    kernel[(4,)](
        a, b, c, a_scale, b_scale, bias, M, N, K, *a.stride(), *b.stride(), *c.stride(),
        2, 16, 32, 32, 2, 4, 2, K % 32 == 0, "bias" in epilogue,
    )  # fmt: skip
    expected = a.double() @ b.double()
    if a_scale is not None and b_scale is not None:
        expected = expected * a_scale.double()[:, None] * b_scale.double()
    if "bias" in epilogue:
        expected = expected + bias[: 2 * N : 2].double()
    assert torch.equal(c.double(), expected)
