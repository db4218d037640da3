"""``weight_only_linear``: products with the quantized weights of ``qgemm.numerics.groups``; and ``float_weight``.

With float rows, a CPU dequantizes some rows of the weight at a time (``cpu.py``), and a GPU multiplies by the stored
weight (``float_launcher.py``). With int8 rows, both multiply integers (``int8_cpu.py``, ``int8_launcher.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgemm.kernels.activations import Gates
from qgemm.kernels.checks import check_weight_only_linear, on_gpu
from qgemm.kernels.cpu_rows import without_grad
from qgemm.kernels.reorder.dispatch import reorder
from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.kernels.weight_only import cpu, int8_cpu
from qgemm.numerics.groups import to_input_order_


@torch.no_grad()
def float_weight(weight: ScaledWeight, dtype: torch.dtype) -> Tensor:
    """``weight.dequantize(dtype)``; on a GPU by one kernel, unless ``dtype`` is float64."""
    if not on_gpu(weight.values) or dtype == torch.float64:
        return weight.dequantize(dtype)
    from qgemm.kernels.weight_only import float_launcher

    rows = float_launcher.float_weight(weight, dtype)
    return rows if weight.input_order is None else to_input_order_(rows, weight.input_order)


def weight_only_linear(
    x: Tensor, weight: ScaledWeight, residual: Tensor | None = None, recallable: bool = False
) -> Tensor:
    """``x @ W.T + bias`` in the dtype of ``x``; ``W`` is ``weight.dequantize`` in that dtype, or nearer to exact.

    ``x``: float ``[..., K]``. With ``weight.int8_activations``, the result is that of ``int4_int8_linear_reference``,
    and groups may have up to 131,071 values: with more, int32 may not hold a sum, and a ``ValueError`` is raised.
    ``residual``: ``[..., N]`` in the dtype of ``x``, added to the rounded product. ``recallable``: on a GPU, remember
    what was found out about the call for later calls.
    """
    x = x.resolve_neg()
    residual = None if residual is None else residual.resolve_neg()
    check_weight_only_linear(x, weight, residual)
    x = x if weight.input_order is None else reorder(x, weight.input_order)
    if not on_gpu(x):
        return _on_cpu(x, weight, residual)
    # With gradients on or off, as it came: a call is recalled in the mode that it was remembered in.
    if weight.int8_activations:
        from qgemm.kernels.weight_only import int8_launcher

        return int8_launcher.weight_only_linear(x, weight, residual, recallable=recallable)
    from qgemm.kernels.weight_only import float_launcher

    with torch.autocast(x.device.type, enabled=False):
        return float_launcher.weight_only_linear(x, weight, residual, recallable)


def weight_only_activated(x: Tensor, weight: ScaledWeight, gates: Gates) -> Tensor | None:
    """``activated(weight_only_linear(x, weight), ...)`` by one kernel, the same bits; None if none computes that.

    ``weight``: without ``int8_activations`` and ``input_order``. What was found out about the call is remembered.
    """
    if not on_gpu(x) or x.is_neg() or weight.values.shape[0] % 2:
        return None
    check_weight_only_linear(x, weight, None)
    from qgemm.kernels.weight_only import float_launcher

    return float_launcher.weight_only_activated(x, weight, gates)


@without_grad
def _on_cpu(x: Tensor, weight: ScaledWeight, residual: Tensor | None) -> Tensor:
    out = int8_cpu.weight_only_linear(x, weight) if weight.int8_activations else cpu.weight_only_linear(x, weight)
    return out if residual is None else out.add_(residual)
