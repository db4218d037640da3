"""``ScheduleContext`` alone: every tile and every K block is somebody's work exactly once."""

import pytest
import torch
import triton
import triton.language as tl

from qgemm.kernels.stages import GemmContext, ScheduleContext


@triton.jit
def persistent_kernel(
    count, starts, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, NUM_SMS: tl.constexpr, NUM_XCDS: tl.constexpr, CHUNK: tl.constexpr,
    STREAMK_TILES: tl.constexpr,
):  # fmt: skip
    ctx = GemmContext(BM, BN, 32, NUM_SMS, NUM_XCDS, chunk_size=CHUNK)
    sched = ScheduleContext(M, N, K, ctx, STREAMK_TILES)
    start, total, stride = sched.persistent_tile_range()
    tl.store(starts + tl.program_id(0), start)
    for tile_id in range(start, total, stride):
        tl.atomic_add(count + tile_id, 1)


@triton.jit
def tiles_kernel(
    places, M, N, K, num_tiles,
    BM: tl.constexpr, BN: tl.constexpr, GROUP_M: tl.constexpr, GROUP_N: tl.constexpr,
):  # fmt: skip
    sched = ScheduleContext(M, N, K, GemmContext(BM, BN, 32, 1, group_size_m=GROUP_M, group_size_n=GROUP_N))
    for tile_id in range(num_tiles):
        pid_m, pid_n = sched.get_tile(tile_id)
        tile = sched.get_tile_from_idx(tile_id)
        same = sched.get_tile_from_coord(pid_m, pid_n)
        tl.static_assert(tile.block_m == BM)
        tl.static_assert(tile.block_n == BN)
        tl.store(places + 4 * tile_id, tile.pid_m)
        tl.store(places + 4 * tile_id + 1, tile.pid_n)
        tl.store(places + 4 * tile_id + 2, same.pid_m)
        tl.store(places + 4 * tile_id + 3, same.pid_n)


@triton.jit
def streamk_kernel(
    count, runs, M, N, K, num_pid_n, num_k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NUM_SMS: tl.constexpr, NUM_XCDS: tl.constexpr,
    STREAMK_TILES: tl.constexpr,
):  # fmt: skip
    """Counts each K block ``(pid_m, pid_n, k_idx)`` that either way of working visits."""
    ctx = GemmContext(BM, BN, BK, NUM_SMS, NUM_XCDS, group_size_m=2)
    sched = ScheduleContext(M, N, K, ctx, streamk_tiles=STREAMK_TILES)
    start, total, stride = sched.persistent_tile_range()
    for tile_id in range(start, total, stride):
        tile = sched.get_tile_from_idx(tile_id)
        for k_idx in range(num_k):
            tl.atomic_add(count + (tile.pid_m * num_pid_n + tile.pid_n) * num_k + k_idx, 1)
    first, end = sched.iter_range()
    tl.store(runs + tl.program_id(0), end - first)
    for iter_id in range(first, end):
        pid_m, pid_n, k_idx = sched.get_iter(iter_id)
        tl.atomic_add(count + (pid_m * num_pid_n + pid_n) * num_k + k_idx, 1)


@pytest.mark.slow(quick=["7-1-4"])
@pytest.mark.parametrize(
    ("num_sms", "num_xcds", "chunk_size"),
    [
        (1, 1, 1),
        (7, 1, 4),  # no chiplets: chunk_size means nothing
        (8, 8, 1),
        (7, 8, 1),  # fewer programs than chiplets
        (12, 8, 1),  # a last round that not every chiplet has
        (13, 4, 3),  # one whole round of 12 and one program
        (37, 3, 4),  # three whole rounds and one program
        (38, 8, 2),
        (304, 8, 1),  # MI300X
        (304, 8, 38),  # all of it in one round
        (304, 8, 5),
        (64, 8, 16),  # a round longer than the device
    ],
)
def test_each_tile_goes_to_one_program(num_sms: int, num_xcds: int, chunk_size: int, device: torch.device) -> None:
    M, N = 16 * 19, 32 * 23 - 5  # 437 tiles
    tiles = 19 * 23
    count = torch.zeros(tiles + 1, dtype=torch.int32, device=device)
    starts = torch.full((num_sms,), -1, dtype=torch.int32, device=device)
    persistent_kernel[(num_sms,)](count, starts, M, N, 32, 16, 32, num_sms, num_xcds, chunk_size, 0)
    assert count.tolist() == [1] * tiles + [0]
    assert sorted(starts.tolist()) == list(range(num_sms)), "the renumbering must be a permutation"

    # What the renumbering is for: within whole rounds, a chiplet's programs come in runs of chunk_size neighbours.
    whole = num_sms // (num_xcds * chunk_size) * num_xcds * chunk_size if num_xcds > 1 else 0
    for chiplet in range(num_xcds if whole else 0):
        mine = [starts[pid].item() for pid in range(chiplet, whole, num_xcds)]
        for run in range(0, len(mine), chunk_size):
            assert mine[run : run + chunk_size] == list(range(mine[run], mine[run] + chunk_size))
    assert starts[whole:].tolist() == (list(range(whole, num_sms)) if num_xcds > 1 else list(range(num_sms)))


