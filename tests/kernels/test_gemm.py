"""``scaled_mm``, ``int_mm`` and ``matmul``: the Triton kernels against the specification in ``reference.py``.

``config=`` asks for the kernel itself, also on the CPU (interpreted). Without it a CPU runs ``cpu.py`` and a GPU the
config that ``select_config`` takes; ``DISPATCHED`` tests both ways.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qgemm.kernels import GemmConfig, cpu, int_mm, matmul, scaled_mm
from qgemm.kernels.gemm import launcher as gemm
from qgemm.kernels.gemm.config import CANDIDATES, Schedule, is_valid
from qgemm.kernels.gemm.problem import Problem
from qgemm.kernels.launch.device import DeviceLimits, device_limits
from qgemm.kernels.reference import (
    block_scaled_mm_reference,
    int_mm_reference,
    matmul_reference,
    scaled_mm_reference,
)
from qgemm.numerics.formats import INT8
from tests.kernels.devices import A100, B200, MI300X

Check = Callable[[Tensor, Tensor, Tensor], None]

SMALL = GemmConfig(16, 32, 32, num_warps=4, num_stages=2, group_size_m=2)
STREAMK = GemmConfig(16, 32, 32, num_warps=4, num_stages=2, group_size_m=2, schedule="streamk")
TILES = replace(SMALL, schedule="tiles")
KERNELS = pytest.mark.parametrize("config", [SMALL, TILES, STREAMK], ids=["persistent", "tiles", "streamk"])
DISPATCHED = pytest.mark.parametrize(
    "config", [SMALL, TILES, STREAMK, None], ids=["persistent", "tiles", "streamk", "default"]
)

SHAPES = [
    (0, 40, 64),  # no rows
    (33, 0, 64),  # no columns
    (33, 40, 0),  # an empty sum
    (0, 0, 0),
    (1, 1, 1),  # torch._int_mm on a GPU refuses M <= 16, and K or N that 8 doesn't divide
    (33, 40, 1),
    *((m, 40, 64) for m in range(1, 18)),  # every batch size up to one more than a tile
    (32, 64, 96),  # the blocks divide everything
    (37, 53, 101),  # primes
    (47, 31, 129),  # one element beyond, one short of, whole blocks
    (3, 7, 700),  # one tile and a long sum: Stream-K's case
]


def int8(*shape: int, device: torch.device) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, device=device)


def exact_scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None) -> Tensor:
    out = (a.double() @ b.double()) * a_scale.double().reshape(-1, 1) * b_scale.double().reshape(1, -1)
    return out if bias is None else out + bias.double()


@pytest.mark.slow(quick=["37-53-101"])
@DISPATCHED
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_int_mm(M: int, N: int, K: int, config: GemmConfig | None, device: torch.device) -> None:
    a, b = int8(M, K, device=device), int8(N, K, device=device).t()
    out = int_mm(a, b, config=config)
    assert out.dtype == torch.int32
    assert torch.equal(out, int_mm_reference(a, b))


@pytest.mark.slow(quick=["37-53-101"])
@DISPATCHED
@pytest.mark.parametrize(("M", "N", "K"), [shape for shape in SHAPES if shape[0] not in range(2, 16)])
def test_scaled_mm(
    M: int, N: int, K: int, config: GemmConfig | None, device: torch.device, assert_as_accurate: Check
) -> None:
    a, b = int8(M, K, device=device), int8(N, K, device=device).t()
    a_scale, b_scale = torch.rand(M, device=device), torch.rand(N, device=device)
    bias = torch.randn(N, device=device) * 100
    out = scaled_mm(a, b, a_scale, b_scale, bias, torch.float32, config=config)
    reference = scaled_mm_reference(a, b, a_scale, b_scale, bias, torch.float32)
    assert_as_accurate(out, reference, exact_scaled_mm(a, b, a_scale, b_scale, bias))


@pytest.mark.slow(quick=["tiles"])
@KERNELS
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias_dtype", [None, torch.float16, torch.bfloat16, torch.float32])
def test_output_and_bias_dtypes(
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    config: GemmConfig,
    device: torch.device,
    assert_as_accurate: Check,
) -> None:
    a, b = int8(18, 70, device=device), int8(70, 40, device=device)
    a_scale, b_scale = torch.rand(18, device=device) / 127, torch.rand(40, device=device) / 127
    bias = None if bias_dtype is None else torch.randn(40, device=device).to(bias_dtype)
    out = scaled_mm(a, b, a_scale, b_scale, bias, out_dtype, config=config)
    reference = scaled_mm_reference(a, b, a_scale, b_scale, bias, out_dtype)
    assert_as_accurate(out, reference, exact_scaled_mm(a, b, a_scale, b_scale, bias))


@pytest.mark.slow(quick=["tiles"])
@DISPATCHED
@pytest.mark.parametrize("a_shape", [(), (1,), (18,)])
@pytest.mark.parametrize("b_shape", [(), (1,), (40,)])
def test_scalar_scales(
    a_shape: tuple[int, ...],
    b_shape: tuple[int, ...],
    config: GemmConfig | None,
    device: torch.device,
    assert_as_accurate: Check,
) -> None:
    a, b = int8(18, 70, device=device), int8(70, 40, device=device)
    a_scale, b_scale = torch.rand(a_shape, device=device), torch.rand(b_shape, device=device)
    out = scaled_mm(a, b, a_scale, b_scale, None, torch.float32, config=config)
    reference = scaled_mm_reference(a, b, a_scale, b_scale, None, torch.float32)
    assert_as_accurate(out, reference, exact_scaled_mm(a, b, a_scale, b_scale, None))


@pytest.mark.slow(quick=["tiles", "default"])
@DISPATCHED
def test_strided_scales_and_bias(config: GemmConfig | None, device: torch.device) -> None:
    a, b = int8(18, 70, device=device), int8(70, 40, device=device)
    a_scale = torch.rand(18, 3, device=device)[:, 1]
    b_scale = torch.rand(40, 2, device=device)[:, 1]
    bias = torch.rand(40, 2, device=device)[:, 1]
    out = scaled_mm(a, b, a_scale, b_scale, bias, torch.float32, config=config)
    whole = [v.contiguous() for v in (a_scale, b_scale, bias)]
    assert torch.equal(out, scaled_mm(a, b, *whole, torch.float32, config=config))
    # One scale for all, expanded by the caller: stride 0.
    one = torch.rand((), device=device)
    out = scaled_mm(a, b, one.expand(18), b_scale, None, torch.float32, config=config)
    assert torch.equal(out, scaled_mm(a, b, one, b_scale, None, torch.float32, config=config))


@pytest.mark.slow(quick=["tiles-dtype1", "default-dtype1"])
@DISPATCHED
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float16, marks=pytest.mark.complete), torch.bfloat16, torch.float32]
)
def test_a_residual_is_added_to_the_rounded_product(
    dtype: torch.dtype, config: GemmConfig | None, device: torch.device
) -> None:
    a, b = int8(18, 70, device=device), int8(70, 40, device=device)
    scales = torch.rand(18, device=device) / 127, torch.rand(40, device=device) / 127
    # The products are of the size of the residual's last bit, so that it matters what is rounded when.
    bias, residual = torch.randn(40, device=device), torch.randn(18, 40, device=device).mul(100).to(dtype)
    product = scaled_mm(a, b, *scales, bias, dtype, config=config)
    wide = torch.full((20, 60), torch.nan, device=device, dtype=dtype)
    wide[1:19, 7:47] = residual
    for same in (residual, wide[1:19, 7:47], residual.t().contiguous().t(), residual[:1].expand(18, 40)):
        out = scaled_mm(a, b, *scales, bias, dtype, residual=same, config=config)
        assert torch.equal(out, product + same)
        assert torch.equal(out, scaled_mm_reference(a, b, *scales, bias, dtype, same))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.t().contiguous().t(),
    "slice of rows and columns": lambda t: torch.nn.functional.pad(t, (3, 5, 2, 4), value=99)[2:-4, 3:-5],
    "every second column": lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
    "odd start": lambda t: torch.nn.functional.pad(t.flatten(), (1, 0))[1:].view(t.shape),  # off every alignment
}


@pytest.mark.slow(quick=["tiles"])
@DISPATCHED
@pytest.mark.parametrize("a_view", VIEWS)
def test_any_strides(a_view: str, config: GemmConfig | None, device: torch.device) -> None:
    a, b = int8(18, 70, device=device), int8(70, 20, device=device)
    for b_view in VIEWS.values():
        out = int_mm(VIEWS[a_view](a), b_view(b), config=config)
        assert torch.equal(out, int_mm_reference(a, b))


@DISPATCHED
def test_expanded_operands(config: GemmConfig | None, device: torch.device) -> None:
    a = int8(1, 70, device=device).expand(18, 70)
    b = int8(70, 1, device=device).expand(70, 40)
    assert torch.equal(int_mm(a, b, config=config), int_mm_reference(a, b))


@pytest.mark.slow(quick=["tiles"])
@DISPATCHED
def test_largest_sums(config: GemmConfig | None, device: torch.device) -> None:
    # The longest K of all, at int8's extreme: 131,071 * 128 * 128 is 2^31 - 2^14.
    config = config and GemmConfig(16, 16, 4096, num_warps=4, num_stages=1, schedule=config.schedule)
    a = torch.full((2, INT8.max_k), -128, dtype=torch.int8, device=device)
    b = torch.full((INT8.max_k, 3), -128, dtype=torch.int8, device=device)
    out = int_mm(a, b, config=config)
    assert torch.equal(out, torch.full((2, 3), 2**31 - 2**14, dtype=torch.int32, device=device))


# Hopper's kernel has tests of its own, in test_gemm_hopper.py.
@pytest.mark.slow
@pytest.mark.parametrize("config", [config for config in CANDIDATES if config.schedule != "specialized"], ids=str)
@pytest.mark.parametrize("ragged", [False, True])
def test_every_candidate_is_exact(config: GemmConfig, ragged: bool, device: torch.device) -> None:
    if not is_valid(config, 1, device_limits(device)):
        pytest.skip(f"{device} has no room for {config}")
    M, N = (130, 70) if ragged else (config.block_m, 2 * config.block_n)
    K = config.block_k + 37 if ragged else 2 * config.block_k
    a, b = int8(M, K, device=device), int8(N, K, device=device).t()
    assert torch.equal(int_mm(a, b, config=config), int_mm_reference(a, b))


# In one dtype and the other; in both with --complete.
@pytest.mark.slow(quick=["torch.float32"])
@pytest.mark.parametrize(
    ("M", "N", "K", "out_dtype"),
    [
        pytest.param(*size, dtype, marks=[] if (number + place) % 2 else [pytest.mark.complete])
        for number, size in enumerate([(33, 50, 70), (3, 7, 700), (64, 96, 33), (90, 70, 32)])
        for place, dtype in enumerate((torch.float32, torch.bfloat16))
    ],
    ids=str,
)
def test_streamk_gives_the_bits_of_persistent(
    M: int, N: int, K: int, out_dtype: torch.dtype, device: torch.device
) -> None:
    a, b = int8(M, K, device=device), int8(N, K, device=device).t()
    a_scale, b_scale = torch.rand(M, device=device), torch.rand(N, device=device)
    bias = torch.randn(N, device=device)
    results = [scaled_mm(a, b, a_scale, b_scale, bias, out_dtype, config=config) for config in (SMALL, STREAMK)]
    assert torch.equal(*results)


@pytest.mark.slow(quick=["tiles"])
@DISPATCHED
def test_same_inputs_same_bits(config: GemmConfig | None, device: torch.device) -> None:
    a, b = int8(17, 300, device=device), int8(33, 300, device=device).t()
    a_scale, b_scale = torch.rand(17, device=device), torch.rand(33, device=device)
    first = scaled_mm(a, b, a_scale, b_scale, config=config)
    for _ in range(3):
        assert torch.equal(scaled_mm(a, b, a_scale, b_scale, config=config), first)


@DISPATCHED
def test_rows_are_independent(config: GemmConfig | None, device: torch.device) -> None:
    # A NaN scale makes its own row NaN and touches no other.
    a, b = int8(18, 70, device=device), int8(70, 40, device=device)
    a_scale, b_scale = torch.rand(18, device=device), torch.rand(40, device=device)
    clean = scaled_mm(a, b, a_scale, b_scale, config=config)
    a_scale[5] = torch.nan
    out = scaled_mm(a, b, a_scale, b_scale, config=config)
    assert out[5].isnan().all()
    keep = torch.arange(18, device=device) != 5
    assert torch.equal(out[keep], clean[keep])


@DISPATCHED
def test_output_is_written_whole_and_alone(config: GemmConfig | None, device: torch.device) -> None:
    # A zero row gives exactly the bias.
    a, b = int8(18, 70, device=device), int8(70, 40, device=device)
    a[3] = 0
    bias = torch.randn(40, device=device)
    out = scaled_mm(
        a, b, torch.rand(18, device=device), torch.rand(40, device=device), bias, torch.float32, config=config
    )
    assert torch.equal(out[3], bias)
    assert out.is_contiguous()


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
MATMUL = pytest.mark.parametrize("config", [SMALL, None], ids=["persistent", "default"])


def skip_without_fp8(dtype: torch.dtype, device: torch.device) -> None:
    if dtype.itemsize == 1 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("no fp8 before sm_89")


@MATMUL
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("M", "N", "K"), [(0, 5, 7), (5, 0, 7), (5, 7, 0), (1, 1, 1), (17, 53, 101), (32, 64, 64)])
def test_matmul(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    config: GemmConfig | None,
    device: torch.device,
    assert_as_accurate: Check,
) -> None:
    skip_without_fp8(dtype, device)
    a, b = torch.randn(M, K, device=device).to(dtype), torch.randn(K, N, device=device).to(dtype)
    bias = torch.randn(N, device=device)
    # fp8 sums keep about 14 bits within one tensor core instruction: compare where that doesn't show.
    out_dtype = torch.bfloat16 if dtype.itemsize == 1 else torch.promote_types(dtype, torch.float16)
    out = matmul(a, b, bias, out_dtype=out_dtype, config=config)
    exact = a.double() @ b.double() + bias.double()
    assert_as_accurate(out, matmul_reference(a, b, bias, out_dtype=out_dtype), exact)


@MATMUL
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_matmul_activation(
    activation: str, dtype: torch.dtype, config: GemmConfig | None, device: torch.device, assert_as_accurate: Check
) -> None:
    a, b = torch.randn(18, 32, device=device).to(dtype), torch.randn(32, 40, device=device).to(dtype)
    bias = torch.randn(40, device=device).to(dtype)
    out = matmul(a, b, bias, activation, config=config)
    exact = getattr(torch.nn.functional, activation)(a.double() @ b.double() + bias.double())
    assert_as_accurate(out, matmul_reference(a, b, bias, activation), exact)


@MATMUL
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_matmul_keeps_nan(activation: str | None, config: GemmConfig | None, device: torch.device) -> None:
    a, b = torch.randn(18, 32, device=device), torch.randn(32, 40, device=device)
    a[5, 7] = torch.nan
    out = matmul(a, b, None, activation, config=config)
    assert out[5].isnan().all()
    assert out[torch.arange(18, device=device) != 5].isfinite().all()


@MATMUL
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_matmul_out_dtype(out_dtype: torch.dtype, config: GemmConfig | None, device: torch.device) -> None:
    a, b = torch.ones(18, 32, device=device).half(), torch.ones(32, 40, device=device).half()
    assert matmul(a, b, config=config).dtype == torch.float16
    out = matmul(a, b, out_dtype=out_dtype, config=config)
    assert torch.equal(out, torch.full((18, 40), 32, dtype=out_dtype, device=device))


@pytest.fixture
def fp32_precision() -> Iterator[Callable[[str], None]]:
    """Sets PyTorch's precision of float32 products on a GPU, for one test."""
    matmul_settings = torch.backends.cuda.matmul
    before = matmul_settings.fp32_precision
    yield lambda precision: setattr(matmul_settings, "fp32_precision", precision)
    matmul_settings.fp32_precision = before


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_however_tf32_was_asked_for(
    precision: str, fp32_precision: Callable[[str], None], device: torch.device
) -> None:
    # Once this is set, reading torch.backends.cuda.matmul.allow_tf32 raises, which once broke even int8 products.
    fp32_precision(precision)
    a, b = int8(18, 70, device=device), int8(70, 40, device=device)
    assert torch.equal(int_mm(a, b, config=SMALL), int_mm_reference(a, b))
    x, y = torch.randn(18, 256, device=device), torch.randn(256, 40, device=device)
    out = matmul(x, y, config=SMALL)
    fp32_precision("ieee")
    error = (out.double() - x.double() @ y.double()).abs().max()
    rounds = precision == "tf32" and device.type == "cuda"
    assert error < (0.1 if rounds else 1e-4)
    assert not rounds or error > 1e-4


