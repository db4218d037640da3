"""``quantize_rows``: the Triton kernel and the CPU function against ``reference.py``, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qgemm.kernels import cpu, cpu_rows, dispatch
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.launch.plans import PlanCache
from qgemm.kernels.quantize import launcher as quantize
from qgemm.kernels.quantize.kernels import _quantize_rows_kernel
from qgemm.kernels.reference import quantize_groups_reference, quantize_rows_reference
from qgemm.kernels.stages import INTERPRETING
from qgemm.numerics.formats import MIN_SCALE
from tests.kernels.devices import A100, H200, MI300X

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
# The kernel itself (interpreted on a CPU), and what a user's call runs.
FUNCTIONS = pytest.mark.parametrize(
    "function", [quantize.quantize_rows, dispatch.quantize_rows], ids=["kernel", "user"]
)

Quantize = Callable[..., tuple[Tensor, Tensor]]


def assert_equals_reference(
    function: Quantize, x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    q, row_scale = function(x, scale, zero_point)
    wanted_q, wanted_scale = quantize_rows_reference(x, scale, zero_point)
    assert q.dtype == torch.int8
    assert row_scale.dtype == torch.float32
    assert q.shape == x.shape
    assert q.is_contiguous()
    assert row_scale.shape == x.shape[:-1]
    assert torch.equal(row_scale.nan_to_num(nan=-1.0), wanted_scale.nan_to_num(nan=-1.0))
    assert torch.equal(q, wanted_q)
    return q, row_scale


@FUNCTIONS
@DTYPES
@pytest.mark.parametrize(
    "shape",
    [
        (0, 64),  # no rows
        (5, 0),  # no columns: scale 1, as for zeros
        (0, 0),
        (1, 1),
        (5, 1),
        (17, 53),  # no power of 2
        (3, 128),
        (2, 4095),  # one short of a block
        (70,),  # a single vector
        (2, 3, 5, 70),  # leading dimensions
        (2, 0, 70),
    ],
)
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype, function: Quantize, device: torch.device) -> None:
    assert_equals_reference(function, torch.randn(shape, device=device).to(dtype))


@FUNCTIONS
@DTYPES
# A whole row, part of a block, one block, one value more, three blocks.
@pytest.mark.parametrize("K", [1000, 1001, 1024, 1025, 3000])
def test_rows_longer_than_a_block(
    K: int, dtype: torch.dtype, function: Quantize, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel reads such rows twice. The real limit takes seconds to interpret.
    x = torch.randn(3, K, device=device).to(dtype)
    monkeypatch.setattr(quantize, "plans", PlanCache())
    monkeypatch.setattr(quantize, "max_row_bytes", lambda limits: 1000 * x.itemsize)
    monkeypatch.setattr(quantize, "LONG_ROW_BLOCK", 1024)
    x[1, -1] = 50  # the largest value in the last block
    x[2, -1] = torch.nan
    assert_equals_reference(function, x)
    assert_equals_reference(function, x, torch.tensor(0.01, device=device))


# Layers of Qwen2.5 and Llama 3 (3584, 14,336, 18,944, 28,672, 53,248), and where the numbers change.
@pytest.mark.parametrize(
    "K", [1, 256, 257, 1023, 1024, 2047, 2048, 3584, 4096, 14_336, 18_944, 28_672, 32_768, 53_248, 65_536]
)
def test_blocks_hold_a_row(K: int) -> None:
    block, blocks, threads = quantize.row_blocks(K, 2, quantize.MAX_ROW_BYTES_IN_REGISTERS, quantize.LONG_ROW_BLOCK)
    assert block & (block - 1) == 0
    assert (blocks - 1) * block < K <= blocks * block
    assert threads <= 1024
    assert block * blocks <= 64 * threads  # more values a thread don't fit in registers
    assert block * blocks <= K + K // 3 or K < 1024  # few idle lanes


def test_a_row_has_fewer_registers_before_hopper() -> None:
    assert quantize.max_row_bytes(H200) == quantize.max_row_bytes(MI300X) == quantize.MAX_ROW_BYTES_IN_REGISTERS
    assert quantize.max_row_bytes(A100) == quantize.MAX_ROW_BYTES_IN_REGISTERS // 2


def test_each_kind_of_scale_has_a_launch_of_its_own(device: torch.device) -> None:
    # A launch compiles its kernel once, for a scale that is there or not.
    x, scale = torch.randn(3, 40, device=device), torch.tensor(0.02, device=device)
    assert quantize.plan_quantization(x, None) is quantize.plan_quantization(x, None)
    assert quantize.plan_quantization(x, None) is not quantize.plan_quantization(x, scale)
    assert quantize.plan_quantization(x, None) is not quantize.plan_quantization(x.half(), None)


def test_rows_beyond_the_registers_are_read_twice() -> None:
    longest = quantize.MAX_ROW_BYTES_IN_REGISTERS
    assert quantize.row_blocks(longest // 2, 2, longest, 1024)[1] > 0
    assert quantize.row_blocks(longest // 2 + 1, 2, longest, 1024) == (1024, 0, 64)
    assert quantize.row_blocks(longest // 4, 4, longest, 1024)[1] > 0
    assert quantize.row_blocks(longest // 4 + 1, 4, longest, 1024) == (1024, 0, 64)


@pytest.mark.slow(quick=["user"])
@FUNCTIONS
def test_every_bfloat16_quotient_rounds_as_the_reference_does(function: Quantize, device: torch.device) -> None:
    # A row for each amax; in it the 2048 values from amax down, of both signs. Smaller ones round to 0.
    everything = torch.arange(1, 0x7F80, dtype=torch.int32, device=device)
    # The interpreter takes long, and reads denormals as 0: there each significand, with an even and an odd exponent.
    rows = everything[0x4000:0x4100] if device.type == "cpu" else everything
    for amax in rows.split(4096):
        magnitude = (amax[:, None] - torch.arange(2048, dtype=torch.int32, device=device)).clamp(min=0)
        x = torch.cat([magnitude, magnitude + 0x8000], dim=1)
        assert_equals_reference(function, x.to(torch.int16).view(torch.bfloat16))


@pytest.mark.slow(quick=["True-dtype1"])
@FUNCTIONS
@DTYPES
@pytest.mark.parametrize("static", [False, True])
def test_quotients_near_halves(static: bool, dtype: torch.dtype, function: Quantize, device: torch.device) -> None:
    count = 64 if device.type == "cpu" else 4096
    # To where float32 has denormals and reciprocals overflow; less far where x itself would.
    low, high = {torch.float16: (-8, 8), torch.bfloat16: (-100, 118), torch.float32: (-125, 118)}[dtype]
    exponent = torch.randint(low, high, (count, 1), device=device)
    scale = (torch.rand(count, 1, device=device) + 1) * 2.0**exponent
    if static:
        scale = scale[:1].expand(count, 1)
    x = ((torch.randint(-127, 127, (count, 1000), device=device) + 0.5) * scale).to(dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    x = (x.view(bits) + torch.randint(-2, 3, x.shape, device=device, dtype=bits)).view(dtype)
    x[:, 7:8] = 127 * scale  # amax
    x[:, 8:9] = 127 * scale / 2  # 63.5 times the scale, but for its rounding
    assert_equals_reference(function, x, scale[0] if static else None)


def test_cpu_rows_are_taken_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(7, 2, 10)
    x[3, 1, 4] = torch.nan
    for values in (1, 30, 35, 140, 1000):  # less than a row; three rows; not whole rows; all but none left; all
        monkeypatch.setattr(cpu_rows, "VALUES_AT_A_TIME", values)
        assert_equals_reference(cpu.quantize_rows, x)
        assert_equals_reference(cpu.quantize_rows, x, torch.tensor(0.01))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.t().contiguous().t(),
    "slice": lambda t: torch.nn.functional.pad(t, (3, 5, 2, 4), value=torch.nan)[2:-4, 3:-5],
    "every second column": lambda t: torch.stack([t, torch.full_like(t, torch.nan)], -1).flatten(-2)[:, ::2],
    "expanded rows": lambda t: t[:1].expand(t.shape),
    "expanded columns": lambda t: t[:, :1].expand(t.shape),
    "three dimensions that can't be flattened": lambda t: t[: len(t) // 2 * 2].view(2, -1, t.shape[1]).transpose(0, 1),
}


@FUNCTIONS
@pytest.mark.parametrize("view", VIEWS)
def test_any_strides(view: str, function: Quantize, device: torch.device) -> None:
    assert_equals_reference(function, VIEWS[view](torch.randn(18, 70, device=device)))


@FUNCTIONS
@DTYPES
def test_special_rows(dtype: torch.dtype, function: Quantize, device: torch.device) -> None:
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    x = torch.randn(12, 40, device=device).to(dtype)
    x[0] = 0  # scale 1
    x[1] = -0.0
    x[2, 7] = torch.nan
    x[3, 39] = torch.inf
    x[4, 0] = -torch.inf
    x[5] = torch.nan
    x[6] = 0
    # The interpreter reads bfloat16 denormals as 0; a GPU doesn't.
    flushes = INTERPRETING and dtype == torch.bfloat16 and function is quantize.quantize_rows
    x[6, 3] = tiny * 2 if flushes else tiny / 4  # a denormal alone
    x[7] *= 1.0 if flushes else tiny  # mostly denormals
    x[8, 1] = largest
    x[9, 1] = -largest
    x[10] = 3.0  # every value the same
    x[11] = torch.arange(40, device=device) - 20.5  # halves round to even
    q, scale = assert_equals_reference(function, x)
    assert scale[[0, 1]].tolist() == [1, 1]
    assert scale[2:6].isnan().all()
    assert not q[:6].any()
    assert scale[6:].isfinite().all()
    assert (scale[6:] >= MIN_SCALE).all()
    assert q[8, 1] == 127
    assert q[9, 1] == -127
    assert q.min() >= -127


@FUNCTIONS
@DTYPES
@pytest.mark.parametrize("shape", [(18, 70), (70,), (2, 3, 70), (5, 0)])
@pytest.mark.parametrize("scale_shape", [(), (1,), (1, 1)])  # one number, however it is wrapped
def test_static_scale(
    shape: tuple[int, ...],
    scale_shape: tuple[int, ...],
    dtype: torch.dtype,
    function: Quantize,
    device: torch.device,
) -> None:
    x = torch.randn(shape, device=device).to(dtype) * 3
    q, row_scale = assert_equals_reference(function, x, torch.full(scale_shape, 0.01, device=device))
    assert torch.equal(row_scale, torch.full(shape[:-1], 0.01, device=device))
    if x.numel():
        assert q.max() == 127  # values beyond 1.27 saturate
        assert q.min() == -127


@FUNCTIONS
@pytest.mark.parametrize("scale", [torch.nan, torch.inf, 1e-30, 1e30])
def test_static_scale_extremes(scale: float, function: Quantize, device: torch.device) -> None:
    x = torch.tensor([[0.0, 1.0, -1.0, 1e30], [torch.nan, 1.0, 2.0, 3.0], [torch.inf, 1.0, 2.0, 3.0]], device=device)
    _, row_scale = assert_equals_reference(function, x, torch.tensor(scale, device=device))
    assert row_scale[1:].isnan().all()


@FUNCTIONS
@DTYPES
def test_error_is_at_most_half_a_step(dtype: torch.dtype, function: Quantize, device: torch.device) -> None:
    x = torch.randn(18, 70, device=device).to(dtype)
    q, scale = function(x)
    error = (q.double() * scale.double()[:, None] - x.double()).abs()
    assert (error <= scale.double()[:, None] * (0.5 + 1e-5)).all()
    assert (q.abs().amax(1) == 127).all()


def test_programs_beyond_the_rows_write_nothing(device: torch.device) -> None:
    x = torch.randn(5, 100, device=device)
    q = torch.full((7, 100), 99, dtype=torch.int8, device=device)
    scale = torch.full((7,), torch.nan, device=device)
    block, blocks, threads = quantize.row_blocks(100, 4, quantize.MAX_ROW_BYTES_IN_REGISTERS, quantize.LONG_ROW_BLOCK)
    numbers, constants = (5, 100, 100, 1, 1, 1), (block, blocks, False, False, None, False)
    Launch(_quantize_rows_kernel, 7, numbers, constants, num_warps=max(1, threads // 32))(x, q, scale, None, None)
    expected, expected_scale = quantize_rows_reference(x)
    assert torch.equal(q[:5], expected)
    assert torch.equal(scale[:5], expected_scale)
    assert (q[5:] == 99).all()
    assert scale[5:].isnan().all()


@FUNCTIONS
def test_input_is_left_alone(function: Quantize, device: torch.device) -> None:
    x = torch.randn(5, 70, device=device)
    x[2, 2] = torch.nan
    before = x.clone()
    function(x)
    assert torch.equal(x.nan_to_num(7.0), before.nan_to_num(7.0))


def test_no_gradient_is_recorded(device: torch.device) -> None:
    # Directly called functions are the same on every device; torch.ops.qgemm has the gradients.
    x = torch.randn(5, 70, device=device, requires_grad=True)
    assert not dispatch.quantize_rows(x)[1].requires_grad
    assert not dispatch.matmul(x, x.t()).requires_grad


def test_cpu_quantize_rows_equals_the_reference_on_a_larger_matrix() -> None:
    assert_equals_reference(cpu.quantize_rows, torch.randn(300, 1000) * torch.logspace(-38, 38, 300)[:, None])


# With a zero point

ZERO_POINTS = pytest.mark.parametrize("zero", [-128, pytest.param(-77, marks=pytest.mark.complete), 0, 1, 127])


@pytest.mark.slow(quick=["0-dtype1"])
@FUNCTIONS
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float16, marks=pytest.mark.complete), torch.bfloat16, torch.float32]
)
@ZERO_POINTS
@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (1, 1), (17, 53), (2, 1025), (70,), (2, 3, 5, 70)])
def test_zero_points(
    shape: tuple[int, ...], zero: int, dtype: torch.dtype, function: Quantize, device: torch.device
) -> None:
    x = (torch.randn(shape, device=device) * 3 + 1).to(dtype)
    scale, zero_point = torch.tensor(0.02, device=device), torch.tensor(zero, dtype=torch.int8, device=device)
    q, _ = assert_equals_reference(function, x, scale, zero_point)
    zeros, _ = function(torch.zeros_like(x), scale, zero_point)
    assert (zeros == zero).all(), "0 is stored as the zero point"
    if q.numel() > 1000 and abs(zero) < 100:
        assert q.min() == -128
        assert q.max() == 127


@FUNCTIONS
@ZERO_POINTS
def test_a_zero_point_shifts_what_no_bound_touches(zero: int, function: Quantize, device: torch.device) -> None:
    # Halves too: rounding comes first, so an odd zero point doesn't turn them the other way.
    steps = torch.arange(-40, 41, device=device) / 2
    scale, zero_point = torch.tensor(0.25, device=device), torch.tensor(zero, dtype=torch.int8, device=device)
    q, _ = function(steps * 0.25, scale, zero_point)
    wanted = (steps.round() + zero).clamp(-128, 127)
    assert torch.equal(q.float(), wanted)


@FUNCTIONS
@DTYPES
def test_what_is_not_finite_with_a_zero_point(dtype: torch.dtype, function: Quantize, device: torch.device) -> None:
    x = torch.randn(4, 300, device=device).to(dtype)
    x[1, 7], x[2, 8], x[3, 299] = torch.nan, torch.inf, -torch.inf
    zero_point = torch.tensor(-30, dtype=torch.int8, device=device)
    for scale in (0.02, 1e-38, 1e30, torch.nan):
        q, row_scale = assert_equals_reference(function, x, torch.tensor(scale, device=device), zero_point)
        assert row_scale[1:].isnan().all()
        assert not q[1:].any()


@FUNCTIONS
@DTYPES
@pytest.mark.parametrize("K", [1000, 1025, 3000])
def test_long_rows_with_a_zero_point(
    K: int, dtype: torch.dtype, function: Quantize, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "plans", PlanCache())
    monkeypatch.setattr(quantize, "max_row_bytes", lambda limits: 1000 * dtype.itemsize)
    monkeypatch.setattr(quantize, "LONG_ROW_BLOCK", 1024)
    x = torch.randn(3, K, device=device).to(dtype)
    x[2, -1] = torch.nan
    assert_equals_reference(
        function, x, torch.tensor(0.01, device=device), torch.tensor(99, dtype=torch.int8, device=device)
    )


def test_zero_points_that_are_refused(device: torch.device) -> None:
    x, scale = torch.randn(3, 8, device=device), torch.tensor(0.02, device=device)
    zero_point = torch.tensor(3, dtype=torch.int8, device=device)
    for arguments, message in (
        ((x, None, zero_point), "zero_point needs a scale"),
        ((x, scale, zero_point.int()), r"zero_point is torch.int32 \[\]; it must be one int8 number"),
        ((x, scale, zero_point.expand(3)), r"zero_point is torch.int8 \[3\]"),
        ((x, scale, zero_point.to("meta")), "x is on .* but zero_point is on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            dispatch.quantize_rows(*arguments)


FP8_FUNCTIONS = pytest.mark.parametrize("kernels", [quantize, dispatch], ids=["kernel", "user"])


@FP8_FUNCTIONS
@DTYPES
@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (17, 53), (2, 3, 130), (70,), (2, 1200)])
def test_fp8(shape: tuple[int, ...], dtype: torch.dtype, kernels: Any, device: torch.device) -> None:
    x = (torch.randn(shape, device=device) * 3).to(dtype)
    if x.numel():
        x.view(-1, shape[-1])[0, 0] = torch.nan
        x.view(-1, shape[-1])[-1, -1] = 1e-40  # the product of which with the scale is beyond float32
    for scale in (None, torch.tensor(0.004, device=device)):
        q, row_scale = kernels.quantize_rows(x, scale, dtype=torch.float8_e4m3fn)
        wanted_q, wanted_scale = quantize_rows_reference(x, scale, dtype=torch.float8_e4m3fn)
        assert q.dtype == torch.float8_e4m3fn
        assert q.is_contiguous()
        assert torch.equal(row_scale.nan_to_num(-1.0), wanted_scale.nan_to_num(-1.0))
        assert torch.equal(q.view(torch.int8), wanted_q.view(torch.int8))
    q, scales = kernels.quantize_groups(x)
    wanted_q, wanted_scale = quantize_groups_reference(x)
    assert q.shape == x.shape
    assert scales.shape == (*shape[:-1], -(-shape[-1] // 128))
    assert torch.equal(scales.nan_to_num(-1.0), wanted_scale.nan_to_num(-1.0))
    assert torch.equal(q.view(torch.int8), wanted_q.view(torch.int8))


@FP8_FUNCTIONS
def test_fp8_of_every_value(kernels: Any, device: torch.device) -> None:
    """Every bfloat16 that is rounded to a value of e4m3, beside its row's largest, with halves between neighbours."""
    x = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).to(device)
    x = x[(x >= 1e-3) & (x <= 448)].float()
    for amax in (448.0, 440.0, 300.5):
        rows = torch.stack([x.clamp(max=amax), -x.clamp(max=amax), x * 2.0**-120])
        rows[:2, -1] = amax
        wanted = quantize_rows_reference(rows, dtype=torch.float8_e4m3fn)[0]
        found = kernels.quantize_rows(rows, dtype=torch.float8_e4m3fn)[0]
        assert torch.equal(found.view(torch.int8), wanted.view(torch.int8))
        wanted = quantize_groups_reference(rows)[0]
        assert torch.equal(kernels.quantize_groups(rows)[0].view(torch.int8), wanted.view(torch.int8))


def test_what_is_no_format_of_operands(device: torch.device) -> None:
    x, zero = torch.randn(2, 4, device=device), torch.tensor(0, dtype=torch.int8, device=device)
    with pytest.raises(TypeError, match=r"dtype is torch\.float8_e5m2; quantize_rows returns int8, float8_e4m3fn"):
        dispatch.quantize_rows(x, dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"zero_point is for int8; dtype is torch\.float8_e4m3fn"):
        dispatch.quantize_rows(x, x[0, 0].abs(), zero, torch.float8_e4m3fn)
