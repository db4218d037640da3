"""Grouped products: the reference's bits for groups of every size, and nothing out of bounds for wrong offsets."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from qgemm.kernels import GemmConfig, grouped_mm
from qgemm.kernels.gemm.config import is_valid
from qgemm.kernels.grouped import config as grouped_config
from qgemm.kernels.grouped import launcher as grouped
from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.reference import grouped_mm_reference
from qgemm.numerics.formats import FP8, INT8
from tests.kernels.devices import A100, H200, MI300X

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
SMALL = GemmConfig(16, 32, 64, num_warps=2, num_stages=2, schedule="tiles")
PERSISTENT = GemmConfig(16, 32, 64, num_warps=2, num_stages=2)
SPECIALIZED = [
    grouped_config.HOPPER,
    GemmConfig(64, 128, 128, num_warps=4, num_stages=8, schedule="specialized"),
    GemmConfig(64, 32, 256, num_warps=4, num_stages=7, schedule="specialized"),
]

GROUPS = {
    "ragged": [3, 16, 0, 17, 1, 33],
    "first and last are empty": [0, 0, 20, 0, 5, 0],
    "all rows in one": [0, 0, 50],
    "one group": [19],
    "no rows": [0, 0, 0],
    "more than a power of 2": [1] * 9,
}

Check = Callable[[Tensor, Tensor, Tensor], None]
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]


def operands(
    sizes: list[int], N: int = 40, K: int = 80, rest: int = 0, bias: bool = True, device: str | torch.device = "cpu"
) -> Operands:
    """Random ones for groups of these sizes, and ``rest`` rows beyond them."""
    T, G = sum(sizes) + rest, len(sizes)
    a = torch.randint(-128, 128, (T, K), dtype=torch.int8, device=device)
    b = torch.randint(-128, 128, (G, N, K), dtype=torch.int8, device=device)
    offsets = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    a_scale, b_scale = torch.rand(T, device=device), torch.rand(G, N, device=device)
    return a, b, offsets, a_scale, b_scale, torch.randn(G, N, device=device) if bias else None


@pytest.mark.slow(quick=["ragged"])
@pytest.mark.parametrize("config", [None, SMALL, PERSISTENT], ids=["cpu", "tiles", "persistent"])
@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
def test_groups(sizes: list[int], config: GemmConfig | None, device: torch.device) -> None:
    arguments = operands(sizes, rest=7, device=device)
    for out_dtype in (torch.bfloat16, torch.float32):
        out = grouped_mm(*arguments, out_dtype, config=config)
        assert torch.equal(out, grouped_mm_reference(*arguments, out_dtype))
        assert not out[sum(sizes) :].any()


@pytest.mark.parametrize("config", [None, SMALL], ids=["cpu", "tiles"])
@pytest.mark.parametrize(("N", "K"), [(1, 1), (31, 63), (33, 129), (8, 0), (0, 8)])
@pytest.mark.parametrize("bias", [False, True])
def test_sizes_that_nothing_divides(
    N: int, K: int, bias: bool, config: GemmConfig | None, device: torch.device
) -> None:
    arguments = operands([5, 0, 18], N, K, bias=bias, device=device)
    out = grouped_mm(*arguments, torch.float16, config=config)
    assert torch.equal(out, grouped_mm_reference(*arguments, torch.float16))


def test_no_groups_and_no_rows(device: torch.device) -> None:
    a, b, offsets, a_scale, b_scale, _ = operands([], rest=3, device=device)
    assert torch.equal(grouped_mm(a, b, offsets, a_scale, b_scale, config=SMALL).float().cpu(), torch.zeros(3, 40))
    assert grouped_mm(*operands([0, 0], device=device), config=SMALL).shape == (0, 40)


def test_each_group_is_a_scaled_product(device: torch.device, assert_as_accurate: Check) -> None:
    sizes = [3, 0, 40]
    a, b, offsets, a_scale, b_scale, bias = operands(sizes, device=device)
    assert bias is not None
    out = grouped_mm(a, b, offsets, a_scale, b_scale, bias, torch.float32, config=SMALL)
    exact = torch.empty_like(out, dtype=torch.float64)
    for group, (start, end) in enumerate(pairwise([0, *offsets.tolist()])):
        weight = b[group].double() * b_scale[group].double()[:, None]
        exact[start:end] = (a[start:end].double() * a_scale[start:end].double()[:, None]) @ weight.t() + bias[group]
    assert_as_accurate(out, grouped_mm_reference(a, b, offsets, a_scale, b_scale, bias, torch.float32), exact)


@pytest.mark.parametrize("config", [None, SMALL], ids=["cpu", "tiles"])
def test_nan_scales_give_nan_rows(config: GemmConfig | None, device: torch.device) -> None:
    a, b, offsets, a_scale, b_scale, _ = operands([5, 20], rest=2, device=device)
    a_scale[[2, 9]] = math.nan
    a_scale[26] = math.nan  # beyond the groups
    out = grouped_mm(a, b, offsets, a_scale, b_scale, config=config)
    assert out.isnan().all(dim=1).nonzero().flatten().tolist() == [2, 9]
    assert out.isnan().any(dim=1).sum() == 2


@pytest.mark.parametrize(
    "offsets", [[30, 10, 40], [-5, 20, 1 << 30], [99, -99, 99], [-1, -2, -3], [40, 0, 40]], ids=str
)
@pytest.mark.parametrize("config", [None, SMALL], ids=["cpu", "tiles"])
def test_wrong_offsets_reach_nothing_outside(
    offsets: list[int], config: GemmConfig | None, device: torch.device
) -> None:
    a, b, _, a_scale, b_scale, _ = operands([40, 0, 0], bias=False, device=device)
    wrong = torch.tensor(offsets, dtype=torch.int32, device=device)
    right = wrong.clamp(0, 40).cummax(dim=0).values
    out = grouped_mm(a, b, wrong, a_scale, b_scale, config=config)
    assert torch.equal(out, grouped_mm_reference(a, b, right, a_scale, b_scale))


def test_the_table_of_tiles(device: torch.device) -> None:
    sizes, block_m = [3, 16, 0, 17, 1, 33], 16
    offsets = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    tiles = torch.full((grouped.table_size(70, 6, block_m),), -7, dtype=torch.int32, device=device)
    grouped.group_tiles_launch(70, 6, block_m, device)(offsets, tiles)
    count, rows, *_ = tiles.tolist()
    assert rows == 70
    entries = tiles[4 : 4 + 4 * count].view(count, 4)[:, :3].tolist()
    expected = [[0, 0, 3], [1, 3, 19], [3, 19, 35], [3, 35, 36], [4, 36, 37], [5, 37, 53], [5, 53, 69], [5, 69, 70]]
    assert entries == expected


@pytest.mark.parametrize("block_m", [16, 128])
def test_max_tiles(block_m: int) -> None:
    # As many rows as possible alone in a tile of theirs.
    for rows in (0, 1, 5, 16, 17, 130, 1000):
        for groups in (1, 3, 64):
            most = 0
            for filled in range(1, min(rows, groups) + 1):
                most = max(most, filled - 1 + -(-(rows - filled + 1) // block_m))
            assert grouped.max_tiles(rows, groups, block_m) >= most
            assert grouped.max_tiles(rows, groups, block_m) <= rows


def test_refused_arguments(device: torch.device) -> None:
    a, b, offsets, a_scale, b_scale, bias = operands([3, 4], device=device)
    for arguments, message in (
        ((a.float(), b, offsets, a_scale, b_scale), r"a is torch.float32"),
        ((a[0], b, offsets, a_scale, b_scale), r"a has shape \[80\]"),
        ((a, b[0], offsets, a_scale, b_scale), r"b is \[40, 80\].*\[G, N, K\]"),
        ((a, b.transpose(1, 2), offsets, a_scale, b_scale), "contiguous"),
        ((a[:, :9], b, offsets, a_scale, b_scale), r"a's columns must equal"),
        ((a, b, offsets.long(), a_scale, b_scale), r"offsets is torch.int64.*int32 \[2\]"),
        ((a, b, offsets[:1], a_scale, b_scale), r"offsets is .*\[1\].*\[2\]"),
        ((a, b, offsets, a_scale[:1], b_scale), r"a_scale is .*\[7\]"),
        ((a, b, offsets, a_scale.double(), b_scale), r"a_scale is torch.float64"),
        ((a, b, offsets, a_scale, b_scale[0]), r"b's scale is .*\[2, 40\]"),
        ((a, b, offsets, a_scale, b_scale, bias[0]), r"b's bias is .*\[2, 40\]"),
        ((a, b, offsets, a_scale, b_scale, None, torch.int32), r"out_dtype is torch.int32"),
        ((a.to("meta"), b, offsets, a_scale, b_scale), "one device"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            grouped_mm(*arguments)
    with pytest.raises(ValueError, match=r"can't run grouped products.*omit it"):
        grouped_mm(a, b, offsets, a_scale, b_scale, config=GemmConfig(64, 64, 128, 4, 5, schedule="streamk"))
    with pytest.raises(ValueError, match=r"can't run grouped products.*omit it"):
        grouped_mm(a, b, offsets, a_scale, b_scale, config=GemmConfig(16, 32, 256, 4, 6, schedule="specialized"))


DEVICES = {
    "H200": H200,
    "without Hopper's kernel": dataclasses.replace(H200, hopper=False),
    "A100": A100,
    "MI300X": MI300X,
}


@pytest.mark.parametrize(("block_m", "block_n", "takes"), [(64, 128, True), (64, 80, False), (16, 64, False)])
def test_configs_of_hoppers_kernel_that_grouped_products_take(block_m: int, block_n: int, takes: bool) -> None:
    config = GemmConfig(block_m, block_n, 128, num_warps=4, num_stages=4, schedule="specialized")
    assert is_valid(config, 1, H200)
    assert grouped.is_grouped(config, H200) == takes


@pytest.mark.parametrize("limits", DEVICES.values(), ids=DEVICES)
def test_chosen_configs(limits: DeviceLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_config, "device_limits", lambda device: limits)
    choose = grouped_config.select_grouped_config
    device = torch.device("cuda", 0)
    kinds = ((INT8.storage, False), (FP8.storage, False), (FP8.storage, True))
    for T, G, form in itertools.product((1, 2, 30, 128, 1024, 16_384, 200_000), (1, 8, 128, 256), kinds):
        sizes = ((1536, 2048), (2048, 768), (28_672, 4096), (4096, 14_336), (1, 1))
        configs = [choose(T, G, N, K, device, True, *form) for N, K in sizes]
        assert all(grouped.is_grouped(config, limits) for config in configs)
        # The two products of an experts layer share their tiles.
        assert len({config.block_m for config in configs}) == 1
        if 4 * T <= G:
            assert configs[0].block_m == 16
        if T >= 100 * G:
            assert configs[0].block_m >= 64
            assert (configs[0].schedule == "specialized") == limits.hopper
        assert choose(T, G, 1536, 2048, device, False, *form).schedule != "specialized"
        assert not form[1] or all(config.block_k == 128 for config in configs)


@on_hopper
@pytest.mark.parametrize("config", SPECIALIZED, ids=str)
@pytest.mark.parametrize(
    ("sizes", "N", "K"),
    [
        ([0, 3, 130, 0, 64, 128, 1, 65], 272, 272),  # tiles of every filling, 64 and 128 exactly among them
        ([300] * 5 + [0] * 3, 1040, 288),
        ([0] * 7 + [700], 512, 256),
        ([17] * 40, 136, 4112),  # more tiles than multiprocessors; K goes round the ring several times
    ],
)
def test_hoppers_kernel_has_the_same_bits(sizes: list[int], N: int, K: int, config: GemmConfig) -> None:
    arguments = operands(sizes, N, K, rest=5, device="cuda")
    expected = grouped_mm_reference(*arguments)
    for _ in range(3):
        torch.full((1 << 22,), torch.nan, device="cuda")  # what free memory holds
        assert torch.equal(grouped_mm(*arguments, config=config), expected)


@on_hopper
def test_a_capture_synchronizes_nothing() -> None:
    arguments = operands([0, 3, 130, 0, 64, 128, 1, 65], 272, 272, device="cuda")
    grouped_mm(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_mm(*arguments)
    arguments[2].copy_(torch.tensor([100, 100, 100, 200, 300, 391, 391, 391]))  # other groups than were captured
    graph.replay()
    assert torch.equal(out, grouped_mm_reference(*arguments))
