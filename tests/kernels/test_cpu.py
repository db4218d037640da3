"""The CPU functions: the numbers of ``reference.py`` bit for bit, through oneDNN and round what it gets wrong."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qgemm.kernels import cpu, cpu_rows, dispatch, reference
from qgemm.kernels.activations import ACTIVATIONS, activated
from qgemm.kernels.norms import Norm
from qgemm.kernels.reference import int_mm_reference, matmul_reference, scaled_mm_reference
from qgemm.kernels.rows import QuantizedRows
from qgemm.numerics.formats import FP8, INT8

# torch._int_mm, and the float32 sums that stand in for it on processors where it saturates or is slow.
PATHS = pytest.mark.parametrize("int_mm", [True, False], ids=["onednn", "float"])


@pytest.fixture
def _int_mm_path(int_mm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_int8_products", lambda: int_mm)
    if not int_mm:
        monkeypatch.setattr(torch, "_int_mm", None)  # calling it would be an error


def int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


@PATHS
@pytest.mark.usefixtures("_int_mm_path")
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [(0, 5, 7), (5, 0, 7), (5, 7, 0), (1, 1, 1), (1, 4096, 33), (17, 53, 101), (2, 3, 3000), (64, 64, 1024)],
)
def test_int_mm(M: int, N: int, K: int, int_mm: bool) -> None:
    a, b = int8(M, K), int8(N, K).t()
    out = cpu.int_mm(a, b)
    assert out.dtype == torch.int32
    assert torch.equal(out, int_mm_reference(a, b))


@PATHS
@pytest.mark.usefixtures("_int_mm_path")
@pytest.mark.parametrize("value", [-128, 127, "alternating"])
@pytest.mark.parametrize("K", [1023, 1024, 1025, 4097])  # either side of the longest exact float32 sum
def test_extreme_values(K: int, value: int | str, int_mm: bool) -> None:
    # Pairs of products of the same sign are what 16-bit saturation gets wrong.
    a = torch.full((3, K), 127 if value == "alternating" else value, dtype=torch.int8)
    if value == "alternating":
        a[1::2] = -128
    b = torch.full((K, 5), -128, dtype=torch.int8)
    assert torch.equal(cpu.int_mm(a, b), int_mm_reference(a, b))


def test_float_sums_are_short_enough_to_be_exact() -> None:
    # All of one sign and as often odd as even: a sum past 2^24 loses its last bit in float32.
    a = torch.randint(100, 128, (8, 4097), dtype=torch.int8)
    b = torch.randint(100, 128, (4097, 8), dtype=torch.int8)
    assert torch.equal(cpu._float_sums(a, b), int_mm_reference(a, b))


def test_the_longest_sum() -> None:
    a, b = torch.full((1, INT8.max_k), -128, dtype=torch.int8), torch.full((INT8.max_k, 2), -128, dtype=torch.int8)
    for out in (cpu.int_mm(a, b), cpu._float_sums(a, b)):
        assert out.tolist() == [[2**31 - 2**14] * 2]


@pytest.mark.parametrize("M", [1, 2, 17])
@pytest.mark.parametrize("N", [1, 3, 16])
@pytest.mark.parametrize("K", [1, 2, 17])
def test_int_mm_with_every_kind_of_strides(M: int, N: int, K: int) -> None:
    # oneDNN itself answers garbage for about a tenth of these: strides of 0, and (1, 1) where one dimension is 1.
    buffer = int8(2000)

    def views(rows: int, cols: int, start: int) -> list[Tensor]:
        row_strides, col_strides = {0, 1, 2, rows, cols, cols + 3}, {0, 1, 2, rows, cols, rows + 3}
        return [
            buffer.as_strided((rows, cols), strides, start)
            for strides in sorted(itertools.product(row_strides, col_strides))
        ]

    for a, b in itertools.product(views(M, K, 7), views(K, N, 3)):
        assert torch.equal(cpu.int_mm(a, b), int_mm_reference(a, b)), (a.stride(), b.stride())


def test_the_fast_layouts_are_not_copied() -> None:
    for t in (int8(8, 16), int8(16, 8).t(), int8(8, 20)[:, :16], int8(16, 20)[:, :8].t(), int8(1, 16), int8(16, 1).t()):
        plain = cpu._plain(t)
        assert torch.equal(plain, t)
        if t.shape != (1, 16):
            assert plain.data_ptr() == t.data_ptr()


@PATHS
@pytest.mark.usefixtures("_int_mm_path")
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_bias", [False, True])
def test_scaled_mm_equals_the_reference(out_dtype: torch.dtype, with_bias: bool, int_mm: bool) -> None:
    a, b = int8(18, 70), int8(40, 70).t()
    bias = torch.randn(40).to(out_dtype) if with_bias else None
    for a_scale in (torch.rand(18), torch.rand(()), torch.rand(1)):
        for b_scale in (torch.rand(40), torch.rand(()), torch.rand(1)):
            out = cpu.scaled_mm(a, b, a_scale, b_scale, bias, out_dtype)
            assert torch.equal(out, scaled_mm_reference(a, b, a_scale, b_scale, bias, out_dtype))


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_matmul_equals_the_reference(dtype: torch.dtype, activation: str | None) -> None:
    a, b = torch.randn(18, 70).to(dtype), torch.randn(70, 40).to(dtype)
    bias = torch.randn(40)
    assert torch.equal(cpu.matmul(a, b, bias, activation), matmul_reference(a, b, bias, activation))


def test_autocast_does_not_reach_inside() -> None:
    # Under autocast, torch.mm would round its float32 operands to bfloat16.
    a, b = int8(18, 700), int8(700, 40)
    x, y = torch.randn(18, 70), torch.randn(70, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        integers, product = cpu._float_sums(a, b), cpu.matmul(x, y)
    assert torch.equal(integers, int_mm_reference(a, b))
    assert torch.equal(product, matmul_reference(x, y))


def test_the_probe_finds_saturating_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturating(a: Tensor, b: Tensor) -> Tensor:
        pairs = a.int()[:, :, None] * b.int()[None]
        pairs = pairs.view(a.shape[0], a.shape[1] // 2, 2, b.shape[1]).sum(2)
        return pairs.clamp(-(2**15), 2**15 - 1).sum(1).int()

    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert cpu.has_int8_products.__wrapped__() is False


@pytest.mark.parametrize(("seconds", "is_of_use"), [(0.0, True), (0.02, False)])
def test_the_probe_finds_a_slow_product(seconds: float, is_of_use: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(a: Tensor, b: Tensor) -> Tensor:
        if seconds:  # else the core would go to others
            time.sleep(seconds)
        return sums

    sums = int_mm_reference(extremes := torch.tensor([[-128], [127]]).repeat(32, 256).to(torch.int8), extremes.t())
    monkeypatch.setattr(torch, "_int_mm", product)
    assert cpu.has_int8_products.__wrapped__() is is_of_use


def test_default_device_does_not_matter() -> None:
    a = torch.randint(-128, 128, (4, 8), dtype=torch.int8)
    wanted = int_mm_reference(a, a.t())
    cpu.has_int8_products.cache_clear()
    with torch.device("meta"):
        assert torch.equal(cpu.int_mm(a, a.t()), wanted)
        _, scale = cpu.quantize_rows(torch.empty(3, 0, device="cpu"))
    assert torch.equal(scale, torch.ones(3))


# Linear layers, in blocks of rows


LIMITS = (
    (cpu, "VALUES_AT_A_TIME"),
    (cpu, "_SUMS_AT_A_TIME"),
    (cpu, "_ROWS_OF_A_PRODUCT"),
    (cpu_rows, "VALUES_AT_A_TIME"),
    (cpu_rows, "_FEW"),
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("limit", [1, 100, 10_000])  # a row; some, not all blocks of one size; all in one block
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_quant_linear(static: bool, limit: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in LIMITS:
        monkeypatch.setattr(module, name, limit)
    weight, weight_scale = cpu.quantize_rows(torch.randn(24, 40))
    bias = torch.randn(24).to(dtype)
    input_scale = torch.tensor(0.02) if static else None
    x = torch.randn(7, 3, 40).to(dtype)
    x[1, 2], x[2, 1, 5], x[3, 0, 7] = 0, torch.inf, torch.nan
    for given in (x, x[0], x[0, 0], x.transpose(0, 1), x[:, :0], x[..., :0]):
        w, residual = weight[:, : given.shape[-1]], torch.randn(*given.shape[:-1], 24).to(dtype)
        q, scale = reference.quantize_rows_reference(given, input_scale)
        for arguments in ((bias, None), (None, residual)):
            wanted = reference.multiply_reference(q, scale, w, weight_scale, *arguments, dtype)
            out = cpu.quant_linear(given, w, weight_scale, arguments[0], input_scale, arguments[1])
            assert out.is_contiguous()
            assert not out._is_view()
            assert out.dtype == dtype
            assert torch.equal(out.nan_to_num(nan=77), wanted.nan_to_num(nan=77))


@pytest.mark.parametrize("scale", [torch.rand(()), torch.rand(1), torch.rand(18)])
def test_scaled_mm_in_blocks(scale: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in LIMITS:
        monkeypatch.setattr(module, name, 1)
    a, b, b_scale = int8(18, 70), int8(70, 40), torch.rand(40)
    assert torch.equal(cpu.scaled_mm(a, b, scale, b_scale), scaled_mm_reference(a, b, scale, b_scale))


def test_blocks_are_of_about_one_size() -> None:
    assert list(cpu_rows.blocks_of(768, 384, 2**18)) == [slice(0, 384), slice(384, 768)]
    assert list(cpu_rows.blocks_of(300, 2**20, 2**20, least=128)) == [slice(0, 150), slice(150, 300)]
    assert list(cpu_rows.blocks_of(200, 2**20, 2**20, least=128)) == [slice(0, 200)]
    assert list(cpu_rows.blocks_of(0, 384, 2**18)) == []


class Largest(TorchDispatchMode):
    """How many bytes the largest storage of float32 or int32 has that an operator made."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.dtype in (torch.float32, torch.int32):
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize(("threads", "as_many"), [(1, 1), (2, 2), (64, 4)])
def test_no_activation_becomes_float32_as_a_whole(threads: int, as_many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for module in (cpu, cpu_rows):
        monkeypatch.setattr(module, "VALUES_AT_A_TIME", 2**12)
    monkeypatch.setattr(cpu, "_SUMS_AT_A_TIME", 2**13)
    x, weight = torch.randn(1024, 128).bfloat16(), torch.randn(128).bfloat16()
    w, w_scale = cpu.quantize_rows(torch.randn(128, 128))
    for function, arguments in made_rows(x, x, weight):
        with Largest() as largest:
            function(*arguments)
        # LayerNorm is one operator. Its mean and variance, which are float32 before PyTorch 2.15, nobody reads.
        assert function in (dispatch.add_norm, dispatch.post_norm) or largest.bytes > 0, function.__name__
        assert largest.bytes <= as_many * 4 * 2**12, function.__name__
    with Largest() as largest:
        cpu.quant_linear(x, w, w_scale, None, None)
    assert 0 < largest.bytes <= 4 * max(128 * cpu._ROWS_OF_A_PRODUCT, as_many * 2**13)


# Rows that are made, then quantized


def made_rows(x: Tensor, residual: Tensor, weight: Tensor) -> list[tuple[Callable[..., object], tuple[object, ...]]]:
    """Functions and their arguments."""
    layer, rms, scale = Norm("layer", 1e-5), Norm("rms_plus_one"), torch.tensor(0.02)
    return [
        (dispatch.norm_quantize, (x, weight, weight, layer)),
        (dispatch.norm_quantize, (x, weight, None, rms, scale)),
        (dispatch.add_norm_quantize, (x, residual, None, weight, None, rms)),
        (dispatch.add_norm_quantize, (x, residual, weight, None, None, rms, scale)),
        (dispatch.add_norm_quantize, (x, residual, weight, weight, weight, layer)),
        (dispatch.add_norm, (x, residual, None, weight, None, rms)),
        (dispatch.add_norm, (x, residual, weight, weight, None, rms, None, 0.22, weight.new_full((1,), 1.7))),
        (dispatch.add_norm, (x, residual, None, weight, None, rms, weight)),
        (dispatch.add_norm, (x, None, weight, weight, None, rms)),
        (dispatch.add_norm, (x, None, None, weight, weight, layer)),
        (dispatch.add_norm, (x, residual, weight, None, None, layer)),
        (dispatch.post_norm, (x, residual, weight, weight, layer)),
        (dispatch.post_norm_quantize, (x, residual, weight, weight, layer)),
        (dispatch.post_norm_quantize, (x, residual, weight, None, rms, scale, FP8.storage)),
        (cpu.activation_quantize, (x, "silu", True)),
        (cpu.activation_quantize, (x, "relu2", False, scale)),
        (dispatch.norm_quantize, (x, weight, None, rms, None, FP8.storage)),
        (dispatch.add_norm_quantize, (x, residual, weight, weight, None, rms, scale, FP8.storage)),
        (cpu.activation_quantize, (x, "silu", True, None, FP8.storage)),
    ]


def assert_made_rows_equal_the_reference(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    for function, arguments in made_rows(x, residual, weight):
        wanted = getattr(reference, f"{function.__name__}_reference")(*arguments)
        found = function(*arguments)
        pairs = ((found, wanted),) if isinstance(found, Tensor) else zip(found, wanted, strict=True)
        for ours, theirs in pairs:
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            ours, theirs = ours.float(), theirs.float()  # fp8 has no nan_to_num
            assert torch.equal(ours.nan_to_num(nan=77), theirs.nan_to_num(nan=77)), function.__name__


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("values", [1, 30, 35, 1000])  # less than a row; three rows; not whole rows; all
def test_made_rows(values: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rows, "VALUES_AT_A_TIME", values)
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((7, 2, 10), (7, 2, 10), (10,)))
    x[3, 1, 4], x[5, 0] = torch.inf, 0
    assert_made_rows_equal_the_reference(x, residual, weight)
    assert_made_rows_equal_the_reference(x.transpose(0, 1), residual.transpose(0, 1), weight)


@pytest.mark.parametrize("shape", [(0, 10), (3, 0), (10,), (2, 0, 10)])
def test_made_rows_of_odd_shapes(shape: tuple[int, ...]) -> None:
    assert_made_rows_equal_the_reference(torch.randn(shape), torch.randn(shape), torch.randn(shape[-1]))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_activation_rounds_as_float_modules_do(name: str, dtype: torch.dtype) -> None:
    x = (3 * torch.randn(20, 80)).to(dtype)
    gate, up = x[:, :40], x[:, 40:]
    rounded = ACTIVATIONS[name](gate.float()).to(dtype)
    wanted = activated(x, name, gated=True)
    # PyTorch's GELU of float16 isn't that of float32 to the last bit, where it is small.
    assert (wanted != (rounded.float() * up.float()).to(dtype)).float().mean() <= (0.08 if "gelu" in name else 0)
    if dtype != torch.float32 and name != "relu":
        assert (wanted != (ACTIVATIONS[name](gate.float()) * up.float()).to(dtype)).float().mean() > 0.1
    q, scale = cpu.activation_quantize(x, name, True)
    wanted_q, wanted_scale = reference.quantize_rows_reference(wanted)
    assert torch.equal(q, wanted_q)
    assert torch.equal(scale, wanted_scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_residual_is_added_to_the_rounded_product(dtype: torch.dtype) -> None:
    q, scale = cpu.quantize_rows(torch.randn(3, 5, 40))
    weight, weight_scale = cpu.quantize_rows(torch.randn(8, 40))
    bias, residual = torch.randn(8).to(dtype), torch.randn(3, 5, 8).to(dtype)
    before = residual.clone()
    rows = QuantizedRows(q, scale)
    out = dispatch.multiply(rows, weight, weight_scale, bias, dtype, residual)
    assert torch.equal(out, dispatch.multiply(rows, weight, weight_scale, bias, dtype) + residual)
    assert torch.equal(residual, before)
    wanted = reference.multiply_reference(q, scale, weight, weight_scale, bias, residual, dtype)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 1, 1), (17, 53, 101), (2, 3, 3000), (300, 4000, 64)])
def test_scaled_mm_of_fp8(M: int, N: int, K: int, out_dtype: torch.dtype) -> None:
    a, b = (torch.randn(rows, K).mul_(60).to(torch.float8_e4m3fn) for rows in (M, N))
    a_scale, b_scale, bias = torch.rand(M) / 100, torch.rand(N) / 100, torch.randn(N)
    exact = (a.double() @ b.double().t()) * a_scale[:, None] * b_scale + bias
    wanted = scaled_mm_reference(a, b.t(), a_scale, b_scale, bias, out_dtype)
    out = cpu.scaled_mm(a, b.t(), a_scale, b_scale, bias, out_dtype)
    assert out.dtype == out_dtype
    assert (out.double() - exact).norm() <= 2 * (wanted.double() - exact).norm() + 1e-6 * exact.norm()
