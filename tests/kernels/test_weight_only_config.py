"""The tiles of products with stored weights: no tile is larger than a multiprocessor, K is shared where N is short."""

import itertools
import math
from dataclasses import replace

import pytest

from qgemm.kernels.stored_form import BLOCK_BYTES, Precision, StoredForm
from qgemm.kernels.weight_only.config import (
    MAX_COUNTS,
    MAX_PARTS,
    RING,
    TILE_ROWS,
    TILES,
    Shareable,
    fits_ring,
    most_rows,
    prefers_tiles,
    select_ring,
    select_tiles,
)
from qgemm.kernels.weight_only.few_rows_config import (
    ADDENDS,
    BY_GROUPS,
    FEW_ROWS,
    FLOAT_ADDENDS,
    ROOMY,
    select_few_rows,
)
from qgemm.numerics.integers import cdiv, next_power_of_2
from tests.kernels.devices import H200

INT4, INT8 = StoredForm("int4", 128), StoredForm("int8", 0)
FORMS = pytest.mark.parametrize("form", [INT4, INT8], ids=["int4", "int8"])
# M, N and K where programs share K of the last tiles only, on 132 multiprocessors.
WHOLE_AND_SHARED = [(33, 17032, 1040), (192, 17032, 1040), (770, 4096, 14336), (512, 28672, 4096)]
# Where they do in a ring: of all tiles, and of those of a second round.
SHARED_IN_A_RING = [(16, 10240, 8192), (32, 4096, 14336), (8, 10240, 8192)]
SIZES = [(1, 256), (520, 300), (4096, 4096), (6144, 4096), (57344, 8192)]


def test_a_block_of_packed_values_is_twice_as_long() -> None:
    assert (INT4.block, INT8.block) == (2 * BLOCK_BYTES, BLOCK_BYTES)


def test_every_warp_has_16_or_32_rows_of_the_weight_for_itself() -> None:
    for tile in itertools.chain(
        *(tiles.values() for tiles in (*FEW_ROWS.values(), *BY_GROUPS.values(), ADDENDS, FLOAT_ADDENDS, ROOMY))
    ):
        assert tile.rows * tile.splits in (16 * tile.warps, 32 * tile.warps)
    for ring, _ in itertools.chain(*RING.values()):
        assert ring.rows * ring.splits == 32 * ring.warps


@FORMS
@pytest.mark.parametrize("M", [1, 2, 8, 9, 16])
def test_few_rows(M: int, form: StoredForm) -> None:
    for N, _ in SIZES:
        tile = select_few_rows(M, N, form, H200)
        assert tile.columns == (8 if M <= 8 else 16)
        assert tile.x_rows == (1 if M == 1 else tile.columns)
        slot = tile.splits * (tile.rows * BLOCK_BYTES + tile.x_rows * form.block * 2)
        assert tile.depth * slot <= H200.shared_memory


@pytest.mark.parametrize(
    ("N", "K", "faster"),
    # As products of 17, 24 and 32 rows were timed on an H100.
    [
        (4096, 4096, True), (4096, 14336, True), (57344, 8192, True), (8192, 28672, True),
        (6144, 4096, False), (28672, 4096, False), (8192, 8192, False),
    ],
)  # fmt: skip
def test_tiles_for_17_to_32_rows_of_int4(N: int, K: int, faster: bool) -> None:
    for M in (17, 24, 32):
        assert prefers_tiles(M, N, K, INT4, H200) == faster
        assert not prefers_tiles(M, N, K, INT8, H200)
        assert not prefers_tiles(M, N, K, replace(INT4, has_zeros=True), H200)
    assert not prefers_tiles(16, N, K, INT4, H200)


def test_the_ring_of_float_zero_points() -> None:
    floats = replace(INT4, has_zeros=True, float_zeros=True)
    assert select_few_rows(16, 57344, replace(floats, group=64), H200) == ROOMY[16]
    assert fits_ring(16, 4096, floats)
    assert not fits_ring(17, 4096, floats)
    assert fits_ring(32, 4096, replace(INT8, has_zeros=True, float_zeros=True))
    assert not fits_ring(16, 4096, replace(floats, group=64))
    assert not fits_ring(16, 4096, replace(INT4, group=64))


