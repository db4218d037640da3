"""The tiles of products with stored weights: no tile is larger than a multiprocessor, K is shared where N is short."""

import pytest

from qgemm.kernels.weight_only.config import BLOCK_BYTES, Stored, select_few_rows, select_tiles
from qgemm.numerics.integers import cdiv
from tests.kernels.devices import H200

INT4, INT8 = Stored("int4", 4, 128), Stored("int8", 8, 0)
FORMS = pytest.mark.parametrize("form", [INT4, INT8], ids=["int4", "int8"])
SIZES = [(1, 256), (520, 300), (4096, 4096), (6144, 4096), (57344, 8192)]


def test_a_block_of_packed_values_is_twice_as_long() -> None:
    assert (INT4.block, INT8.block) == (2 * BLOCK_BYTES, BLOCK_BYTES)


@FORMS
@pytest.mark.parametrize("M", [1, 2, 8, 9, 16])
def test_few_rows(M: int, form: Stored) -> None:
    for N, _ in SIZES:
        tile = select_few_rows(M, N, form, H200)
        assert tile.columns == (8 if M <= 8 else 16)
        assert tile.x_rows in (0, 1, tile.columns)
        assert tile.x_rows != 1 or M == 1
        # A warp has 16 or 32 rows of the weight for itself.
        assert tile.rows * tile.splits // tile.warps in (16, 32)
        slot = tile.splits * (tile.rows * BLOCK_BYTES + tile.x_rows * form.block * 2)
        assert tile.depth * slot <= H200.shared_memory


def test_the_shorter_the_weight_the_more_warps_share_its_rows() -> None:
    splits = [select_few_rows(1, N, INT4, H200).splits for N in (4096, 8192, 28672)]
    assert splits == sorted(splits, reverse=True)
    assert splits[0] > splits[-1]


@FORMS
@pytest.mark.parametrize("M", [17, 33, 64, 100, 200, 512, 513, 8192])
def test_tiles(M: int, form: Stored) -> None:
    for N, K in SIZES:
        tile = select_tiles(M, N, K, form, H200)
        assert tile.columns >= min(M, 256)
        assert 1 <= tile.splits <= cdiv(K, form.block)
        assert tile.splits == 1 or M <= 512
        staged = 2 * 64 * min(tile.columns, 64) * 2
        slots = tile.x_depth * tile.columns * 128 + tile.w_depth * tile.groups * 64 * BLOCK_BYTES
        assert slots + staged <= H200.shared_memory


def test_programs_fill_the_device() -> None:
    tile = select_tiles(32, 4096, 4096, INT4, H200)
    assert cdiv(4096, 128) * tile.splits > 0.9 * H200.num_sms
