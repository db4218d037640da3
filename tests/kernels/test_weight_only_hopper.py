"""Hopper's products with stored weights, compiled, against float64; they run on Hopper only."""

from dataclasses import replace

import pytest
import torch
from numerics.test_groups import stored

from kernels.test_weight_only import before_garbage
from qgemm.kernels.activations import Gates, activated
from qgemm.kernels.dispatch import activate
from qgemm.kernels.launch import memory
from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.plans import PlanCache
from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.kernels.stored_form import StoredForm
from qgemm.kernels.weight_only import float_launcher
from qgemm.kernels.weight_only.config import TILES, FewRowsRing, Tiles
from qgemm.kernels.weight_only.dispatch import weight_only_activated, weight_only_linear
from qgemm.numerics.formats import FORMATS
from qgemm.numerics.groups import SCALE_DTYPES, round_scale, spread, store_scale
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import packed_width
from tests.kernels.devices import H200
from tests.kernels.test_weight_only_config import SHARED_IN_A_RING, WHOLE_AND_SHARED

K, N = 1040, 200  # K: of 16 bytes in any format, and no whole number of blocks
KINDS = {
    "int4": ("int4", 128, "bfloat16"),
    "int4 zero points": ("int4", 128, "float16"),
    "int4 float zeros": ("int4", 128, "bfloat16"),
    "int4 groups of 32": ("int4", 32, "bfloat16"),
    "int4 groups of 32 float zeros": ("int4", 32, "float32"),
    "int4 groups of 16 float zeros": ("int4", 16, "float32"),
    "int4 groups of 64 zero points": ("int4", 64, "bfloat16"),
    "int4 groups of 48": ("int4", 48, "float32"),
    "int4 groups of 384": ("int4", 384, "float32"),
    "int4 float16": ("int4", 128, "float16"),
    "int4 channel": ("int4", K, "bfloat16"),
    "int4 channel zero points": ("int4", K, "bfloat16"),
    "int8 channel": ("int8", K, "float32"),
    "int8 channel float zeros": ("int8", K, "float16"),
    "int8 zero points": ("int8", 128, "bfloat16"),
    "int8 groups of 16": ("int8", 16, "float32"),
    "int8 groups of 64 zero points": ("int8", 64, "float16"),
    "fp8": ("fp8", K, "float32"),
    "mxfp8": ("fp8", 32, "e8m0"),
    "mxfp4": ("fp4", 32, "e8m0"),
    "nvfp4": ("fp4", 16, "e4m3"),
    "nf4": ("nf4", 64, "float32"),
    "bnb-fp4": ("bnb-fp4", 64, "float32"),
}

SMALL_GROUPS = [kind for kind, (_, size, _) in KINDS.items() if size < 128]