def test_most_rows_of_tiles() -> None:
    """A float weight is made where scaling takes many instructions, and more of the weight is read than that costs."""
    four = StoredForm("int4", 32)
    assert most_rows(INT4, "exact") == most_rows(four, "exact") == most_rows(StoredForm("fp4", 16), "exact") == math.inf
    assert most_rows(StoredForm("int8", 0), "float") == most_rows(INT4, "two") == math.inf
    assert most_rows(INT4, "float") == 2048
    for form in (four, StoredForm("int8", 16), StoredForm("nf4", 64)):
        assert most_rows(form, "two") == most_rows(form, "float") == 2048
    zeros = replace(four, has_zeros=True, float_zeros=True)
    assert most_rows(zeros, "float") == 768
    assert most_rows(replace(zeros, group=64), "float") == 2048


@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize("M", [1, 8, 16])
def test_few_rows_by_groups_fit_shared_memory(M: int, name: str) -> None:
    form = StoredForm(name, 16, has_zeros=True, float_zeros=True, whole=True)
    for N in (4096, 6144, 57344):
        tile = select_few_rows(M, N, form, H200)
        row = BLOCK_BYTES + 2 * 4 * form.block // form.group  # with factors in float32
        slot = tile.splits * (tile.rows * row + tile.x_rows * form.block * 2)
        assert tile.depth * slot <= H200.shared_memory


