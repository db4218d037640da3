"""Products of int4 weights with quantized rows on a CPU: exact int32 sums of groups, by oneDNN.

The numbers are those of ``int4_int8_linear_reference``: sums are scaled and added in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgemm.kernels import cpu, cpu_rows
from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.numerics.groups import spread
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import HALF

# How many values of the weight are unpacked at a time: they stay in a cache.
_PIECE = 1 << 20


def weight_only_linear(x: Tensor, weight: ScaledWeight) -> Tensor:
    """``dispatch.weight_only_linear`` with int8 activations. The columns of ``x`` are in the weight's order."""
    stored, scale, zero_point, _, _, bias, K, _, group_size, _, _ = weight
    q, row_scale = cpu_rows.quantize_rows(x)
    M, N = row_scale.numel(), stored.shape[0]
    q, row_scale = q.reshape(M, K), row_scale.reshape(M, 1)
    out = x.new_empty((*x.shape[:-1], N))
    flat = out.view(M, N)
    # Each group's columns, contiguous: all pieces of the weight are multiplied by them.
    columns = [q[:, start : start + group_size].contiguous() for start in range(0, K, group_size)]
    step = max(1, _PIECE // max(K, 1))
    for start in range(0, N, step):
        part = slice(start, start + step)
        values = _unpacked(stored[part], K)
        if zero_point is not None:
            values = values - spread(zero_point[part], group_size, K)
        scales = scale[part].float()
        total = torch.zeros(M, values.shape[0], dtype=torch.float32, device="cpu")
        for g, rows in enumerate(columns):
            own = values[:, g * group_size : (g + 1) * group_size]
            total += cpu.int_mm(rows, own.t()).float().mul_(scales[:, g])
        total *= row_scale
        if bias is not None:
            total += bias[part]
        flat[:, part] = total
    return out


def _unpacked(packed: Tensor, K: int) -> Tensor:
    """The values as int8 ``[n, K]``."""
    blocks = packed.reshape(packed.shape[0], cdiv(K, 2 * HALF), HALF)
    halves = (blocks << 4).view(torch.int8) >> 4, blocks.view(torch.int8) >> 4
    return torch.stack(halves, dim=2).flatten(1)[:, :K]
