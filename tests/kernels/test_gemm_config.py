"""``is_valid`` and ``select_config``: what they promise, on devices large and small."""

import itertools
from dataclasses import replace

import pytest
import torch

from qgemm.kernels.gemm import config as module
from qgemm.kernels.gemm.config import CANDIDATES, GemmConfig, is_valid, programs_per_sm, select_config
from qgemm.kernels.launch.device import DeviceLimits
from qgemm.numerics.formats import FP8
from tests.kernels import devices

H200 = replace(devices.H200, hopper=False, pdl=False)
DEVICES = {
    "H200": H200,
    "A100": devices.A100,
    "RTX 3090": devices.RTX_3090,
    "MI300X": devices.MI300X,
    "MI355X": devices.MI355X,
    "48 KB": DeviceLimits(num_sms=1, shared_memory=49_152, max_threads=1024),
}
DTYPES = [torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32]
VALID = GemmConfig(64, 64, 128, num_warps=4, num_stages=2)


def select(M: int, N: int, K: int, dtype: torch.dtype, limits: DeviceLimits, **options: bool) -> GemmConfig:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "device_limits", lambda device: limits)
        return select_config(M, N, K, dtype, torch.device("cuda"), **options)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"block_m": 24}, "no power of 2"),
        ({"block_n": 96}, "two powers of 2, which Hopper's kernel alone takes"),
        ({"block_n": 8}, "less than a tensor core's tile"),
        ({"block_k": 16}, "int8 instructions take 32 values of K"),
        ({"block_k": 0}, "an empty block"),
        ({"block_m": -64}, "negative"),
        ({"num_stages": 64}, "more shared memory than there is"),
        ({"num_stages": 0}, "no stage"),
        ({"block_m": 256, "block_n": 256, "block_k": 32}, "more accumulators than 4 warps hold"),
        ({"num_warps": 3}, "no power of 2"),
        ({"num_warps": 0}, "no warp"),
        ({"group_size_m": 0}, "the tile order divides by it"),
        ({"groups": 2}, "groups take turns in Hopper's kernel alone"),
        ({"groups": 3, "schedule": "specialized"}, "more than two groups"),
    ],
)
def test_what_is_not_valid(changed: dict[str, int], why: str) -> None:
    assert is_valid(VALID, 1, H200)
    assert not is_valid(GemmConfig(**{**vars(VALID), **changed}), 1, H200), why


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"num_stages": 1}, "nothing is loaded ahead"),
        ({"block_k": 64}, "rows of less than 128 bytes"),
        ({"block_m": 512, "num_warps": 8}, "more rows than two groups of warps have"),
        ({"num_warps": 8}, "warps without rows"),
    ],
)
def test_what_hoppers_kernel_does_not_take(changed: dict[str, int], why: str) -> None:
    config = GemmConfig(64, 64, 128, num_warps=4, num_stages=4, schedule="specialized")
    hopper = replace(H200, hopper=True)
    assert [is_valid(config, itemsize, hopper) for itemsize in (1, 2, 4)] == [True, True, False]
    assert not is_valid(config, 1, H200)
    assert not is_valid(replace(config, **changed), 1, hopper), why


@pytest.mark.parametrize(
    ("block_n", "widths", "valid"),
    [
        (64, (64,), True),
        (80, (64, 16), True),
        (192, (128, 64), True),
        (72, (64, 8), False),  # less than a tensor core's tile
        (112, (64, 48), False),  # three powers of 2
        (256, (256,), False),  # no such instruction for int8
        (0, (1,), False),
    ],
)
def test_widths_of_hoppers_tiles(block_n: int, widths: tuple[int, ...], valid: bool) -> None:
    config = GemmConfig(64, block_n, 128, num_warps=4, num_stages=4, schedule="specialized")
    assert config.widths == widths
    assert is_valid(config, 1, replace(H200, hopper=True)) == valid


@pytest.mark.parametrize(
    ("block_m", "least", "valid"), [(16, 16, True), (32, 16, True), (8, 16, False), (32, 64, False), (64, 64, True)]
)
def test_rows_of_hoppers_tiles(block_m: int, least: int, valid: bool) -> None:
    config = GemmConfig(block_m, 80, 256, num_warps=4, num_stages=4, schedule="specialized")
    assert is_valid(config, 1, replace(H200, hopper=True, hopper_rows=least)) == valid


@pytest.mark.parametrize("M", [1, 16, 17, 32])
def test_few_rows_have_a_config_where_no_block_may_be_low(M: int) -> None:
    hopper = replace(H200, hopper=True)
    low, high = (select(M, 8192, 8192, torch.int8, replace(hopper, hopper_rows=least)) for least in (16, 64))
    assert low.schedule == high.schedule == "specialized"
    assert low.block_m < high.block_m == 64