def skip_elsewhere(device: torch.device) -> None:
    if device.type != "cuda" or not device_limits(device).hopper:
        pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("M", [1, 7, 16, 17, 100, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products(dtype: torch.dtype, M: int, kind: str, device: torch.device) -> None:
    skip_elsewhere(device)
    check(dtype, M, K, kind, device)


@pytest.mark.parametrize("kind", [kind for kind, (_, size, _) in KINDS.items() if size >= 128])
@pytest.mark.parametrize("M", [1, 7, 16, 30])
@pytest.mark.parametrize(
    ("N", "K"),
    [(200, 256), (520, 2304), (6008, 1536), (8200, 1280), (12000, 512), (17000, 768), (3300, 7168), (4096, 4096)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows_of_whole_blocks(dtype: torch.dtype, N: int, K: int, M: int, kind: str, device: torch.device) -> None:
    """Programs with one tile, with several and with parts of some; steps with fewer blocks than warps."""
    skip_elsewhere(device)
    check(dtype, M, K, kind, device, N=N)


@pytest.mark.parametrize("kind", SMALL_GROUPS)
@pytest.mark.parametrize("M", [1, 7, 16])
@pytest.mark.parametrize(("N", "K"), [(200, 256), (1003, 2304), (4200, 7168), (6003, 1536), (9000, 768), (17000, 768)])
def test_few_rows_by_groups(N: int, K: int, M: int, kind: str, device: torch.device) -> None:
    """Rows of whole blocks, whose scales are copied with them; steps with fewer blocks than warps."""
    skip_elsewhere(device)
    check(torch.bfloat16, M, K, kind, device, N=N)
    check(torch.float16, M, K, kind, device, N=N)


@pytest.mark.parametrize("kind", SMALL_GROUPS)
@pytest.mark.parametrize("M", [30, 50, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_groups_in_tiles(dtype: torch.dtype, M: int, kind: str, device: torch.device) -> None:
    """Rows of scales that are whole numbers of 32 bits, and rows of whole blocks."""
    skip_elsewhere(device)
    check(dtype, M, 1152, kind, device)
    check(dtype, M, 1280, kind, device)


@pytest.mark.parametrize("kind", ["int4", "int8 channel"])
@pytest.mark.parametrize("M", [5, 16, 17, 64, 100, 300])
def test_nan_stays_in_its_row(M: int, kind: str, device: torch.device) -> None:
    skip_elsewhere(device)
    out, _ = check(torch.bfloat16, M, 2048, kind, device, bad_row=3)
    assert out.isnan().any(1).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("kind", ["int4", "int4 zero points", "int8 channel", "int8 zero points"])
@pytest.mark.parametrize(("M", "N", "K"), WHOLE_AND_SHARED)
def test_whole_and_shared_tiles_in_a_call(M: int, N: int, K: int, kind: str, device: torch.device) -> None:
    skip_elsewhere(device)
    check(torch.bfloat16, M, K, kind, device, N=N)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("int4", torch.bfloat16),
        ("int4 float16", torch.float16),
        ("int4 channel", torch.bfloat16),
        ("int4 channel", torch.float16),
        ("int8 channel", torch.bfloat16),
        ("int8 channel", torch.float16),
        ("fp8", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("M", [129, 150, 192, 193, 300, 384])
@pytest.mark.parametrize("sharers", [0, 7, 12])
@pytest.mark.parametrize("columns", [160, 192])
def test_tiles_with_two_accumulators(
    columns: int,
    sharers: int,
    M: int,
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four to six tiles, that are whole or that all programs share."""
    skip_elsewhere(device)
    N = 520 if columns >= M else 200
    whole = next(one for one in TILES[FORMATS[KINDS[kind][0]].bits] if one.columns == columns)
    tile = replace(whole, shared=whole.tiles(M, N) if sharers else 0, sharers=sharers)
    monkeypatch.setattr(float_launcher, "select_tiles", lambda *_: tile)
    monkeypatch.setattr(float_launcher, "plans", PlanCache())
    check(dtype, M, K, kind, device, N=N)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [160, 192, 256])
def test_wide_tiles_of_every_kind(
    columns: int, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of scales that are whole numbers of 32 bits, and rows of whole blocks."""
    skip_elsewhere(device)
    M, N = 300, 520
    form = FORMATS[KINDS[kind][0]]
    whole = next(one for one in TILES[form.bits] if one.columns == columns)
    tile = replace(whole, shared=whole.tiles(M, N), sharers=12)
    monkeypatch.setattr(float_launcher, "select_tiles", lambda *_: tile)
    monkeypatch.setattr(float_launcher, "plans", PlanCache())
    for K in (1152, 1280):
        check(torch.bfloat16, M, K, kind, device, N=N)


def make_layer(
    kind: str, N: int, K: int, device: torch.device, dtype: torch.dtype
) -> tuple[ScaledWeight, torch.Tensor]:
    """A layer with a bias that is as large as products are, and its weight in float64."""
    format, size, scale_dtype = KINDS[kind]
    size = min(size, K) if size < 1040 else K
    form = FORMATS[format]
    values, weight, scale, zero = stored(N, K, size, device, form)
    unit = torch.tensor([1.0, 3.7], device=device) if scale_dtype == "e4m3" else None
    scale = round_scale(scale, scale_dtype, form, unit)
    zero_point = zero if "zero points" in kind else None
    exact = form.to_float(values).double() - (0 if zero_point is None else spread(zero, size, K))
    exact *= spread(scale, size, K).double()
    if "float zeros" in kind:
        zero_point = torch.randn(zero.shape, device=device).to(SCALE_DTYPES[scale_dtype])
        exact += spread(zero_point, size, K)
    bias = (torch.randn(N, device=device) * float(exact.norm()) / N**0.5).to(dtype)
    zero_point = None if zero_point is None else before_garbage(zero_point)
    stored_scale = before_garbage(store_scale(scale, scale_dtype, unit))
    return ScaledWeight(weight, stored_scale, zero_point, unit, None, bias, K, format, size), exact


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 200, 1040), (1, 6002, 1280), (1, 17000, 1040), (5, 70, 1280), (16, 2, 1040)]
)
def test_gates_are_activated(M: int, N: int, K: int, kind: str, device: torch.device) -> None:
    """The same bits as by two kernels, wherever a single row or small groups don't use the ring."""
    skip_elsewhere(device)
    for dtype, gates in ((torch.bfloat16, Gates("silu")), (torch.float16, Gates("gelu", up_first=True))):
        layer, _ = make_layer(kind, N, K, device, dtype)
        x = torch.randn(M, K, device=device).to(dtype)
        out = weight_only_activated(x, layer, gates)
        form = FORMATS[layer.format]
        assert (out is None) == (K == 1280 and layer.group_size >= 128 and (M > 1 or form.bits == 8))
        if out is not None:
            wanted = activated(weight_only_linear(x, layer), gates.activation, True, gates.up_first)
            error = torch.finfo(dtype).eps  # of PyTorch's functions
            torch.testing.assert_close(out, wanted, rtol=2 * error, atol=error)
            assert torch.equal(out, activate(weight_only_linear(x, layer), gates.activation, True, gates.up_first))
        x[0] = torch.nan
        out = weight_only_activated(x, layer, gates)
        assert out is None or (out[0].isnan().all() and (M == 1 or not out[1:].isnan().any()))


def check(
    dtype: torch.dtype, M: int, K: int, kind: str, device: torch.device, bad_row: int | None = None, N: int = N
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product, and what is wanted in float64. Its bias and residual are as large as products are."""
    layer, exact = make_layer(kind, N, K, device, dtype)
    large = float(exact.norm()) / N**0.5
    x, residual = torch.randn(M, K, device=device).to(dtype), (torch.randn(M, N, device=device) * large).to(dtype)
    if bad_row is not None:
        x[bad_row, 5] = torch.nan
    out = weight_only_linear(x, layer, residual)
    wanted = x.double() @ exact.t() + layer.bias.double() + residual.double()
    floats = torch.nn.functional.linear(x, exact.to(dtype), layer.bias) + residual
    good = [row for row in range(M) if row != bad_row]
    assert (out.double() - wanted)[good].abs().max() <= 2 * (floats.double() - wanted)[good].abs().max()
    # The same bits again: programs that share K are added in order.
    assert torch.equal(out[good], weight_only_linear(x, layer, residual)[good])
    return out, wanted


@pytest.mark.parametrize("size", [128, 32])
@pytest.mark.parametrize("M", [3, 40])
def test_scales_may_begin_anywhere(M: int, size: int, device: torch.device) -> None:
    """Two are read together, where they begin at a multiple of 4 bytes, and those of small groups at one of 16."""
    skip_elsewhere(device)
    groups = 1024 // size
    scale = torch.rand(N * groups + 2, device=device).bfloat16()
    values = torch.randint(0, 256, (N, 512), dtype=torch.uint8, device=device)
    x = torch.randn(M, 1024, device=device, dtype=torch.bfloat16)
    outs = []
    for each in (scale[:-2], scale[1:-1], scale[1:-1].clone(), scale[2:], scale[2:].clone()):
        layer = ScaledWeight(values, each.view(N, groups), None, None, None, None, 1024, "int4", size)
        outs.append(weight_only_linear(x, layer).double())
    # Kernels for other addresses may add in another order.
    assert (outs[1] - outs[2]).abs().max() <= 0.01 * outs[1].abs().max()
    assert (outs[3] - outs[4]).abs().max() <= 0.01 * outs[3].abs().max()
    assert (outs[0] - outs[1]).abs().max() > 0.1 * outs[1].abs().max()


def test_up_to_16_rows_are_one_launch(device: torch.device) -> None:
    skip_elsewhere(device)
    weight = torch.zeros(N, 640, dtype=torch.uint8, device=device)
    scale = torch.ones(N, 9, device=device)
    for M in (1, 16):
        x = torch.zeros(M, K, dtype=torch.bfloat16, device=device)
        plan = float_launcher._make_plan(x, weight, scale, None, None, "int4", 128, True, None)
        assert not plan.may_share
        assert plan.made is None


@pytest.mark.parametrize(
    ("M", "dtype", "fused"),
    [(1, torch.bfloat16, True)] + [(M, torch.bfloat16, False) for M in (0, 8, 17, 64)] + [(1, torch.float32, False)],
)
def test_which_gates_one_kernel_activates(
    M: int, dtype: torch.dtype, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any machine: nothing computes."""
    monkeypatch.setattr(float_launcher, "device_limits", lambda device: H200)
    x, weight = torch.zeros(M, 4096, dtype=dtype), torch.zeros(N, 2048, dtype=torch.uint8)
    scale = torch.ones(N, 32, dtype=dtype)
    plan = float_launcher._make_plan(x, weight, scale, None, None, "int4", 128, True, Gates("silu"))
    assert (plan is float_launcher.APART) == (not fused)
    assert plan.shape == ((M, N // 2) if fused else (0, 0))


class Recorder:
    """A launch that keeps its tensors, in place of one that computes."""

    aligned = None

    def __init__(self) -> None:
        self.tensors: tuple[torch.Tensor | None, ...] = ()

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        self.tensors = tensors


@pytest.mark.parametrize("in_ring", [False, True])
@pytest.mark.parametrize(("sharers", "shared"), [(0, 0), (2, 1), (5, 3)])
def test_the_launch_takes_all_that_finishes_tiles(sharers: int, shared: int, in_ring: bool) -> None:
    """Three tiles of which the last are shared. On any machine: nothing computes."""
    M, N, K = (32, 192, 512) if in_ring else (64, 384, 512)
    form, strides = StoredForm("int4", 128), (K, K // 2, K // 128, N)
    if in_ring:
        ring = FewRowsRing(2, 64, 32, 2, 4, 2, shared=shared, sharers=sharers)
        plan = float_launcher.ring_plan(ring, form, M, N, K, strides, torch.bfloat16, H200)
    else:
        tile = Tiles(64, 7, 5, shared=shared, sharers=sharers)
        plan = float_launcher.tiles_plan(tile, form, M, N, K, strides, torch.bfloat16, H200)
    product = Recorder()
    x, bias, residual = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((M, K), (N,), (M, N)))
    weight, scale = torch.zeros(N, K // 2, dtype=torch.uint8), torch.ones(N, K // 128, dtype=torch.bfloat16)
    replace(plan, product=product).run(x, weight, scale, None, None, bias, residual)
    *_, own_bias, own_residual, out, partial, counts = product.tensors
    assert out is not None
    assert out.shape == (M, N)
    assert own_bias is bias
    assert own_residual is residual
    if shared:
        assert partial is not None
        # Of the last program's part of the last tile, and before it.
        assert partial.numel() >= (sharers - 1 + shared - 1 + 1) * N // 3 * M
        assert counts is not None
        assert not counts.any()
    else:
        assert partial is counts is None


# Some tiles of each are shared, as test_weight_only_config.py checks.
@pytest.mark.parametrize(("M", "N", "K"), [*SHARED_IN_A_RING, *WHOLE_AND_SHARED])
def test_counts_are_zeros_again(M: int, N: int, K: int, device: torch.device) -> None:
    """Eagerly and in graphs that take turns, the same bits every time."""
    skip_elsewhere(device)
    weight = torch.randint(0, 256, (N, packed_width(K)), dtype=torch.uint8, device=device)
    scale = torch.rand(N, cdiv(K, 128), device=device).bfloat16()
    layer = ScaledWeight(weight, scale, None, None, None, None, K, "int4", 128)
    x = torch.randn(M, K, device=device, dtype=torch.bfloat16)
    wanted, graphs, outs = weight_only_linear(x, layer), [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append([weight_only_linear(x, layer) for _ in range(3)])
        graphs.append(graph)
    for _ in range(5):
        for graph, several in zip(graphs, outs, strict=True):
            graph.replay()
            assert all(torch.equal(out, wanted) for out in several)
        assert torch.equal(weight_only_linear(x, layer), wanted)
    counts = memory.stream_buffer(torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream, 1)
    assert not counts[: memory.COUNTS_BYTES].any()


@pytest.mark.parametrize(("M", "has_zeros"), [(8, True), (16, True), (33, True), (192, False), (578, True)])
def test_slots_are_written_again_only_when_they_were_read(M: int, has_zeros: bool, device: torch.device) -> None:
    """Long sums of a weight that was written just before, and comes from the cache: TMA fills a slot at once."""
    skip_elsewhere(device)
    N, K = 8192, 14336
    values, scale, zero_point = stored(N, K, 128, device, FORMATS["int8"])[1:]
    x = torch.randn(M, K, device=device, dtype=torch.bfloat16)
    scale, zero_point = scale.bfloat16(), zero_point.to(torch.int8) if has_zeros else None
    first, wrong = None, torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(300):
        copy = torch.empty_like(values).copy_(values)
        torch.cuda.synchronize()  # weights are read while the kernels ahead in the stream may still run
        layer = ScaledWeight(copy, scale, zero_point, None, None, None, K, "int8", 128)
        out = weight_only_linear(x, layer)
        first = out if first is None else first
        wrong += (out != first).any()
    assert not wrong
