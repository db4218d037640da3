"""``weight_only_linear`` with int8 activations too: int4 weights by quantized rows, on the CPU and on a GPU.

The numbers are those of ``int4_int8_linear_reference``: exact int32 sums of groups, which are scaled and added in
float32. On the CPU products are oneDNN's; on a GPU, ``kernels/weight_only/int8_launcher.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgemm.kernels import cpu
from qgemm.kernels.checks import check_weight_only_linear, on_gpu
from qgemm.kernels.weight_only import launcher
from qgemm.numerics.groups import spread
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import HALF

# Values of the weight that are unpacked at a time: they stay in a cache.
_PIECE = 1 << 20


@torch.no_grad()
def weight_only_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    input_order: Tensor | None,
    bias: Tensor | None,
    in_features: int,
    format: str,
    group_size: int,
    int8_activations: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """As ``weight_only.launcher`` has it; with ``int8_activations``, as ``int4_int8_linear`` has it."""
    others = scale, zero_point, global_scale, input_order, bias, in_features, format, group_size
    if not int8_activations:
        return launcher.weight_only_linear(x, weight, *others, residual=residual)
    check_weight_only_linear(x, weight, *others, int8_activations, residual)
    x = x if input_order is None else x.index_select(-1, input_order)
    out = int4_int8_linear(x, weight, scale, zero_point, bias, in_features, group_size)
    return out if residual is None else out.add_(residual)


@torch.no_grad()
def int4_int8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    in_features: int,
    group_size: int,
    recallable: bool = False,
) -> Tensor:
    """``x_scale * sum over groups g of (x_q @ (q - z).T)[g] * scale[g] + bias`` in the dtype of ``x``.

    Of checked arguments: ``x``: float ``[..., K]``, ``K`` being ``in_features``. ``weight``: int4, packed. ``scale``:
    in float ``[N, ceil(K / group_size)]``. ``recallable``: remember what is found out about the call, for others.
    """
    if on_gpu(x):
        from qgemm.kernels.weight_only import int8_launcher

        operands = weight, scale, zero_point, bias
        return int8_launcher.int4_int8_linear(x, *operands, in_features, group_size, recallable=recallable)
    K, N = in_features, weight.shape[0]
    q, row_scale = cpu.quantize_rows(x)
    M = row_scale.numel()
    q, row_scale = q.reshape(M, K), row_scale.reshape(M, 1)
    out = x.new_empty((*x.shape[:-1], N))
    flat = out.view(M, N)
    # Each group's columns together, which all pieces of the weight are multiplied by.
    columns = [q[:, start : start + group_size].contiguous() for start in range(0, K, group_size)]
    step = max(1, _PIECE // max(K, 1))
    for start in range(0, N, step):
        part = slice(start, start + step)
        values = _unpacked(weight[part], K)
        if zero_point is not None:
            values = values - spread(zero_point[part], group_size, K)
        scales = scale[part].float()
        total = torch.zeros(M, values.shape[0])
        for g, rows in enumerate(columns):
            own = values[:, g * group_size : (g + 1) * group_size]
            total += cpu.int_mm(rows, own.t()).float().mul_(scales[:, g])
        total *= row_scale
        if bias is not None:
            total += bias[part]
        flat[:, part] = total
    return out


def _unpacked(packed: Tensor, K: int) -> Tensor:
    """int8 ``[n, K]``."""
    blocks = packed.reshape(packed.shape[0], cdiv(K, 2 * HALF), HALF)
    halves = (blocks << 4).view(torch.int8) >> 4, blocks.view(torch.int8) >> 4
    return torch.stack(halves, dim=2).flatten(1)[:, :K]