@pytest.mark.parametrize(
    ("M", "N", "K", "groups"),
    [
        *(
            (M, N, K, 2)
            for M in (2048, 4096)
            for N, K in ((28_672, 4096), (13_824, 5120), (18_944, 3584), (6144, 4096))
        ),
        (16_384, 4096, 4096, 2),
        (8192, 8192, 2048, 2),
        (2048, 16_384, 1024, 2),
        (4096, 8192, 8192, 1),  # long sums
        (1024, 28_672, 4096, 1),  # fewer rows than it was measured for
        (2048, 3328, 5120, 1),  # three rounds instead of two
    ],
)
def test_groups_take_turns_where_sums_are_short(M: int, N: int, K: int, groups: int) -> None:
    limits = replace(H200, hopper=True)
    config = select(M, N, K, torch.int8, limits)
    assert config.schedule == "specialized"
    assert config.groups == groups
    # A residual needs the registers, and other kernels have no groups.
    assert select(M, N, K, torch.int8, limits, residual=True).groups == 1
    assert select(M, N, K, torch.int8, limits, hopper=False).groups == 1


@pytest.mark.parametrize(("N", "K"), [(4608, 36_864), (5120, 13_824)])
def test_long_sums_go_to_one_multiprocessor_of_each_pair(N: int, K: int) -> None:
    # 72 or 80 tiles of 64 columns, of which some would share their way to memory.
    limits = replace(H200, hopper=True)
    config = select(1, N, K, torch.int8, limits)
    assert -(-N // config.block_n) <= limits.num_sms // 2


@pytest.mark.parametrize(
    ("block_m", "block_n", "num_warps"), [(64, 128, 4), (128, 128, 4), (128, 160, 8), (256, 64, 8), (256, 128, 8)]
)
def test_warps_of_hoppers_tiles(block_m: int, block_n: int, num_warps: int) -> None:
    # Warps multiply 16 rows each: eight would find nothing to do in half a tile of 128 rows, as grouped products have.
    for warps in (4, 8):
        config = GemmConfig(block_m, block_n, 128, num_warps=warps, num_stages=4, schedule="specialized")
        assert is_valid(config, 1, replace(H200, hopper=True)) == (warps == num_warps)


@pytest.mark.parametrize(
    ("device", "num_warps", "valid"),
    [("H200", 4, True), ("H200", 8, True), ("A100", 4, False), ("A100", 8, True), ("MI355X", 4, True)],
)
def test_registers_hold_the_sums_beside_the_operands(device: str, num_warps: int, valid: bool) -> None:
    limits = replace(DEVICES[device], hopper=device == "H200")  # whose instructions read operands from shared memory
    assert is_valid(GemmConfig(128, 128, 128, num_warps, num_stages=2), 1, limits) == valid


def test_amd_pads_blocks() -> None:
    limits = DEVICES["MI355X"]
    config = GemmConfig(16, 64, 512, num_warps=4, num_stages=4, schedule="tiles")
    assert config.shared_memory(1) == limits.shared_memory
    assert is_valid(config, 1, replace(limits, warp_size=32))
    assert not is_valid(config, 1, limits)


def test_hoppers_instructions_are_there_for_other_layouts_too() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "device_limits", lambda device: replace(H200, hopper=True))
        config = select_config(4096, 4096, 4096, torch.int8, torch.device("cuda"), False)
    # With 8 warps it took 1.2 times as long on an H200.
    assert (config.schedule, config.block_m, config.block_n, config.num_warps) == ("persistent", 128, 128, 4)


def test_what_is_valid_depends_on_the_operands_and_the_device() -> None:
    assert is_valid(GemmConfig(64, 64, 16, num_warps=4, num_stages=2), 2, H200)  # 16 values of 2 bytes
    streamk = GemmConfig(64, 64, 128, num_warps=4, num_stages=2, schedule="streamk")
    assert is_valid(streamk, 1, H200)
    assert not is_valid(streamk, 2, H200)  # float sums depend on their order
    exact = DeviceLimits(num_sms=1, shared_memory=VALID.shared_memory(1))
    assert is_valid(VALID, 1, exact)
    assert not is_valid(VALID, 1, DeviceLimits(num_sms=1, shared_memory=exact.shared_memory - 1))
    assert not is_valid(VALID, 4, exact)


def test_shared_memory_counts_every_stage() -> None:
    assert GemmConfig(128, 64, 32, num_warps=4, num_stages=3).shared_memory(2) == 3 * (128 + 64) * 32 * 2