def test_a_config_that_cannot_run_is_refused(device: torch.device) -> None:
    a, b = int8(16, 16, device=device), int8(16, 16, device=device)
    for config in (
        GemmConfig(24, 32, 32, num_warps=4, num_stages=2),  # no power of 2
        GemmConfig(512, 512, 512, num_warps=4, num_stages=8),  # more shared memory than any device has
    ):
        with pytest.raises(ValueError, match=r"config GemmConfig\(.*can't run torch.int8.*omit it"):
            int_mm(a, b, config=config)
    with pytest.raises(ValueError, match=r"config GemmConfig\(.*can't run torch.float16"):
        matmul(a.half(), b.half(), config=STREAMK)  # float sums depend on their order
    with pytest.raises(ValueError, match=r"config GemmConfig\(.*can't run torch.float8_e4m3fn"):
        matmul(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), config=STREAMK)


def test_beyond_2_31_elements() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: the product itself is large (test_views.py has the offsets alone)")
    device = torch.device("cuda", 0)
    for M, N, K in ((2**16 + 1, 16, 2**15 + 16), (2**15 + 16, 2**16 + 1, 16)):  # M * K, then M * N
        a, b = int8(M, K, device=device), int8(N, K, device=device).t()
        out = int_mm(a, b)
        assert torch.equal(out[-5:], int_mm_reference(a[-5:], b))
        assert torch.equal(out[:5], int_mm_reference(a[:5], b))
        del a, b, out


