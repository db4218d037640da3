"""Scales of blocks of 128 x 128, the last of which may be short."""

import pytest
import torch

from qgemm.numerics.blocks import BLOCK, block_scales, dequantize_blocks, round_blocks, spread_blocks
from qgemm.numerics.formats import FP8


# Whole blocks, and short last ones in both dimensions, in one, and nothing else.
@pytest.mark.parametrize(("N", "K"), [(256, 384), (130, 300), (128, 129), (5, 7)])
def test_a_block_s_scale_is_that_of_its_largest_value(N: int, K: int) -> None:
    weight = torch.randn(N, K) * torch.logspace(-3, 3, K)
    scale = block_scales(weight)
    assert scale.shape == (-(-N // BLOCK), -(-K // BLOCK))
    spread = spread_blocks(scale, N, K)
    assert spread.shape == (N, K)
    for n in range(0, N, BLOCK):
        for k in range(0, K, BLOCK):
            part = slice(n, n + BLOCK), slice(k, k + BLOCK)
            own = FP8.scale_of(weight[part].abs().max())
            assert (spread[part] == own).all()
    values = round_blocks(weight, scale)
    assert values.dtype == torch.float8_e4m3fn
    assert values.float().abs().max() == FP8.high
    error = dequantize_blocks(values, scale, torch.float64) - weight
    # Half a step of a value with four significant bits, or of the smallest step.
    assert (error.abs() <= (weight.abs() * 2**-4).maximum(spread * 2**-10) * 1.0001).all()


def test_zeros_have_scale_1_and_nan_makes_nan() -> None:
    weight = torch.zeros(130, 260)
    weight[129, 0] = torch.nan
    assert block_scales(weight).isnan().tolist() == [[False] * 3, [True, False, False]]
    assert (block_scales(weight)[0] == 1).all()
