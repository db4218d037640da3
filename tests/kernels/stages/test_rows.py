"""The quantization of rows that don't lie in memory as they are quantized: a source is all that it takes."""

import pytest
import torch
import triton
import triton.language as tl

from qgemm.kernels.activations import GPT_OSS, GatedActivation
from qgemm.kernels.reference import quantize_rows_reference
from qgemm.kernels.stages.activations import DEVICE_ACTIVATIONS
from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.epilogue import rounded
from qgemm.kernels.stages.rows import GatedRow, RowQuantization, quantize_row


@aggregate
class NormalizedRow:
    """``x * factor * weight``, as a norm before a layer gives it."""

    ptr: tl.tensor
    length: tl.tensor
    factor: tl.tensor
    weight: tl.tensor
    unroll: tl.constexpr = 1

    @triton.jit
    def load(self, k):
        x = tl.load(self.ptr + k, mask=k < self.length, other=0.0).to(tl.float32)
        weight = tl.load(self.weight + k, mask=k < self.length, other=0.0)
        return rounded(x * self.factor * weight, self.ptr.dtype.element_ty)


@triton.jit
def norm_kernel(x, weight, y, q, scale, K, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """``y``: the normalized rows. ``q``, ``scale``: those rows, quantized."""
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        part = tl.load(x + row * K + start + offsets, mask=start + offsets < K, other=0.0).to(tl.float32)
        squares += part * part
    source = NormalizedRow(x + row * K, K, 1.0 / tl.sqrt(tl.sum(squares, axis=0) / K + 1e-6), weight)
    quantize_row(source, RowQuantization(None), q + row * K, scale + row, offsets, BLOCKS)
    for start in range(0, K, BLOCK):
        k = start + offsets
        tl.store(y + row * K + k, source.load(k), mask=k < K)


@triton.jit
def gate_kernel(
    g, y, q, scale, K,
    FUNCTION: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    source = GatedRow(g + row * K * (2 if ACTIVATION.gated else 1), K, FUNCTION, ACTIVATION)
    quantize_row(source, RowQuantization(None), q + row * K, scale + row, offsets, BLOCKS)
    for start in range(0, K, BLOCK):
        k = start + offsets
        tl.store(y + row * K + k, source.load(k), mask=k < K)


ROWS, K = 5, 200
HELD_OR_READ_TWICE = pytest.mark.parametrize("blocks", [2, 0])


@HELD_OR_READ_TWICE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_norm_is_a_source(blocks: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = torch.randn(ROWS, K, device=device).to(dtype), torch.rand(K, device=device) + 0.5
    x[3] = 0
    x[4, 7] = torch.inf
    y, q, scale = torch.empty_like(x), torch.empty_like(x, dtype=torch.int8), torch.empty(ROWS, device=device)
    norm_kernel[(ROWS,)](x, weight, y, q, scale, K, 128, blocks)
    exact = x[:3].double()
    exact = exact / (exact.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(y[:3].double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)
    expected_q, expected_scale = quantize_rows_reference(y)
    assert torch.equal(q, expected_q)
    assert torch.equal(scale.nan_to_num(-1.0), expected_scale.nan_to_num(-1.0))


@HELD_OR_READ_TWICE
@pytest.mark.parametrize("activation", [GatedActivation(), GPT_OSS, GatedActivation("relu2", gated=False)], ids=str)
def test_a_gate_is_a_source(blocks: int, activation: GatedActivation, device: torch.device) -> None:
    g = 4 * torch.randn(ROWS, activation.columns(K), device=device)
    y = torch.empty(ROWS, K, device=device)
    q, scale = torch.empty_like(y, dtype=torch.int8), torch.empty(ROWS, device=device)
    gate_kernel[(ROWS,)](g, y, q, scale, K, DEVICE_ACTIVATIONS[activation.name], activation, 128, blocks)
    torch.testing.assert_close(y, activation(g))
    expected_q, expected_scale = quantize_rows_reference(y)
    assert torch.equal(q, expected_q)
    assert torch.equal(scale, expected_scale)
