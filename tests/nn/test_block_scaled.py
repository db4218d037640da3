"""``BlockScaledLinear``: fp8 with a scale for each 128 x 128 of the weight and each 128 values of a row."""

import pytest
import torch
from torch import nn

from qgemm.kernels.reference import block_scaled_mm_reference, quantize_groups_reference
from qgemm.nn.block_scaled import BlockScaledLinear
from qgemm.numerics.blocks import BLOCK, spread_blocks

N, K = 200, 300  # short last blocks in both


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_output_is_the_reference_s(dtype: torch.dtype, device: torch.device) -> None:
    layer = BlockScaledLinear.from_linear(nn.Linear(K, N, device=device, dtype=dtype), "fp8-block")
    x = torch.randn(2, 5, K, device=device).to(dtype)
    q, scale = quantize_groups_reference(x)
    assert scale.shape == (2, 5, 3)
    weight, weight_scale = layer.stored("weight").detach(), layer.stored("weight_scale").detach()
    operands = q.view(10, K), weight, scale.view(10, 3), weight_scale, layer.bias
    exact = (q.double().view(10, K) * scale.view(10, 3).double().repeat_interleave(BLOCK, 1)[:, :K]) @ (
        weight.double() * spread_blocks(weight_scale, N, K)
    ).t() + layer.bias.double()  # type: ignore[union-attr]
    error = (block_scaled_mm_reference(*operands, dtype).double() - exact).norm()
    assert (layer(x).view(10, N).double() - exact).norm() <= 2 * error + 1e-6 * exact.norm()


def test_a_large_value_spoils_only_those_of_its_block() -> None:
    linear = nn.Linear(2 * BLOCK, 2 * BLOCK)
    with torch.no_grad():
        linear.weight[0, 0] = 1e4
    restored = BlockScaledLinear.from_linear(linear, "fp8-block").dequantize().weight
    error = (restored - linear.weight).detach().abs()
    assert error[BLOCK:].max() < 0.01
    assert error[:, BLOCK:].max() < 0.01
    assert error[:BLOCK, :BLOCK].median() > error[BLOCK:].median()


def test_nan_in_a_row_gives_nan_there_alone(device: torch.device) -> None:
    layer = BlockScaledLinear.from_linear(nn.Linear(K, N, device=device), "fp8-block")
    x = torch.randn(4, K, device=device)
    clean = layer(x)
    x[1, 7], x[3, -1] = torch.nan, torch.inf
    out = layer(x)
    assert out[[1, 3]].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


def test_a_checkpoint_s_tensors_go_straight_in() -> None:
    weight, scale = torch.randn(N, K).to(torch.float8_e4m3fn), torch.rand(2, 3) + 0.5
    layer = BlockScaledLinear(K, N, bias=False)
    layer.load_state_dict({"weight": weight, "weight_scale": scale})
    wanted = weight.float() * scale.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    assert torch.equal(layer.dequantize().weight, wanted)


def test_rows_of_a_block_have_one_scale() -> None:
    linear = nn.Linear(K, N)
    values, scale = torch.zeros(N, K, dtype=torch.float8_e4m3fn), torch.ones(N, 3)
    scale[130] = 2
    with pytest.raises(ValueError, match="weight's scale differs between rows of a block of 128"):
        BlockScaledLinear.from_linear(linear, "fp8-block", weight=(values, scale))


def test_what_it_does_not_take() -> None:
    op = torch.ops.qgemm.block_scaled_linear
    x, weight, scale = torch.randn(3, K), torch.zeros(N, K, dtype=torch.float8_e4m3fn), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"weight_scale is torch.float32 \[3, 2\]; it must be torch.float32 \[2, 3\]"):
        op(x, weight, scale.t(), None)
    with pytest.raises(TypeError, match=r"weight is torch.int8 \[200, 300\]; it must be torch.float8_e4m3fn"):
        op(x, weight.view(torch.int8), scale, None)
    with pytest.raises(ValueError, match="x has 299 columns but the layer's in_features is 300"):
        op(x[:, 1:], weight, scale, None)
