"""The tiles of products with stored weights: no tile is larger than a multiprocessor, K is shared where N is short."""

import pytest

from qgemm.kernels.weight_only.config import (
    BLOCK_BYTES,
    MAX_PARTS,
    MAX_SHARED,
    TILE_ROWS,
    TILES,
    FewRows,
    FewRowsRing,
    Stored,
    select_few_rows,
    select_tiles,
)
from qgemm.numerics.integers import cdiv
from tests.kernels.devices import H200

INT4, INT8 = Stored("int4", 4, 128), Stored("int8", 8, 0)
FORMS = pytest.mark.parametrize("form", [INT4, INT8], ids=["int4", "int8"])
# M, N and K where programs share K of the last tiles only, on 132 multiprocessors.
WHOLE_AND_SHARED = [(33, 17032, 1040), (578, 4096, 14336), (512, 28672, 4096)]
SIZES = [(1, 256), (520, 300), (4096, 4096), (6144, 4096), (57344, 8192)]


def test_a_block_of_packed_values_is_twice_as_long() -> None:
    assert (INT4.block, INT8.block) == (2 * BLOCK_BYTES, BLOCK_BYTES)


@FORMS
@pytest.mark.parametrize("M", [1, 2, 8, 9, 16])
def test_few_rows(M: int, form: Stored) -> None:
    for N, _ in SIZES:
        tile = select_few_rows(M, N, 1040, form, H200)  # K ends in a block
        assert isinstance(tile, FewRows)
        assert tile.columns == (8 if M <= 8 else 16)
        assert tile.x_rows == (1 if M == 1 else tile.columns)
        # A warp has 16 or 32 rows of the weight for itself.
        assert tile.rows * tile.splits // tile.warps in (16, 32)
        slot = tile.splits * (tile.rows * BLOCK_BYTES + tile.x_rows * form.block * 2)
        assert tile.depth * slot <= H200.shared_memory


@FORMS
@pytest.mark.parametrize("M", [1, 2, 8, 9, 16])
def test_few_rows_of_whole_blocks(M: int, form: Stored) -> None:
    for N, K in SIZES:
        tile = select_few_rows(M, N, K // 256 * 256, form, H200)
        if M == 1 and form.bits == 4:
            assert isinstance(tile, FewRows)
            continue
        assert isinstance(tile, FewRowsRing)
        assert tile.columns == (8 if M <= 8 else 16)
        assert tile.rows * tile.splits // tile.warps == 32
        slot = tile.splits * (tile.rows * BLOCK_BYTES + tile.columns * form.block * 2)
        exchanged = tile.splits * tile.rows * tile.columns * 4
        reserved = 1024  # of every program; and barriers
        assert tile.programs * (tile.depth * slot + exchanged + reserved + 256) <= H200.shared_memory + reserved


def test_small_groups_have_no_ring() -> None:
    assert isinstance(select_few_rows(16, 4096, 4096, Stored("fp4", 4, 32), H200), FewRows)


def test_the_shorter_the_weight_the_more_warps_share_its_rows() -> None:
    for M in (1, 4, 16):
        splits = [select_few_rows(M, N, 4096, INT4, H200).splits for N in (4096, 8192, 28672)]
        assert splits == sorted(splits, reverse=True)
        assert splits[0] > splits[-1]


@pytest.mark.parametrize(("N", "rows"), [(8192, 64), (10240, 32), (28672, 32), (57344, 64)])
def test_tiles_of_8_bits_are_as_large_as_makes_no_more_rounds(N: int, rows: int) -> None:
    assert select_few_rows(16, N, 4096, INT8, H200).rows == rows


@pytest.mark.parametrize(("N", "rows"), [(4096, 32), (10240, 32), (28672, 64), (57344, 32)])
def test_tiles_of_4_bits_are_as_large_as_makes_no_more_rounds(N: int, rows: int) -> None:
    assert select_few_rows(16, N, 4096, INT4, H200).rows == rows


@FORMS
@pytest.mark.parametrize("M", [17, 33, 64, 100, 200, 512, 513, 8192])
def test_tiles(M: int, form: Stored) -> None:
    for N, K in SIZES:
        tile = select_tiles(M, N, K, form, H200)
        # Shared tiles are fewer than programs, after rounds of whole ones.
        assert 0 <= tile.shared <= MAX_SHARED < H200.num_sms
        assert (tile.shared > 0) == (tile.sharers > 0)
        if tile.shared:
            assert tile.shared <= tile.sharers <= H200.num_sms
            assert tile.sharers <= tile.shared * cdiv(K, form.block)
            assert tile.parts <= MAX_PARTS
            assert (tile.tiles(M, N) - tile.shared) % H200.num_sms == 0


@FORMS
@pytest.mark.parametrize(("M", "N", "K"), WHOLE_AND_SHARED)
def test_some_tiles_are_shared(M: int, N: int, K: int, form: Stored) -> None:
    tile = select_tiles(M, N, K, form, H200)
    assert 0 < tile.shared < tile.tiles(M, N)


def test_slots_fit_into_shared_memory() -> None:
    for tile in TILES:
        staged = 2 * 64 * min(tile.columns, 64) * 2
        slots = tile.x_depth * tile.panels * tile.columns * 128 + tile.w_depth * TILE_ROWS * BLOCK_BYTES
        assert slots + staged + 1024 <= H200.shared_memory
        # A slot is a part of what is unpacked at a time, and there is one more than a group waits for.
        assert tile.x_depth * tile.panels > (4 if tile.unpacks_blocks else 2)


@pytest.mark.parametrize("form", [Stored("int4", 4, 128, has_zeros=True), Stored("fp4", 4, 32)])
def test_zero_points_and_small_groups_have_narrower_tiles(form: Stored) -> None:
    assert {select_tiles(M, 8192, 8192, form, H200).columns for M in (20, 64, 512, 4096)} <= {32, 64, 128}
    assert select_tiles(4096, 8192, 8192, INT4, H200).columns == 256
    assert select_tiles(4096, 8192, 8192, INT4, H200, exact=False).columns == 128


def test_programs_fill_the_device() -> None:
    tile = select_tiles(32, 4096, 4096, INT4, H200)
    assert tile.sharers > 0.7 * H200.num_sms
    # 160 tiles of 128 columns: a round of whole ones, then 28 that four programs share each.
    tile = select_tiles(578, 4096, 14336, INT4, H200)
    assert (tile.columns, tile.shared, tile.sharers) == (128, 28, 112)


def test_ways_to_share_tiles() -> None:
    """By as many programs each, or by all; never by more than there are blocks, or than a count holds."""
    tile = TILES[0]
    assert [(way.sharers, way.parts) for way in tile.shared_by(48, 132, 16)] == [(96, 2), (132, 4)]
    assert [way.sharers for way in tile.shared_by(32, 132, 3)] == [64, 96]
    assert max(way.parts for way in tile.shared_by(1, 132, 1000)) == MAX_PARTS
    assert tile.shared_by(0, 132, 16) == tile.shared_by(131, 132, 16) == []