@pytest.mark.parametrize("streamk_tiles", [0, 2, 6, 100])  # 6 tiles in all
def test_persistent_range_leaves_out_the_streamk_tiles(streamk_tiles: int, device: torch.device) -> None:
    count = torch.zeros(6, dtype=torch.int32, device=device)
    starts = torch.empty(4, dtype=torch.int32, device=device)
    persistent_kernel[(4,)](count, starts, 40, 60, 32, 16, 32, 4, 1, 1, streamk_tiles)
    left = min(streamk_tiles, 6)
    assert count.tolist() == [1] * (6 - left) + [0] * left


@pytest.mark.slow(quick=["16-32-3"])
@pytest.mark.parametrize(("group_size_m", "group_size_n"), [(1, 1), (2, 1), (3, 1), (8, 1), (1, 4), (3, 2), (8, 4)])
@pytest.mark.parametrize(
    ("M", "N"),
    [
        (16, 32),  # one tile
        (16 * 8, 32 * 3),  # whole groups
        (16 * 7, 32 * 5),  # a last group with fewer rows
        (16 * 7 + 1, 32 * 5 + 31),  # ragged
        (1, 32 * 11),
        (16 * 11, 1),
    ],
)
def test_get_tile_covers_the_grid_in_groups(
    M: int, N: int, group_size_m: int, group_size_n: int, device: torch.device
) -> None:
    rows, cols = triton.cdiv(M, 16), triton.cdiv(N, 32)
    places = torch.empty(rows * cols, 4, dtype=torch.int32, device=device)
    tiles_kernel[(1,)](places, M, N, 32, rows * cols, 16, 32, group_size_m, group_size_n)
    expected = [
        (m, n)
        for first in range(0, rows, group_size_m)
        for left in range(0, cols, group_size_n)
        for m in range(first, min(first + group_size_m, rows))
        for n in range(left, min(left + group_size_n, cols))
    ]
    assert [tuple(place) for place in places[:, :2].tolist()] == expected
    assert torch.equal(places[:, :2], places[:, 2:]), "get_tile_from_coord must keep the coordinates"


@pytest.mark.slow(quick=["32-1-1"])
@pytest.mark.parametrize("streamk_tiles", [0, 1, 4, 12, 1000])  # none, some, all of 12, more than there are
@pytest.mark.parametrize(
    ("num_sms", "num_xcds"),
    [
        (1, 1),
        (5, 1),  # doesn't divide the K blocks
        (64, 1),  # more programs than K blocks when few tiles are cut up
        (12, 8),  # renumbered
    ],
)
@pytest.mark.parametrize("K", [32, 70])  # one block a tile; three, the last one ragged
def test_each_k_block_is_visited_once(
    streamk_tiles: int, num_sms: int, num_xcds: int, K: int, device: torch.device
) -> None:
    M, N = 16 * 4 - 3, 32 * 3 - 1
    num_k = triton.cdiv(K, 32)
    count = torch.zeros(4, 3, num_k, dtype=torch.int32, device=device)
    runs = torch.empty(num_sms, dtype=torch.int32, device=device)
    streamk_kernel[(num_sms,)](count, runs, M, N, K, 3, num_k, 16, 32, 32, num_sms, num_xcds, streamk_tiles)
    assert torch.equal(count, torch.ones_like(count))
    assert runs.sum().item() == min(streamk_tiles, 12) * num_k
    assert runs.max().item() - runs.min().item() <= 1, "programs must get equal runs, to within one block"