@pytest.mark.slow(quick=["persistent-out_dtype1"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("schedule", ["tiles", "persistent", "streamk"])
def test_same_bits_as_on_the_cpu(schedule: Schedule, out_dtype: torch.dtype, device: torch.device) -> None:
    # A fused multiply-add in the epilogue would round once where the CPU rounds twice.
    x, weight, bias = torch.randn(37, 200), torch.randn(50, 200), torch.randn(50)
    a, a_scale = cpu.quantize_rows(x)
    b, b_scale = cpu.quantize_rows(weight)
    wanted = cpu.scaled_mm(a, b.t(), a_scale, b_scale, bias, out_dtype)
    on_device = [t.to(device) for t in (a, b.t(), a_scale, b_scale, bias)]
    config = GemmConfig(16, 16, 32, num_warps=4, num_stages=2, schedule=schedule)
    assert torch.equal(scaled_mm(*on_device, out_dtype, config=config).cpu(), wanted)


def plan_for(limits: DeviceLimits, config: GemmConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The launch of a product of ``[64, 256] @ [256, 4096]``."""
    monkeypatch.setattr(gemm, "device_limits", lambda device: limits)
    strides = (256, 1, 1, 256, 4096, 1, 1, 1, 0, 1)
    problem = Problem(
        64, 4096, 256, strides, torch.int8, torch.bfloat16, scaled=True, bias_dtype=None, has_residual=False,
        activation=None, allow_tf32=False, device=torch.device("cuda", 0), aligned=True, constant_b=False,
    )  # fmt: skip
    return gemm.make_product(problem, config).launch


def test_programs_are_renumbered_for_chiplets(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GemmConfig(16, 32, 64, num_warps=2, num_stages=2, schedule="tiles")
    names = gemm._gemm_kernel.arg_names
    tiles = 4 * 128
    for limits, grid, persistent in ((A100, tiles, False), (MI300X, 304 * 8, True)):
        launch = plan_for(limits, config, monkeypatch)
        constants = dict(zip(names[-len(launch._rest) :], launch._rest, strict=True))
        assert constants["NUM_XCDS"] == limits.num_xcds
        # Renumbered programs must be as many as there is room for, each with tiles in turn.
        assert constants["PERSISTENT"] == persistent
        assert launch._grid == grid


@pytest.mark.parametrize(("pdl", "hopper", "registers"), [(False, False, None), (True, True, None), (True, False, 255)])
def test_blackwells_assembler_may_take_all_registers(
    pdl: bool, hopper: bool, registers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GemmConfig(64, 64, 64, num_warps=4, num_stages=2)
    limits = replace(B200, pdl=pdl, hopper=hopper)
    assert plan_for(limits, config, monkeypatch)._options.get("maxnreg") == registers


# One block, blocks with a short last one in all dimensions, and few rows.
@pytest.mark.parametrize(("M", "N", "K"), [(16, 64, 128), (17, 133, 300), (1, 40, 70)])
@pytest.mark.parametrize("blocks", [False, True])
def test_fp8_with_scales(M: int, N: int, K: int, blocks: bool, device: torch.device) -> None:
    a, b = ((torch.randn(rows, K, device=device) * 50).to(torch.float8_e4m3fn) for rows in (M, N))
    bias = torch.randn(N, device=device)
    shapes = ((M, -(-K // 128)), (-(-N // 128), -(-K // 128))) if blocks else ((M,), (N,))
    scales = [torch.rand(shape, device=device) / 100 for shape in shapes]
    out = gemm.scaled_mm(a, b.t(), *scales, bias, torch.float32)
    if blocks:
        wanted = block_scaled_mm_reference(a, b, *scales, bias, torch.float32)
    else:
        wanted = scaled_mm_reference(a, b.t(), *scales, bias, torch.float32)
    assert (out - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_every_e4m3_is_decoded(device: torch.device) -> None:
    """Or multiplied, where a device does that: by a matrix with a 1 in each row, the values themselves come out."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    values = codes[~codes.view(torch.float8_e4m3fn).float().isnan()].view(torch.float8_e4m3fn).view(1, -1)
    K, one = values.shape[1], torch.ones((), device=device)
    out = gemm.scaled_mm(values, torch.eye(K, device=device).to(values.dtype), one, one, None, torch.float32)
    assert torch.equal(out, values.float())