@pytest.mark.parametrize("limits", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_choice_is_valid_and_always_the_same(dtype: torch.dtype, limits: DeviceLimits) -> None:
    sizes = (1, 17, 128, 4096, 28_672)
    for M, N, K in itertools.chain(itertools.product(sizes, sizes, sizes), [(1, 1, 0), (2**20, 2**17, 64)]):
        config = select(M, N, K, dtype, limits)
        assert is_valid(config, dtype.itemsize, limits), (M, N, K)
        assert dtype == torch.int8 or config.schedule != "streamk"
        assert config == select(M, N, K, dtype, limits)


@pytest.mark.parametrize("limits", DEVICES.values(), ids=DEVICES)
def test_candidates_hold_one_entry_each_and_some_for_every_device(limits: DeviceLimits) -> None:
    assert len(set(CANDIDATES)) == len(CANDIDATES)
    assert any(is_valid(config, 1, limits) and config.schedule != "streamk" for config in CANDIDATES)


def test_every_candidate_is_for_some_device() -> None:
    devices = (*DEVICES.values(), replace(H200, hopper=True, hopper_rows=16))
    for config in CANDIDATES:
        assert any(is_valid(config, itemsize, limits) for itemsize in (1, 2) for limits in devices), config


def test_large_problems_get_large_tiles_and_small_ones_small() -> None:
    large = select(4096, 4096, 4096, torch.int8, H200)
    small = select(1, 4096, 4096, torch.int8, H200)
    assert large.block_m * large.block_n >= 64 * 128
    assert small.block_m == 16


def test_wider_operands_get_fewer_values_of_k_in_the_same_bytes() -> None:
    for shape in ((4096, 4096, 4096), (1, 4096, 4096)):
        for dtype in (torch.float16, torch.float32):
            config = select(*shape, dtype, H200)
            assert config.shared_memory(dtype.itemsize) <= H200.shared_memory
            assert config.block_k * dtype.itemsize in {max(c.block_k, 16 * dtype.itemsize) for c in CANDIDATES}


@pytest.mark.parametrize("limits", DEVICES.values(), ids=DEVICES)
def test_programs_per_sm_fit(limits: DeviceLimits) -> None:
    for config in CANDIDATES:
        if is_valid(config, 1, limits):
            programs = programs_per_sm(config, 1, limits)
            assert programs >= 1
            assert programs == 1 or programs * config.shared_memory(1) <= limits.shared_memory
            assert programs == 1 or programs * config.num_warps * limits.warp_size <= limits.max_threads
            assert programs == 1 or programs * config.block_m * config.block_n <= 65_536


def test_products_of_fp8_take_wide_tiles_only_where_narrower_ones_leave_multiprocessors_idle() -> None:
    for M, N, columns in ((4096, 6144, 128), (4096, 8192, 128), (512, 6144, 192), (4096, 4096, 128)):
        assert select(M, N, 4096 if N < 8192 else 8192, FP8.storage, devices.H200).block_n == columns


@pytest.mark.parametrize(
    ("M", "N", "columns"),
    [
        (4096, 8192, 192),
        (1024, 6144, 192),
        (2048, 28_672, 192),
        (1024, 28_672, 128),
        (4096, 4096, 128),
        (512, 8192, 128),
    ],
)
def test_products_with_scales_of_blocks_take_wide_tiles_where_those_fill_the_rounds(
    M: int, N: int, columns: int
) -> None:
    config = select(M, N, 8192, FP8.storage, devices.H200, blocks=True)
    assert (config.block_m, config.block_n) == (128, columns)


def test_a_config_prints_itself_and_compares() -> None:
    config = GemmConfig(64, 32, 128, num_warps=4, num_stages=2, schedule="streamk")
    assert eval(repr(config)) == config
    assert config != VALID
    with pytest.raises(AttributeError):
        config.block_m = 128  # type: ignore[misc]


@pytest.mark.parametrize("least", [16, 64])  # Triton 3.8's
@pytest.mark.parametrize("blocks", [False, True])
def test_configs_of_fp8(blocks: bool, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(devices.H200, hopper_rows=least)
    monkeypatch.setattr(module, "device_limits", lambda device: limits)
    for M, N, K in itertools.product((1, 16, 33, 64, 65, 128, 1024, 8192), (8, 4096, 28672), (16, 4096, 28672)):
        config = select_config(M, N, K, torch.float8_e4m3fn, torch.device("cuda"), blocks=blocks)
        assert config.promotes
        assert is_valid(config, 1, limits)
        # Four warps, or two groups of them, which have 64 or 128 rows each.
        assert config.num_warps == (8 if config.block_m >= 128 else 4)
        if blocks:
            assert 128 % config.block_n == 0 or config.widths == (128, 64)  # all columns of 64 share a scale
    for other in (devices.A100, devices.B200, devices.MI300X):
        monkeypatch.setattr(module, "device_limits", lambda device, other=other: other)
        config = select_config(100, 4096, 4096, torch.float8_e4m3fn, torch.device("cuda"), blocks=blocks)
        assert not config.promotes
        assert is_valid(config, 1 if other.multiplies_fp8 else 2, other)
