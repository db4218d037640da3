"""Groups, and 4-bit values: rounding, packing, and what they stand for."""

import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import (
    WORD_OF_ZEROS,
    dequantize,
    pack,
    quantize_groups,
    spread,
    unpack,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
# Below, at and beyond a word and a group; whole and ragged last groups.
WIDTHS = [1, 7, 8, 9, 31, 32, 33, 64, 70, 256]


def by_hand(weight: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales from the formula, a group at a time."""
    N, K = weight.shape
    q, scales = np.zeros((N, K), np.int8), np.ones((N, -(-K // group_size)), np.float32)
    for n in range(N):
        for g in range(scales.shape[1]):
            part = weight[n, g * group_size : (g + 1) * group_size]
            if part.any():
                scales[n, g] = max(np.float32(np.abs(part).max()) / np.float32(7.5), np.finfo(np.float32).tiny)
            q[n, g * group_size : (g + 1) * group_size] = np.clip(np.round(part / scales[n, g]), -8, 7)
    return q, scales


@pytest.mark.parametrize("group_size", [1, 32, 128])
@pytest.mark.parametrize("K", WIDTHS)
def test_quantize_groups(K: int, group_size: int, device: torch.device) -> None:
    weight = torch.randn(5, K, device=device) * torch.logspace(-3, 3, 5, device=device)[:, None]
    weight[2, : K // 2] = 0
    q, scale = quantize_groups(weight, group_size)
    wanted, scales = by_hand(weight.cpu().numpy(), group_size)
    assert np.array_equal(q.cpu().numpy(), wanted)
    assert np.array_equal(scale.cpu().numpy(), scales)
    assert scale.shape == (5, cdiv(K, group_size))
    error = (q * spread(scale, group_size, K) - weight).abs()
    assert (error <= spread(scale, group_size, K) * (0.5 + 1e-6)).all()


@DTYPES
def test_sixteen_bit_weights_are_rounded_as_the_floats_they_are(dtype: torch.dtype, device: torch.device) -> None:
    weight = torch.randn(5, 70, device=device).to(dtype)
    for mine, wanted in zip(quantize_groups(weight, 32), quantize_groups(weight.float(), 32), strict=True):
        assert torch.equal(mine, wanted)


def test_the_largest_value_of_either_sign(device: torch.device) -> None:
    q, scale = quantize_groups(torch.tensor([[7.5, 1.0], [-7.5, 1.0]], device=device), 2)
    assert q.tolist() == [[7, 1], [-8, 1]]
    assert scale.tolist() == [[1.0], [1.0]]


def test_tiny_and_zero_groups(device: torch.device) -> None:
    weight = torch.tensor([[1e-44, -1e-44, 0, 0]], device=device)
    q, scale = quantize_groups(weight, 2)
    assert q.tolist() == [[0, 0, 0, 0]]
    assert scale.tolist() == [[torch.finfo(torch.float32).tiny, 1.0]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_has_no_scale(value: float, device: torch.device) -> None:
    weight = torch.randn(2, 64, device=device)
    weight[1, 40] = value
    _, scale = quantize_groups(weight, 32)
    assert scale.isnan().tolist() == [[False, False], [False, True]]


@pytest.mark.parametrize("K", WIDTHS)
def test_packing(K: int, device: torch.device) -> None:
    values = torch.randint(-8, 8, (5, K), dtype=torch.int8, device=device)
    packed = pack(values)
    assert packed.dtype == torch.int32
    assert packed.shape == (5, cdiv(K, 8))
    assert torch.equal(unpack(packed, K), values)
    for row, numbers in zip(values.tolist(), packed.tolist(), strict=True):
        wanted = [sum((q + 8) << 4 * i for i, q in enumerate(row[start : start + 8])) for start in range(0, K, 8)]
        assert [number % 2**32 for number in numbers] == wanted


@pytest.mark.skipif(sys.version_info < (3, 11), reason="compressed-tensors takes Python 3.11 or newer")
@pytest.mark.parametrize("K", WIDTHS)
def test_packing_is_that_of_compressed_tensors(K: int) -> None:
    from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32

    values = torch.randint(-8, 8, (5, K), dtype=torch.int8)
    assert torch.equal(pack(values), pack_to_int32(values, 4))
    assert torch.equal(unpack_from_int32(pack(values), 4, values.shape), values)


def test_packing_of_any_strides(device: torch.device) -> None:
    values = torch.randint(-8, 8, (32, 10), dtype=torch.int8, device=device)
    assert torch.equal(pack(values.t()), pack(values.t().contiguous()))
    packed = pack(values)
    spaced = packed.repeat_interleave(2, 1)[:, ::2]
    assert torch.equal(unpack(spaced, 10), values)


def test_a_word_of_zeros() -> None:
    assert unpack(torch.tensor([[WORD_OF_ZEROS]], dtype=torch.int32), 8).tolist() == [[0] * 8]


def test_nothing_to_pack() -> None:
    for N, K in ((0, 16), (5, 0)):
        values = torch.zeros(N, K, dtype=torch.int8)
        assert unpack(pack(values), K).shape == (N, K)
        assert quantize_groups(torch.zeros(N, K), 128)[0].shape == (N, K)
        assert dequantize(pack(values), torch.ones(N, cdiv(K, 128)), 128, K, torch.float32).shape == (N, K)


def stored(N: int, K: int, group_size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    values = torch.randint(-8, 8, (N, K), dtype=torch.int8, device=device)
    return values, pack(values), torch.rand(N, cdiv(K, group_size), device=device) + 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dequantize(dtype: torch.dtype, device: torch.device) -> None:
    values, packed, scale = stored(9, 70, 32, device)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    wanted = (values.to(exact) * spread(scale, 32, 70)).to(dtype)
    assert torch.equal(dequantize(packed, scale, 32, 70, dtype), wanted)


def test_dequantize_in_pieces(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    _, packed, scale = stored(9, 70, 32, device)
    whole = dequantize(packed, scale, 32, 70, torch.float32)
    monkeypatch.setattr("qgemm.numerics.packing._PIECE", 150)
    assert torch.equal(dequantize(packed, scale, 32, 70, torch.float32), whole)
