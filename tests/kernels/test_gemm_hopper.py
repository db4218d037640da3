"""Hopper's kernel: the same bits as the other kernels, and used just where its copy engine can work.

Gluon has no interpreter, so what the kernel computes is tested on a Hopper GPU only. That it compiles is tested
everywhere (``test_compile.py``), and so is when it is chosen.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qgemm.kernels import GemmConfig, matmul, scaled_mm
from qgemm.kernels.gemm import hopper
from qgemm.kernels.gemm import launcher as gemm
from qgemm.kernels.gemm.config import CANDIDATES, for_operands, is_valid
from qgemm.kernels.gemm.hopper import rows_at_a_time
from qgemm.kernels.gemm.problem import Problem
from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.reference import block_scaled_mm_reference, quantize_groups_reference
from qgemm.nn import BlockScaledLinear
from qgemm.numerics.blocks import BLOCK, spread_blocks
from qgemm.numerics.groups import spread
from qgemm.numerics.integers import cdiv
from tests.kernels.devices import H200
from tests.kernels.test_linear import Parameters

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
SPECIALIZED = [config for config in CANDIDATES if config.schedule == "specialized"]
EVERY_CONFIG = pytest.mark.parametrize("config", SPECIALIZED, ids=str)
OTHER = GemmConfig(16, 32, 64, num_warps=2, num_stages=2)

SHAPES = [
    *((m, 136, 272) for m in (1, 7, 8, 9, 16, 24, 31, 32, 40, 48, 63)),  # part of a tile's rows: every way to load them
    (64, 128, 128),  # the tiles divide everything
    (65, 8, 16),  # the least N and K, one row beyond a tile
    (100, 392, 1040),
    (128, 264, 4112),  # K goes round the ring of slots several times
    (161, 1000, 144),
    (700, 8200, 272),  # more tiles than multiprocessors, whatever the tile
    (1024, 5120, 256),  # the same, and even
]


def operands(M: int, N: int, K: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = torch.randint(-128, 128, (M, K), dtype=torch.int8, device="cuda")
    b = torch.randint(-128, 128, (N, K), dtype=torch.int8, device="cuda").t()
    return a, b, torch.rand(M, device="cuda"), torch.rand(N, device="cuda")


def leave_nan_in_free_memory(M: int, N: int) -> None:
    torch.full((M, N), torch.nan, dtype=torch.bfloat16, device="cuda")


@on_hopper
@EVERY_CONFIG
@pytest.mark.parametrize("constant_b", [False, True])
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_same_bits_as_another_kernel(M: int, N: int, K: int, constant_b: bool, config: GemmConfig) -> None:
    a, b, a_scale, b_scale = operands(M, N, K)
    bias = torch.randn(N, device="cuda", dtype=torch.bfloat16)
    expected = scaled_mm(a, b, a_scale, b_scale, bias, config=OTHER)
    for _ in range(3):
        leave_nan_in_free_memory(M, N)
        out = scaled_mm(a, b, a_scale, b_scale, bias, constant_b=constant_b, config=config)
        assert torch.equal(out, expected)


@on_hopper
@pytest.mark.parametrize(("M", "N", "K"), [(3000, 3000, 4112), (2560, 3456, 4096)])  # parts of tiles, and whole ones
def test_long_products(M: int, N: int, K: int) -> None:
    (config,) = (config for config in SPECIALIZED if config.block_m == 256)
    assert hopper.columns_at_a_time(config, M, N, K, H200) > 1
    a, b, a_scale, b_scale = operands(M, N, K)
    leave_nan_in_free_memory(M, N)
    out = scaled_mm(a, b, a_scale, b_scale, config=config)
    assert torch.equal(out, scaled_mm(a, b, a_scale, b_scale, config=OTHER))


@on_hopper
@EVERY_CONFIG
@pytest.mark.parametrize("captured", [False, True])
def test_weights_that_the_kernel_ahead_writes(captured: bool, config: GemmConfig) -> None:
    # A constant b is loaded before the kernel ahead may have ended, but an ordinary one has.
    M, N, K = 16, 8192, 8192
    a, _, a_scale, b_scale = operands(M, 8, K)[:3] + (torch.rand(N, device="cuda"),)
    weights = torch.randint(-128, 128, (2, N, K), dtype=torch.int8, device="cuda")
    expected = [scaled_mm(a, weight.t(), a_scale, b_scale, config=OTHER) for weight in weights]
    weight = torch.empty_like(weights[0])
    outs: list[Tensor] = []

    def run() -> None:
        for i in range(20):
            torch.add(weights[i % 2], 0, out=weight)  # a kernel, where copy_ would be none
            outs.append(scaled_mm(a, weight.t(), a_scale, b_scale, constant_b=True, config=config))

    run()
    if captured:
        outs.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
    for i, out in enumerate(outs):
        assert torch.equal(out, expected[i % 2])


@on_hopper
@EVERY_CONFIG
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias_dtype", [None, torch.float16, torch.float32])
def test_dtypes(out_dtype: torch.dtype, bias_dtype: torch.dtype | None, config: GemmConfig) -> None:
    a, b, a_scale, b_scale = operands(90, 200, 400)
    bias = None if bias_dtype is None else torch.randn(200, device="cuda").to(bias_dtype)
    out = scaled_mm(a, b, a_scale, b_scale, bias, out_dtype, config=config)
    assert out.dtype == out_dtype
    assert torch.equal(out, scaled_mm(a, b, a_scale, b_scale, bias, out_dtype, config=OTHER))


@on_hopper
@EVERY_CONFIG
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("M", "N", "K"), [(7, 136, 272), (161, 1000, 144), (700, 8200, 272)])
def test_residuals(M: int, N: int, K: int, dtype: torch.dtype, config: GemmConfig) -> None:
    a, b, a_scale, b_scale = operands(M, N, K)
    product = scaled_mm(a, b, a_scale / K, b_scale, None, dtype, config=OTHER)
    wide = torch.randn(M, N + 16, device="cuda").mul(100).to(dtype)
    for residual in (wide[:, :N].contiguous(), wide[:, 8:-8], wide[:, 3 : N + 3], wide[:1, :N].expand(M, N)):
        leave_nan_in_free_memory(M, N)
        out = scaled_mm(a, b, a_scale / K, b_scale, None, dtype, residual=residual, config=config)
        assert torch.equal(out, product + residual)


@on_hopper
@pytest.mark.parametrize("captured", [False, True])
def test_a_residual_that_the_kernel_before_the_one_ahead_writes(captured: bool) -> None:
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    layers = [Parameters(torch.device("cuda"), 4096, 4096) for _ in range(2)]
    for layer in layers:
        layer.weight_scale /= 1e4
    layers[0](x, x)

    def run(h: Tensor, add: bool) -> Tensor:
        for _ in range(20):  # a residual stream: written, read by the next, added by the one after
            inner = layers[0](h)
            h = layers[1](inner) + h if add else layers[1](inner, h)
        return h

    expected, out = run(x, add=True), run(x, add=False)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(x, add=False)
        graph.replay()
    assert torch.equal(out, expected)


@on_hopper
@pytest.mark.parametrize("view", ["wide rows", "one scale", "strided scales"])
def test_views(view: str) -> None:
    config = SPECIALIZED[-1]
    a, b, a_scale, b_scale = operands(90, 200, 400)
    if view == "wide rows":  # rows of 448 bytes, of which 400 count
        a = torch.nn.functional.pad(a, (16, 32), value=99)[:, 16:-32]
        b = torch.nn.functional.pad(b.t(), (32, 16), value=99)[:, 32:-16].t()
    elif view == "one scale":
        a_scale, b_scale = a_scale[0], b_scale[:1]
    else:
        a_scale = torch.rand(90, 3, device="cuda")[:, 1]
        b_scale = torch.rand(200, 2, device="cuda")[:, 1]
    out = scaled_mm(a, b, a_scale, b_scale, config=config)
    assert torch.equal(out, scaled_mm(a, b, a_scale, b_scale, config=OTHER))


@on_hopper
def test_a_capture_with_many_products_in_a_row() -> None:
    # Each may start before the one ahead has ended, and all but the first write what another has read.
    a, b, a_scale, b_scale = operands(64, 512, 512)
    b_scale /= 4e6  # the values stay about as large as they are
    expected = a
    for _ in range(20):
        expected = scaled_mm(expected, b, a_scale, b_scale, config=OTHER).round().to(torch.int8)
    out = a
    graph = torch.cuda.CUDAGraph()
    scaled_mm(a, b, a_scale, b_scale, config=SPECIALIZED[1])
    with torch.cuda.graph(graph):
        for _ in range(20):
            out = scaled_mm(out, b, a_scale, b_scale, config=SPECIALIZED[1]).round().to(torch.int8)
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("block_m", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("M", [1, 7, 8, 16, 24, 32, 37, 48, 63, 64, 65, 80, 100, 128, 160, 300, 700, 5000])
def test_rows_at_a_time(M: int, block_m: int) -> None:
    part, last_parts = rows_at_a_time(M, block_m)
    assert block_m % part == 0
    assert part % 8 == 0  # what shared memory is swizzled by
    rows_in_last_tile = M - (M - 1) // block_m * block_m
    assert (last_parts - 1) * part < rows_in_last_tile <= last_parts * part


def plan(
    limits: DeviceLimits, monkeypatch: pytest.MonkeyPatch, config: GemmConfig | None = None, **changes: Any
) -> str:
    """The name of the kernel that a product of 256 x 512 x 1024 gets, or one with ``changes``."""
    arguments: dict[str, Any] = {
        "M": 256, "N": 512, "K": 1024, "strides": (1024, 1, 1, 1024, 512, 1, 1, 1, 0, 1), "dtype": torch.int8,
        "out_dtype": torch.bfloat16, "scaled": True, "bias_dtype": None, "has_residual": False, "activation": None,
        "allow_tf32": False, "device": torch.device("cuda", 0), "aligned": True, "constant_b": True,
        **changes,
    }  # fmt: skip

    def choose(*problem: Any) -> GemmConfig:
        return SPECIALIZED[0] if problem[5] else OTHER

    names: list[str] = []
    record: Callable[..., None] = lambda kernel, *rest, **options: names.append(kernel.__name__)  # noqa: E731
    monkeypatch.setattr(gemm, "device_limits", lambda device: limits)
    monkeypatch.setattr(gemm, "select_config", choose)
    monkeypatch.setattr(gemm, "Launch", record)
    monkeypatch.setattr(hopper, "Launch", record)
    gemm.make_product(Problem(**arguments), config)
    return names[0]


def test_a_product_that_the_copy_engine_can_load_gets_hoppers_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(H200, monkeypatch) == "_gemm_hopper_kernel"
    assert plan(replace(H200, hopper=False), monkeypatch) == "_gemm_kernel"
    for dtype in (torch.float8_e4m3fn, torch.float16, torch.bfloat16):
        assert plan(H200, monkeypatch, dtype=dtype) == "_gemm_hopper_kernel"
        assert plan(H200, monkeypatch, dtype=dtype, scaled=False) == "_gemm_hopper_kernel"


def test_a_triton_without_the_language_of_hoppers_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("cannot import name 'warpgroup_mma'")

    with monkeypatch.context() as patch:
        patch.setattr(gemm.importlib, "import_module", fail)
        with pytest.warns(UserWarning, match="warpgroup_mma"):
            name = plan(H200, patch)
    assert name == "_gemm_kernel"
    assert plan(H200, monkeypatch) == "_gemm_hopper_kernel"


STRIDES = (1024, 1, 1, 1024, 512, 1, 1, 1, 0, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"out_dtype": torch.float32},
        {"scaled": False, "out_dtype": torch.int32},
        {"dtype": torch.float32},
        {"dtype": torch.float8_e5m2},
        {"dtype": torch.bfloat16, "strides": (1028, *STRIDES[1:])},
        {"aligned": False},
        {"N": 508},  # rows of the output that 16 bytes don't divide
        {"strides": (1032, *STRIDES[1:])},
        {"strides": (*STRIDES[:3], 1032, *STRIDES[4:])},
        {"strides": (1, 256, *STRIDES[2:])},  # K isn't contiguous
        {"strides": (0, *STRIDES[1:])},  # one row, expanded
        {"strides": (16, *STRIDES[1:])},  # rows that overlap
        {"strides": (*STRIDES[:2], 512, 1, *STRIDES[4:])},
        {"K": 0},
    ],
    ids=str,
)
def test_any_other_product_gets_another_kernel(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(H200, monkeypatch, **changes) == "_gemm_kernel"
    if changes.get("dtype") is None:
        with pytest.raises(ValueError, match=r"K contiguous.*omit it"):
            plan(H200, monkeypatch, **changes, config=SPECIALIZED[0])


FP8_CONFIGS = [config for each in SPECIALIZED if is_valid(config := for_operands(each, 1, promotes=True), 1, H200)]
FLOAT_CONFIGS = [each for each in SPECIALIZED if is_valid(each, 2, H200)]


def fp8(*shape: int) -> Tensor:
    return (torch.randn(shape, device="cuda") * 60).to(torch.float8_e4m3fn)


@on_hopper
@pytest.mark.parametrize("config", FP8_CONFIGS, ids=str)
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_fp8(M: int, N: int, K: int, config: GemmConfig) -> None:
    a, b, bias = fp8(M, K), fp8(N, K), torch.randn(N, device="cuda")
    a_scale, b_scale = torch.rand(M, device="cuda") / 100, torch.rand(N, device="cuda") / 100
    leave_nan_in_free_memory(M, N)
    out = scaled_mm(a, b.t(), a_scale, b_scale, bias, torch.float16, config=config)
    exact = (a.double() @ b.double().t()) * a_scale[:, None] * b_scale + bias
    # Sums of 128 products keep 14 bits, of which rounding to float16 takes 3.
    assert (out.double() - exact).norm() <= 5e-4 * exact.norm()


@on_hopper
@pytest.mark.parametrize(("M", "N", "K"), [*SHAPES, (1024, 3072, 1024)])  # one launch, of tiles of 192 columns
def test_fp8_with_scales_of_blocks(M: int, N: int, K: int) -> None:
    layer = BlockScaledLinear.from_linear(torch.nn.Linear(K, N, device="cuda", dtype=torch.float16), "fp8-block")
    x = torch.randn(M, K, device="cuda", dtype=torch.float16)
    q, scale = quantize_groups_reference(x)
    operands = layer.stored("weight"), scale, layer.stored("weight_scale"), layer.bias
    exact = block_scaled_mm_reference(q, *operands[:1], *operands[1:], torch.float32)
    leave_nan_in_free_memory(M, N)
    for _ in range(2):  # planned, and recalled
        out = layer(x)
        assert (out.double() - exact.double()).norm() <= 5e-4 * exact.double().norm()


@on_hopper
@pytest.mark.parametrize("tile", [(128, 128), (128, 192)])
@pytest.mark.parametrize(("M", "N", "K"), [*SHAPES, (300, 456, 28_688), (1000, 8512, 4112)])
def test_tiles_with_scales_of_blocks(M: int, N: int, K: int, tile: tuple[int, int]) -> None:
    (config,) = (config for config in FP8_CONFIGS if (config.block_m, config.block_n) == tile)
    a, b, bias = fp8(M, K), fp8(N, K), torch.randn(N, device="cuda")
    a_scale, b_scale = (torch.rand(rows, cdiv(K, 128), device="cuda") / 100 for rows in (M, cdiv(N, 128)))
    wide_a, wide_b = a.double() * spread(a_scale, BLOCK, K), b.double() * spread_blocks(b_scale, N, K)
    exact = wide_a @ wide_b.t() + bias
    leave_nan_in_free_memory(M, N)
    out = gemm.scaled_mm(a, b.t(), a_scale, b_scale, bias, torch.float16, config)
    assert (out.double() - exact).norm() <= 5e-4 * exact.norm()
    residual = torch.randn(M, N, device="cuda", dtype=torch.float16)
    added = gemm.scaled_mm(a, b.t(), a_scale, b_scale, bias, torch.float16, config, residual=residual)
    assert torch.equal(added, out + residual)


@on_hopper
def test_long_sums_of_fp8_of_one_sign() -> None:
    """Sums of 256 products are added in float32: 0.2 % is lost on average. One long sum in 14 bits would lose 45 %."""
    a, b = ((torch.randn(rows, 53_248, device="cuda").abs() * 60).to(torch.float8_e4m3fn) for rows in (64, 256))
    one = torch.ones((), device="cuda")
    out = scaled_mm(a, b.t(), one / 1e5, one / 1e3, None, torch.float16)
    exact = a.double() @ b.double().t() / 1e8
    assert ((out.double() - exact).abs() / exact).max() <= 3e-3


@on_hopper
@pytest.mark.parametrize("config", FLOAT_CONFIGS, ids=str)
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_16_bit_floats(M: int, N: int, K: int, config: GemmConfig) -> None:
    a, b = (torch.randn(rows, K, device="cuda", dtype=torch.bfloat16) for rows in (M, N))
    bias = torch.randn(N, device="cuda")
    leave_nan_in_free_memory(M, N)
    out = matmul(a, b.t(), bias, "silu", config=config)
    exact = torch.nn.functional.silu(a.double() @ b.double().t() + bias)
    assert (out.double() - exact).norm() <= 2 * (exact.bfloat16().double() - exact).norm()
