"""Codes of 4 bits, two in a byte."""

import pytest
import torch

from qgemm.numerics.packing import HALF, pack_codes, packed_width, unpack_codes

# Below, at and beyond half a block and a block.
WIDTHS = [1, 31, 127, 128, 129, 255, 256, 257, 700]


@pytest.mark.parametrize("K", WIDTHS)
def test_packing(K: int, device: torch.device) -> None:
    codes = torch.randint(16, (5, K), dtype=torch.uint8, device=device)
    packed = pack_codes(codes, fill=7)
    assert packed.dtype == torch.uint8
    assert packed.shape == (5, packed_width(K))
    assert torch.equal(unpack_codes(packed, K), codes)
    for row, octets in zip(codes.tolist(), packed.tolist(), strict=True):
        row += [7] * (-K % 256)
        wanted = [row[start + j] + 16 * row[start + 128 + j] for start in range(0, len(row), 256) for j in range(128)]
        assert octets == wanted


def test_any_strides(device: torch.device) -> None:
    codes = torch.randint(16, (300, 10), dtype=torch.uint8, device=device)
    assert torch.equal(pack_codes(codes.t()), pack_codes(codes.t().contiguous()))
    packed = pack_codes(codes)
    assert torch.equal(unpack_codes(packed.repeat_interleave(2, 1)[:, ::2], 10), codes)
    assert pack_codes(torch.zeros(2 * HALF, 8, dtype=torch.uint8, device=device).t()).is_contiguous()


def test_nothing_to_pack() -> None:
    for N, K in ((0, 16), (5, 0)):
        assert unpack_codes(pack_codes(torch.zeros(N, K, dtype=torch.uint8)), K).shape == (N, K)
