"""int4 weights by int8 rows: exact sums of groups, on the CPU, by the kernel for every GPU, and by Hopper's.

Without a GPU the kernel for every GPU runs in Triton's interpreter, on CPU tensors. Hopper's are compiled everywhere
(``test_compile.py``) and run on such a GPU only.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from qgemm.kernels.launch import memory
from qgemm.kernels.launch.plans import PlanCache
from qgemm.kernels.reference import int4_int8_linear_reference, quantize_rows_reference
from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.kernels.weight_only import dispatch, int8_cpu, int8_launcher
from qgemm.kernels.weight_only.int8_config import MAX_FEW_ROWS, MAX_STAGES, Int8Config, select_config
from qgemm.kernels.weight_only.int8_launcher import MAX_K, weight_only_linear
from qgemm.numerics.formats import INT4, INT8
from qgemm.numerics.groups import MAX_STEPS, spread
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import HALF, pack_codes, unpack_codes
from tests.kernels.devices import H200
from tests.kernels.test_gemm_hopper import on_hopper
from tests.kernels.test_weight_only_config import shared_well

Compute = Callable[..., Tensor]
COMPUTE = pytest.mark.parametrize("compute", [int8_cpu.weight_only_linear, weight_only_linear], ids=["cpu", "gpu"])


@pytest.fixture
def device(device: torch.device, request: pytest.FixtureRequest) -> torch.device:
    """Where the tensors of a test are."""
    cpu = request.node.callspec.params.get("compute") is int8_cpu.weight_only_linear
    return torch.device("cpu") if cpu else device


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_launcher, "plans", PlanCache())
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
        monkeypatch.setattr(memory, "_on_stream", lambda device, stream: contextlib.nullcontext())
        monkeypatch.setattr(memory, "empty", lambda shape, strides, dtype: torch.empty(shape, dtype=dtype))


def make(
    N: int,
    K: int,
    size: int,
    device: torch.device,
    asymmetric: bool = False,
    exact: bool = False,
    in_steps: bool = False,
) -> ScaledWeight:
    """Of random values. ``exact``: with scales that round nothing, and no bias. ``in_steps``: that are multiples."""
    q = torch.randint(-8, 8, (N, K), dtype=torch.int8, device=device)
    shape = N, cdiv(K, size)
    scale = torch.randn(shape, device=device) / 50 if not exact else 2.0 ** torch.randint(-2, 2, shape, device=device)
    step = None
    if in_steps:
        step = 2.0 ** torch.randint(-2, 2, (N, 1), device=device)
        step = step if exact else step * torch.randint(8, 16, (N, 1), device=device) / 500
        step = step.bfloat16().float()
        scale, step = torch.randint(1, 17, shape, device=device) * step, step.flatten()
    zero_point = torch.randint(-8, 9, shape, dtype=torch.int8, device=device) if asymmetric else None
    bias = None if exact else torch.randn(N, device=device).bfloat16()
    return ScaledWeight(
        pack_codes(INT4.to_codes(q)), scale.bfloat16(), zero_point, None, None, bias, K, "int4", size, True, step
    )


def ternary(M: int, K: int, device: torch.device) -> Tensor:
    """Rows whose quantized values they are themselves: -1, 0 and 1, and 127 once."""
    x = torch.randint(-1, 2, (M, K), device=device).float()
    rows = torch.arange(M, device=device)
    x[rows, rows * 37 % K] = 127
    return x


# Groups of powers of 2 within a half of a block, of none, of several halves; a tail; a whole row, of no whole block; of
# no whole steps, across halves, and of less than one.
SIZES = [(256, 128), (320, 32), (192, 64), (160, 16), (336, 48), (512, 256), (300, 128), (40, 40), (301, 301)]
SIZES += [(300, 100), (272, 24), (150, 10), (261, 1)]


@pytest.mark.slow(quick=["256-128"])
@COMPUTE
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(("K", "size"), SIZES)
def test_sums_are_exact(compute: Compute, K: int, size: int, asymmetric: bool, device: torch.device) -> None:
    layer = make(20, K, size, device, asymmetric, exact=True)
    for M in (1, 5, 17):
        x = ternary(M, K, device)
        assert torch.equal(compute(x, layer), int4_int8_linear_reference(x, layer))


@pytest.mark.slow(quick=["dtype1"])
@COMPUTE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_as_accurate_as_the_reference(
    compute: Compute, dtype: torch.dtype, device: torch.device, assert_as_accurate: Any
) -> None:
    for asymmetric in (False, True):
        layer = make(70, 384, 128, device, asymmetric)
        x = torch.randn(3, 384, device=device).to(dtype)
        reference = int4_int8_linear_reference(x, layer)
        assert_as_accurate(compute(x, layer), reference, exact_product(x, layer))


def exact_product(x: Tensor, layer: ScaledWeight) -> Tensor:
    """In float64, of the quantized rows."""
    q, row_scale = quantize_rows_reference(x)
    values = INT4.decode(unpack_codes(layer.values, layer.in_features)).double()
    if layer.zero_point is not None:
        values -= spread(layer.zero_point, layer.group_size, layer.in_features)
    values *= spread(layer.scale.double(), layer.group_size, layer.in_features)
    out = q.double() @ values.t() * row_scale.double()[..., None]
    return out if layer.bias is None else out + layer.bias.double()


@COMPUTE
def test_shapes_and_strides(compute: Compute, device: torch.device) -> None:
    layer = make(24, 256, 128, device)
    for x in (
        torch.randn(256, device=device),
        torch.randn(2, 3, 256, device=device),
        torch.randn(256, 4, device=device).t(),
        torch.randn(4, 512, device=device)[:, ::2],
        torch.randn(0, 256, device=device),
        torch.randn(2, 0, 256, device=device),
    ):
        out = compute(x, layer)
        assert out.shape == (*x.shape[:-1], 24)
        assert torch.allclose(out, int4_int8_linear_reference(x, layer), rtol=1e-5, atol=1e-5)


@COMPUTE
def test_no_columns_give_the_bias(compute: Compute, device: torch.device) -> None:
    layer = make(24, 0, 128, device)
    assert torch.equal(compute(torch.randn(3, 0, device=device), layer), layer.bias.float().expand(3, 24))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_residual_is_added_to_the_rounded_product(dtype: torch.dtype, device: torch.device) -> None:
    layer, x = make(24, 256, 128, device), torch.randn(2, 3, 256, device=device).to(dtype)
    product, wide = weight_only_linear(x, layer), torch.randn(2, 3, 40, device=device).to(dtype)
    for residual in (wide[..., :24].contiguous(), wide[..., 3:27], wide[:1, :1, :1].expand(2, 3, 24)):
        before = residual.clone()
        for _ in range(2):
            assert torch.equal(weight_only_linear(x, layer, residual), product + residual)
        assert torch.equal(residual, before)
    assert torch.equal(weight_only_linear(x, layer), product)


@COMPUTE
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_with_nan_or_inf_is_one_of_nan(compute: Compute, value: float, device: torch.device) -> None:
    layer = make(24, 256, 128, device)
    x = torch.randn(3, 256, device=device)
    x[1, 7] = value
    out = compute(x, layer)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def extreme(kind: str, K: int, size: int, device: torch.device) -> ScaledWeight:
    """Rows of the largest differences of either sign; of ``steps``, all scales are the largest multiple of one."""
    N = 264 if device.type == "cuda" else 8
    shape = N, cdiv(K, size)
    low = (torch.arange(N, device=device) % 2 == 0)[:, None]
    q = torch.where(low, -8, 7).to(torch.int8).repeat(1, K)
    if HALF < size < K:
        q[:, ::16] -= q[:, ::16].sign()  # sums of 16 products are odd
    zero_point = torch.where(low, 8, -8).to(torch.int8).expand(shape).contiguous() if kind == "asymmetric" else None
    scale = torch.full(shape, MAX_STEPS if kind == "steps" else 1, dtype=torch.bfloat16, device=device)
    step = torch.ones(N, device=device) if kind == "steps" else None
    values = pack_codes(INT4.to_codes(q))
    return ScaledWeight(values, scale, zero_point, None, None, None, K, "int4", size, True, step)


def extreme_rows(M: int, layer: ScaledWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """All 127 or -127, or half of them each."""
    K = layer.in_features
    x = torch.full((M, K), 127, dtype=dtype, device=layer.values.device)
    x[1::3], x[2::3, K // 2 :] = -127, -127
    if layer.group_size == K:
        x[:, 0] = 1  # sums are no round numbers, which float32 would hold
    return x


def exact_sums(x: Tensor, layer: ScaledWeight) -> Tensor:
    """The products by int64, where quantized rows are ``x`` itself: of groups, then added in float32."""
    q = INT4.decode(unpack_codes(layer.values, layer.in_features)[:2]).long()  # all others are as these
    if layer.zero_point is not None:
        q -= spread(layer.zero_point[:2].long(), layer.group_size, layer.in_features)
    total = torch.zeros(3, 2, device=x.device)
    products = x[:3, None].long() * q
    for sums in products.split(layer.group_size, dim=-1):
        total[: len(sums)] += sums.sum(-1).float() * layer.scale.flatten()[0].float()
    return total[torch.arange(len(x), device=x.device) % 3].repeat(1, len(layer.values) // 2).to(x.dtype)


# Whole rows of the most values that a layer may have, or that Hopper's kernels take; groups of no multiple of 32.
EXTREMES = [
    pytest.param("symmetric", INT8.max_k, INT8.max_k, marks=pytest.mark.complete),
    ("asymmetric", MAX_K, MAX_K),
    ("asymmetric", 1024, 128),
    ("steps", 1024, 128),
    pytest.param("symmetric", 20_832, 20_816, marks=pytest.mark.complete),
    ("asymmetric", 11_232, 11_216),
]


@pytest.mark.slow(quick=["steps-1024-128"])
@COMPUTE
@pytest.mark.parametrize(("kind", "K", "size"), EXTREMES)
def test_the_largest_sums(compute: Compute, kind: str, K: int, size: int, device: torch.device) -> None:
    layer = extreme(kind, K, size, device)
    x = extreme_rows(3, layer)
    assert torch.equal(compute(x, layer), exact_sums(x, layer))


def test_a_sum_that_int32_may_not_hold_is_refused() -> None:
    # Of -16 times 127, 16 more than a million are beyond -2^31.
    K = 1_056_848
    layer = extreme("asymmetric", K, K, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"K is 1056848; int32 holds sums of int8 products up to K = 131071"):
        dispatch.weight_only_linear(extreme_rows(1, layer), layer)
    layer = extreme("asymmetric", K, INT8.max_k // 16 * 16, torch.device("cpu"))
    assert torch.equal(
        dispatch.weight_only_linear(extreme_rows(1, layer), layer), exact_sums(extreme_rows(1, layer), layer)
    )


# Of one row; few rows, whose x fits in shared memory or not; partial sums; whole rows and groups; short sums.
LLAMA = [(4096, 4096), (28_672, 4096), (4096, 14_336), (57_344, 8192), (8192, 28_672), (512, 128)]


@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize("M", [1, 8, 16, 17, 64, 65, 1024, 8192])
def test_a_config_fits(M: int, group: int) -> None:
    for N, K in LLAMA:
        config = select_config(M, N, K, group, H200)
        assert not config.multiplies
        assert config.shared_memory() <= H200.shared_memory
        assert (config.warps > 0) == (M <= MAX_FEW_ROWS)
        assert config.cols >= min(M, MAX_FEW_ROWS)
        shared_well(config, config.tiles(M, N), H200.num_sms, cdiv(K, 256))
        assert not config.shared or config.splits == 1 or 512 * config.parts <= K, "each group of warps has a block"
        assert (2 if config.cols == 256 else 3) <= config.stages <= MAX_STAGES


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("M", [16, 64, 65, 1024, 8192])
def test_values_of_many_rows_are_multiplied_by_scales_in_steps(M: int, group: int) -> None:
    for N, K in LLAMA:
        config = select_config(M, N, K, group, H200, has_steps=True)
        assert config.multiplies == (M > 64)
        assert config.shared_memory() <= H200.shared_memory
        assert config == select_config(M, N, K, group, H200) or M > 64


def test_programs_share_the_last_tiles() -> None:
    few = select_config(64, 4096, 14_336, 128, H200)
    assert few.shared == few.tiles(64, 4096)
    # 192 tiles of 256 rows of x, of which 60 are for a second round.
    some = select_config(1024, 6144, 4096, 128, H200, has_steps=True)
    assert (some.cols, some.shared, some.sharers) == (256, 60, 120)
    assert not select_config(4096, 4096, 14_336, 128, H200).shared
    assert not select_config(64, 4096, 14_336, 128, H200, may_share=False).shared


# All of one kind to the compiler: neither rows nor groups are multiples of 16.
HOPPER_SIZES = [(264, 1024), (1000, 1152), (2056, 1280)]


class Tile(NamedTuple):
    """A config for ``M`` rows; ``sharing``: "all" tiles by twice as many programs, or the "last" two by three."""

    M: int
    config: Int8Config
    sharing: str = ""

    def config_for(self, N: int) -> Int8Config:
        tiles = self.config.tiles(self.M, N)
        if self.sharing == "last" and tiles >= 5:
            return replace(self.config, shared=2, sharers=3)
        return replace(self.config, shared=tiles, sharers=2 * tiles) if self.sharing else self.config


FEW_CONFIGS = [
    Tile(1, Int8Config(32, 8, 4, warps=8)),
    Tile(5, Int8Config(32, 8, 4, warps=4)),
    Tile(16, Int8Config(64, 16, 3, warps=4)),
    Tile(13, Int8Config(32, 16, 3, warps=8)),
]
# Each with all rows of a tile for both groups of warps, half of them, partial sums.
CONFIGS = [
    *FEW_CONFIGS,
    Tile(32, Int8Config(128, 32, 5)),
    Tile(40, Int8Config(64, 64, 5, splits=2)),
    Tile(64, Int8Config(64, 64, 4, splits=2), "all"),
    Tile(100, Int8Config(128, 64, 4), "all"),
    Tile(600, Int8Config(128, 128, 4, pieces=2), "last"),
]
WHOLE_ROWS = [
    Tile(130, Int8Config(256, 64, 4, consumers=4)),
    Tile(520, Int8Config(128, 256, 2, pieces=2, x_slots=5), "last"),
    Tile(256, Int8Config(128, 128, 4)),
    Tile(300, Int8Config(256, 128, 3, pieces=2)),
]
STEPS = [
    Tile(70, Int8Config(64, 64, 5, splits=2, multiplies=True)),
    Tile(100, Int8Config(128, 64, 4, multiplies=True), "all"),
    Tile(256, Int8Config(128, 128, 4, multiplies=True), "last"),
    Tile(300, Int8Config(128, 256, 2, pieces=2, multiplies=True, x_slots=5), "last"),
]
STEPS_OF_128 = [*STEPS, Tile(130, Int8Config(256, 64, 4, consumers=4, multiplies=True))]
SMALL_GROUPS = [
    *FEW_CONFIGS[1::2],
    Tile(40, Int8Config(64, 64, 5, splits=2)),
    Tile(100, Int8Config(128, 64, 4), "all"),
    Tile(100, Int8Config(128, 64, 4), "last"),
]


# By the values of a group, and whether there are zero points; None for scales in steps.
TILES = [
    (128, False, CONFIGS),
    (128, True, CONFIGS[1::2]),
    (0, False, CONFIGS + WHOLE_ROWS),
    (64, True, SMALL_GROUPS),
    (32, False, SMALL_GROUPS),
    (128, None, STEPS_OF_128),
    (64, None, STEPS),
    (32, None, STEPS),
]


# A test for each tile: compiling takes long, and processes share tests.
@on_hopper
@pytest.mark.parametrize(("size", "asymmetric", "tile"), [(*kind, tile) for *kind, tiles in TILES for tile in tiles])
def test_sums_of_hopper_s_kernels_are_exact(size: int, asymmetric: bool | None, tile: Tile) -> None:
    """What an assembler makes of registers that ``wgmma`` still reads would show here."""
    device = torch.device("cuda")
    for N, K in HOPPER_SIZES:
        layer = make(N, K, size or K, device, bool(asymmetric), exact=True, in_steps=asymmetric is None)
        M, config = tile.M, tile.config_for(N)
        for x in (ternary(M, K, device), torch.randn(M, K, device=device)):
            x = x.bfloat16()
            out = weight_only_linear(x, layer, None, config)
            assert torch.equal(out, int4_int8_linear_reference(x, layer)), (N, K)
            assert torch.equal(out, weight_only_linear(x, layer, None, config)), "the same every time"
            residual = torch.randn(M, N, device=device).mul(100).bfloat16()
            assert torch.equal(weight_only_linear(x, layer, residual, config), out + residual)


@on_hopper
@pytest.mark.parametrize(
    ("kind", "size", "configs"),
    [
        ("symmetric", MAX_K, CONFIGS + WHOLE_ROWS),
        ("asymmetric", MAX_K, []),
        ("asymmetric", 128, CONFIGS),
        ("steps", 128, STEPS_OF_128),
    ],
)
def test_the_largest_sums_of_hopper_s_kernels(kind: str, size: int, configs: list[Tile]) -> None:
    device = torch.device("cuda")
    layer = extreme(kind, MAX_K, size, device)
    N = layer.values.shape[0]
    chosen: list[tuple[int, Int8Config | None]] = [(1, None), (16, None), (64, None), (300, None)]
    for M, config in chosen + [(tile.M, tile.config_for(N)) for tile in configs]:
        x = extreme_rows(M, layer, torch.bfloat16)
        assert torch.equal(weight_only_linear(x, layer, None, config), exact_sums(x, layer)), (M, config)


@on_hopper
@pytest.mark.parametrize("M", [1, 7, 16, 48, 200])
def test_chosen_configs_in_graphs_and_out(M: int, assert_as_accurate: Any) -> None:
    device = torch.device("cuda")
    for N, K, size in ((4096, 2048, 128), (1024, 4096, 4096), (2048, 4096, 128)):
        layer = make(N, K, size, device, asymmetric=M == 7, in_steps=N == 2048 and M != 7)
        x = torch.randn(M, K, device=device, dtype=torch.bfloat16)
        out = weight_only_linear(x, layer)
        assert_as_accurate(out, int4_int8_linear_reference(x, layer), exact_product(x, layer))
        residual = torch.randn(M, N, device=device, dtype=torch.bfloat16)
        assert torch.equal(weight_only_linear(x, layer, residual), out + residual)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = weight_only_linear(x, layer, residual)
        for _ in range(2):
            captured.fill_(torch.nan)
            graph.replay()
            assert torch.equal(captured, out + residual)
        x[M // 2, 7], others = torch.inf, torch.arange(M, device=device) != M // 2
        graph.replay()
        for wrong, right in ((captured, out + residual), (weight_only_linear(x, layer), out)):
            assert wrong[M // 2].isnan().all()
            assert wrong[others].equal(right[others])


@pytest.mark.parametrize("negative", [lambda x: torch._neg_view(-x), lambda x: torch.complex(x, -x).conj().imag])
def test_negative_views_are_read_by_their_values(
    negative: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(dispatch, "on_gpu", lambda x: True)
    weight, x = make(24, 64, 32, device), torch.randn(3, 64, device=device)
    assert torch.equal(dispatch.weight_only_linear(negative(x), weight), dispatch.weight_only_linear(x, weight))
