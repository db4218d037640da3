"""``weight_only_linear``: products of float inputs with quantized weights, which ``qgemm.numerics.groups`` describes.

A CPU makes the float weight some rows at a time (``cpu.py``); a GPU multiplies by the stored weight (``gpu.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgemm.kernels.checks import check_weight_only_linear
from qgemm.kernels.weight_only import cpu
from qgemm.numerics.formats import FORMATS


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
    recallable: bool = False,
) -> Tensor:
    """``x[..., input_order] @ W.T + bias`` in the dtype of ``x``; ``W`` is what ``dequantize`` gives in that dtype.

    ``x``: float ``[..., K]``, ``K`` being ``in_features``. ``weight``: values of ``format``, as they are stored.
    ``scale``: ``[N, ceil(K / group_size)]``, in float or as uint8 exponents. ``zero_point``: int8 of that shape, or
    None. ``global_scale``: float32 ``[2]``, for float8 scales. ``input_order``: int32 ``[K]`` or None. ``bias``: float
    ``[N]``. ``residual``: ``[..., N]`` in the dtype of ``x``, added to the rounded product. ``recallable``:
    remember what is found out about the call on a GPU, for others.
    """
    others = scale, zero_point, global_scale, input_order, bias, in_features, format, group_size, int8_activations
    check_weight_only_linear(x, weight, *others, residual)
    with torch.autocast(x.device.type, enabled=False):
        x = x if input_order is None else x.index_select(-1, input_order)
        form = FORMATS[format]
        if x.is_cpu:
            rows = x.reshape(x.shape[:-1].numel(), in_features)
            made = cpu.multiply(rows, weight, scale, zero_point, global_scale, form, group_size)
            made = made if bias is None else made + bias.float()
            out = made.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0]).contiguous()
            return out if residual is None else out.add_(residual)
        from qgemm.kernels.weight_only import gpu

        operands = scale, zero_point, global_scale, bias, residual
        return gpu.weight_only_linear(x, weight, *operands, format, group_size, recallable)
