"""Mixtures of experts on the CPU: one expert at a time, with the products of ``kernels/cpu.py``."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.kernels.cpu import block_scaled_linear, scaled_mm
from qgemm.kernels.cpu_rows import quantize_rows, without_grad
from qgemm.kernels.expert_weights import ExpertWeights, WeightOnlyExperts


@without_grad
def experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights, residual: Tensor | None = None
) -> Tensor:
    """``dispatch.experts`` on the CPU: one expert at a time, so that what lies between its products stays small."""
    if weights.has_blocks:

        def run(expert: int, rows: Tensor) -> Tensor:
            own = weights.of(expert)
            h = block_scaled_linear(x[rows], own.gate_up, own.gate_up_scale, own.gate_up_bias)
            return block_scaled_linear(own.activation(h).to(x.dtype), own.down, own.down_scale, own.down_bias)

    else:
        dtype = weights.gate_up.dtype
        q, q_scale = quantize_rows(x, dtype=dtype)

        def run(expert: int, rows: Tensor) -> Tensor:
            own = weights.of(expert)
            h = scaled_mm(q[rows], own.gate_up.t(), q_scale[rows], own.gate_up_scale, own.gate_up_bias, x.dtype)
            h_q, h_scale = quantize_rows(own.activation(h).to(x.dtype), dtype=dtype)
            return scaled_mm(h_q, own.down.t(), h_scale, own.down_scale, own.down_bias, x.dtype)

    return _mixture(x, top_k_index, top_k_weights, len(weights.down), run, residual)


@without_grad
def weight_only_experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: WeightOnlyExperts, residual: Tensor | None = None
) -> Tensor:
    """``dispatch.weight_only_experts`` on the CPU: only one expert's float weight exists at a time."""

    def run(expert: int, rows: Tensor) -> Tensor:
        first, second = weights.stored(expert, expert + 1)
        biases = [None if each.bias is None else each.bias.to(x.dtype) for each in (first, second)]
        with torch.autocast(x.device.type, enabled=False):
            h = weights.activation(F.linear(x[rows], first.dequantize(x.dtype), biases[0])).to(x.dtype)
            return F.linear(h, second.dequantize(x.dtype), biases[1])

    return _mixture(x, top_k_index, top_k_weights, len(weights.down), run, residual)


def _mixture(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    E: int,
    run: Callable[[int, Tensor], Tensor],
    residual: Tensor | None,
) -> Tensor:
    """The weighted sum of the experts' outputs for their rows of ``x``, ``run(expert, rows)``, plus ``residual``."""
    k = top_k_index.shape[1]
    ids = top_k_index.flatten()
    pairs = ids.argsort(stable=True)
    ends = torch.searchsorted(ids[pairs], torch.arange(E + 1, device=ids.device)).tolist()
    y = x.new_zeros((len(ids), x.shape[1]))
    for expert, (start, end) in enumerate(pairwise(ends)):
        if start < end:
            slots = pairs[start:end]
            y[slots] = run(expert, slots // k)
    out = torch.zeros_like(x, dtype=torch.float32)
    inside = (top_k_index >= 0) & (top_k_index < E)
    for slot in range(k):
        # Instead of a product with 0: where there is no expert, a weight may be anything, even NaN.
        weight = top_k_weights[:, slot].float().masked_fill(~inside[:, slot], 0.0)
        out.add_(y[slot::k].float().mul_(weight[:, None]))
    total = out.to(x.dtype)
    return total if residual is None else residual + total
