"""Values packed into words and bytes, low bits first: against shifts written out, and against compressed-tensors."""

from __future__ import annotations

import pytest
import torch

from checkpoint.foreign import needs_the_library
from qgemm.checkpoint import words
from qgemm.checkpoint.words import by_rows, pack_nibbles, pack_words, select_columns, unpack_nibbles, unpack_words


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [1, 3, 4, 7, 8, 9, 64])
def test_a_value_is_where_its_shift_says(bits: int, count: int) -> None:
    torch.manual_seed(count)
    fields = torch.randint(2**bits, (3, count), dtype=torch.uint8)
    packed = pack_words(fields, bits)
    assert packed.dtype == torch.int32
    assert list(packed.shape) == [3, -(-count * bits // 32)]
    per_word = 32 // bits
    for row, found in zip(fields.tolist(), packed.tolist(), strict=True):
        wanted = [0] * len(found)
        for i, value in enumerate(row):
            wanted[i // per_word] |= value << bits * (i % per_word)
        assert [word % 2**32 for word in found] == wanted
    assert torch.equal(unpack_words(packed, bits, count), fields)
    # Rows that don't lie one behind the other, as of a matrix packed along its columns.
    assert torch.equal(unpack_words(packed.t().contiguous().t(), bits, count), fields)
    assert torch.equal(pack_words(fields.t().contiguous().t(), bits), packed)


def test_two_values_share_a_byte() -> None:
    fields = torch.tensor([[[1, 2], [15, 0]]], dtype=torch.uint8)
    assert pack_nibbles(fields).tolist() == [[[0x21], [0x0F]]]
    assert torch.equal(unpack_nibbles(pack_nibbles(fields)), fields)
    assert torch.equal(unpack_nibbles(pack_nibbles(fields.flip(-1)), high_first=True), fields)
    octets = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for same in (octets, octets.t().contiguous().t(), octets.repeat_interleave(2, dim=1)[:, ::2]):
        values = [[value for octet in row for value in (octet % 16, octet // 16)] for row in octets.tolist()]
        assert unpack_nibbles(same).tolist() == values
    assert unpack_nibbles(octets[:2, 3:4], high_first=True).tolist() == [[0, 3], [1, 3]]


def test_columns_in_an_order() -> None:
    values = torch.arange(12, dtype=torch.uint8).view(3, 4)
    assert select_columns(values, torch.tensor([2, 0, 3])).tolist() == [[2, 0, 3], [6, 4, 7], [10, 8, 11]]
    assert select_columns(values[:0], torch.tensor([1])).shape == (0, 1)


def test_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_PIECE", 20)
    rows, taken = torch.arange(21).view(7, 3), []

    def make(some: torch.Tensor) -> torch.Tensor:
        taken.append(len(some))
        return some[:, :2] * 2

    assert torch.equal(by_rows(make, rows, 10), rows[:, :2] * 2)
    assert taken == [2, 2, 2, 1]
    assert torch.equal(by_rows(make, rows[:0], 10), rows[:0, :2])


@needs_the_library
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_compressed_tensors_packs_the_same(bits: int, dim: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    fields = torch.randint(2**bits, (9, 13), dtype=torch.uint8)
    theirs = pack_to_int32((fields.int() - 2 ** (bits - 1)).to(torch.int8), bits, dim)
    ours = pack_words(fields, bits) if dim == 1 else pack_words(fields.t(), bits).t()
    assert torch.equal(ours, theirs)