@FORMS
@pytest.mark.parametrize("M", [1, 2, 8, 9, 16, 17, 32])
def test_ring(M: int, form: StoredForm) -> None:
    if not fits_ring(M, 4096, form):
        assert (M, form) == (1, INT4)
        return
    for N, K in SIZES:
        K = K // 256 * 256
        tile = select_ring(M, N, K, form, H200)
        assert tile.columns == (8 if M <= 8 else 16 if M <= 16 else 32)
        slot = tile.splits * (tile.rows * BLOCK_BYTES + tile.columns * form.block * 2)
        exchanged = tile.splits * tile.rows * tile.columns * 4
        reserved = 1024  # of every program; and barriers
        assert tile.programs * (tile.depth * slot + exchanged + reserved + 256) <= H200.shared_memory + reserved
        programs = tile.programs * H200.num_sms
        shared_well(tile, tile.tiles(N), programs, cdiv(K // form.block, tile.splits))


@pytest.mark.parametrize(("M", "N", "K"), SHARED_IN_A_RING)
def test_some_tiles_of_a_ring_are_shared(M: int, N: int, K: int) -> None:
    assert select_ring(M, N, K, INT4, H200).shared


def shared_well(tile: Shareable, tiles: int, programs: int, steps: int) -> None:
    """Shared tiles are fewer than programs, after rounds of whole ones."""
    assert 0 <= tile.shared * tile.counts <= MAX_COUNTS
    assert (tile.shared > 0) == (tile.sharers > 0)
    if tile.shared:
        assert tile.shared <= tile.sharers <= programs
        assert tile.sharers <= tile.shared * steps
        assert tile.parts <= MAX_PARTS
        assert (tiles - tile.shared) % programs == 0
    grid = tile.grid(tiles, programs)
    assert tile.sharers <= grid <= programs
    assert grid == min(tiles - tile.shared, programs) or tiles == tile.shared
    assert (tile.unshared.shared, tile.unshared.sharers) == (0, 0)


@pytest.mark.parametrize(("shared", "sharers"), [(1, 7), (3, 4), (3, 5), (3, 6), (4, 12), (5, 11)])
def test_parts_of_a_tile_and_room_for_them(shared: int, sharers: int) -> None:
    """Of programs whose ranges of blocks reach into a tile, with the place in memory that each leaves its sums in."""
    way = Shareable(shared=shared, sharers=sharers)
    for blocks in range(sharers, 4 * sharers):
        starts = [program * shared * blocks // sharers for program in range(sharers + 1)]
        reached = [{start // blocks, (end - 1) // blocks} for start, end in itertools.pairwise(starts)]
        parts = max(sum(tile in tiles for tiles in reached) for tile in range(shared))
        assert parts <= way.parts <= parts + (sharers % shared > 0)
        places = 1 + max(program + tile for program, tiles in enumerate(reached) for tile in tiles)
        assert way.partial_sums(8, 2) >= places * 8 * 2


def test_small_groups_and_parts_of_blocks_have_no_ring() -> None:
    assert fits_ring(32, 4096, INT4)
    assert not fits_ring(33, 4096, INT4)
    assert not fits_ring(16, 4096, StoredForm("fp4", 32))
    assert not fits_ring(16, 4096 + 128, INT4)
    assert fits_ring(16, 4096 + 128, INT8)


# In microseconds, of one H200: by the warps that share K, the rows of the weight, the slots and the warps of a program.
GROUPS_OF_32 = StoredForm("int4", 32, whole=True)
Q4_K = replace(GROUPS_OF_32, has_zeros=True, float_zeros=True)
Q8_0, Q5_K = StoredForm("int8", 32, whole=True), StoredForm("int8", 32, True, True, whole=True)
TIMED_FEW_ROWS = [
    (1, 4096, INT4, {(8, 16, 2, 8): 3.9, (8, 16, 3, 8): 4.8, (4, 16, 4, 4): 6.7}),
    (1, 6144, INT4, {(8, 16, 2, 8): 5.1, (4, 32, 2, 8): 5.5, (4, 16, 3, 4): 6.8}),
    (1, 8192, INT4, {(4, 32, 2, 8): 6.0, (4, 16, 3, 4): 6.9, (8, 16, 2, 8): 7.6}),
    (1, 14336, INT4, {(4, 16, 3, 4): 10.0, (2, 16, 3, 2): 11.2, (4, 32, 2, 8): 11.3}),
    (1, 28672, INT4, {(2, 16, 3, 2): 16.7, (4, 16, 3, 4): 18.7, (4, 16, 4, 4): 19.9}),
    (1, 4096, GROUPS_OF_32, {(8, 16, 2, 8): 4.3, (8, 16, 3, 8): 5.3, (4, 16, 3, 4): 7.6}),
    (1, 28672, GROUPS_OF_32, {(2, 16, 4, 2): 18.9, (2, 16, 3, 2): 19.3, (4, 16, 3, 4): 23.0}),
    (8, 4096, GROUPS_OF_32, {(8, 16, 2, 8): 5.2, (4, 16, 3, 4): 6.1, (4, 32, 2, 8): 7.0}),
    (8, 4096, Q4_K, {(4, 16, 3, 4): 6.1, (4, 16, 2, 4): 8.2}),
    (8, 28672, Q4_K, {(4, 16, 2, 4): 31.0, (4, 32, 2, 8): 31.6, (2, 32, 4, 4): 40.7}),
    (8, 8192, Q8_0, {(4, 16, 3, 4): 10.3, (4, 32, 3, 8): 12.1, (8, 16, 3, 8): 12.8}),
    (16, 28672, Q5_K, {(4, 32, 2, 8): 53.4, (8, 16, 2, 8): 58.1, (4, 16, 4, 4): 66.5}),
]


@pytest.mark.parametrize(("M", "N", "form", "times"), TIMED_FEW_ROWS)
def test_the_tile_of_few_rows_that_is_chosen_is_the_fastest(
    M: int, N: int, form: StoredForm, times: dict[tuple[int, ...], float]
) -> None:
    tile = select_few_rows(M, N, form, H200)
    assert (tile.splits, tile.rows, tile.depth, tile.warps) == min(times, key=times.__getitem__)


def test_three_programs_of_a_row_fit_an_sm() -> None:
    """So all programs of a weight of 6144 rows are there at once."""
    for form in (INT4, GROUPS_OF_32, StoredForm("fp4", 32, whole=True)):
        tile = select_few_rows(1, 6144, form, H200)
        assert cdiv(6144, tile.rows) <= 3 * H200.num_sms
        assert tile.registers is not None
        assert 3 * tile.warps * 32 * tile.registers <= 65_536
    # Where each group has an addend too, or groups are of 16, the registers wouldn't hold them.
    for form in (Q4_K, replace(GROUPS_OF_32, has_zeros=True), StoredForm("fp4", 16, whole=True)):
        assert select_few_rows(1, 6144, form, H200) == ROOMY[1]


def test_the_shorter_the_weight_the_more_warps_share_its_rows() -> None:
    splits = [select_few_rows(1, N, INT4, H200).splits for N in (4096, 8192, 28672)]
    assert splits == sorted(splits, reverse=True)
    assert splits[0] > splits[-1]
    for M in (4, 16, 32):
        splits = [select_ring(M, N, 4096, INT4, H200).splits for N in (4096, 28672)]
        assert splits[0] > splits[-1]


# In microseconds, of one H200, by the tile's warps that share K and its rows; and with how many programs K is shared.
# 132 and 264 programs: 10240 rows are 160 tiles of 64, so that few would have a second one.
TIMED = [
    (16, 10240, 8192, INT4, {(2, 64, 264): 16.4, (4, 64, 84): 17.2, (4, 32, 224): 17.5, (2, 64, 0): 19.3}),
    (16, 8192, 8192, INT4, {(4, 32, 0): 12.7, (4, 64, 0): 13.7, (2, 64, 256): 13.7}),
    (32, 28672, 4096, INT4, {(1, 128, 0): 28.1, (1, 128, 264): 28.5, (2, 64, 264): 29.5}),
    (32, 8192, 8192, INT4, {(4, 64, 0): 16.9, (2, 64, 256): 17.8, (1, 128, 256): 19.6}),
    (1, 57344, 8192, INT8, {(4, 64, 0): 110.1, (4, 64, 132): 110.2}),
    (32, 10240, 8192, INT8, {(2, 64, 264): 25.8, (4, 64, 84): 26.3, (4, 64, 112): 26.7}),
]


@pytest.mark.parametrize(("M", "N", "K", "form", "times"), TIMED)
def test_the_ring_tile_that_is_chosen_is_the_fastest(
    M: int, N: int, K: int, form: StoredForm, times: dict[tuple[int, int, int], float]
) -> None:
    tile = select_ring(M, N, K, form, H200)
    assert times[tile.splits, tile.rows, tile.sharers] <= 1.02 * min(times.values())


@FORMS
@pytest.mark.parametrize("M", [17, 33, 64, 100, 200, 512, 513, 8192])
def test_tiles(M: int, form: StoredForm) -> None:
    for N, K in SIZES:
        tile = select_tiles(M, N, K, form, H200)
        shared_well(tile, tile.tiles(M, N), H200.num_sms, cdiv(K, form.block))


@FORMS
@pytest.mark.parametrize(("M", "N", "K"), WHOLE_AND_SHARED)
def test_some_tiles_are_shared(M: int, N: int, K: int, form: StoredForm) -> None:
    tile = select_tiles(M, N, K, form, H200)
    assert 0 < tile.shared < tile.tiles(M, N)


def test_slots_fit_into_shared_memory() -> None:
    for tile in (*TILES[4], *TILES[8]):
        staged = 2 * tile.staging * 64 * min(tile.widths[-1], 64) * 2
        slots = tile.x_depth * tile.panels * tile.columns * 128 + tile.w_depth * TILE_ROWS * BLOCK_BYTES
        assert slots + staged + 1024 <= H200.shared_memory
        # Of the panels of a block all are on their way, or two in turn, and one more.
        assert tile.x_depth * tile.panels > (2 if tile.in_turn else 4)


@FORMS
def test_tiles_are_about_as_wide_as_there_are_rows(form: StoredForm) -> None:
    for M, columns in ((128, 128), (129, 160), (160, 160), (161, 192), (256, 256), (320, 160)):
        assert select_tiles(M, 28672, 8192, form, H200).columns == columns
    assert select_tiles(384, 28672, 8192, form, H200).columns == {4: 128, 8: 192}[form.bits]


def test_accumulators_have_sizes_of_powers_of_2() -> None:
    for tile in (*TILES[4], *TILES[8]):
        assert sum(tile.widths) == tile.columns
        assert all(width == next_power_of_2(width) for width in tile.widths)
    assert {tile.widths for tile in TILES[4]} == {(32,), (64,), (128,), (128, 32), (128, 64), (256,)}


def test_what_takes_registers_has_narrower_tiles() -> None:
    zeros = replace(INT4, has_zeros=True)
    narrow = [replace(zeros, group=32, float_zeros=True), replace(zeros, group=16)]
    for form in (INT4, zeros, StoredForm("fp4", 32), StoredForm("int8", 32), replace(zeros, group=32), *narrow):
        tiles = [select_tiles(M, 8192, 8192, form, H200, precision="float") for M in (20, 64, 192, 512, 4096)]
        assert max(tile.columns for tile in tiles) == (192 if form in narrow else 256)
        assert all(tile.in_turn == 1 for tile in tiles) == (form == narrow[0])


def test_blocks_in_turn() -> None:
    """Of int8 with zero points two, where scales are of the dtype of x; else one of what isn't plain."""

    def in_turn(form: StoredForm, precision: Precision = "exact") -> list[int]:
        return [select_tiles(M, 8192, 8192, form, H200, precision).in_turn for M in (160, 192, 512)]

    eight, channel = StoredForm("int8", 128), StoredForm("int4", 0)
    assert in_turn(INT4) == in_turn(channel) == in_turn(channel, "float") == [4, 2, 2]
    assert in_turn(replace(INT4, has_zeros=True)) == in_turn(replace(channel, has_zeros=True)) == [1, 1, 1]
    assert in_turn(replace(INT4, group=64)) == in_turn(INT4, "two") == [1, 1, 1]
    assert in_turn(eight) == [4, 4, 1]
    assert in_turn(replace(eight, has_zeros=True)) == [2, 2, 1]
    assert in_turn(replace(eight, has_zeros=True), "two") == [1, 1, 1]


def test_scaling_in_float32_makes_wider_tiles_better() -> None:
    """Each tile unpacks the weight again."""
    assert select_tiles(384, 28672, 8192, INT4, H200).columns == 128
    assert select_tiles(384, 28672, 8192, INT4, H200, precision="float").columns == 192
    # Sums are scaled in float32 as they are.
    assert select_tiles(64, 28672, 8192, INT4, H200) == select_tiles(64, 28672, 8192, INT4, H200, precision="float")


def test_programs_fill_the_device() -> None:
    tile = select_tiles(32, 4096, 4096, INT4, H200)
    assert tile.sharers > 0.7 * H200.num_sms
    # 160 tiles: a round of whole ones, then 28 that four programs share each.
    tile = select_tiles(770, 4096, 14336, INT4, H200)
    assert (tile.columns, tile.shared, tile.sharers) == (160, 28, 112)


def test_ways_to_share_tiles() -> None:
    """By as many programs each, or by all; never by more than there are blocks, or than a count holds."""
    tile = TILES[4][0]
    assert [(way.sharers, way.parts) for way in tile.shared_by(48, 132, 16)] == [(96, 2), (132, 4)]
    assert [way.sharers for way in tile.shared_by(32, 132, 3)] == [64, 96]
    assert max(way.parts for way in tile.shared_by(1, 132, 1000)) == MAX_PARTS
    assert tile.shared_by(0, 132, 16) == tile.shared_by(131, 132, 16) == []
