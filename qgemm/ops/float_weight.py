"""``float_weight``: a quantized weight as floats, for a layer's gradients.

``torch.ops.qgemm.float_weight(weight, scale, zero_point, global_scale, input_order, in_features, format, group_size,
dtype)``: ``ScaledWeight.dequantize``, in one kernel on a GPU.
"""

from typing import Any

import torch
from torch import Tensor

from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.kernels.weight_only import dispatch
from qgemm.ops.declare import NO_GRADIENT, operator


def float_weight(weight: ScaledWeight, dtype: torch.dtype) -> Tensor:
    """``weight.dequantize(dtype)``: ``[N, K]``, with columns in the input's order."""
    if not weight.values.is_cuda:
        return weight.dequantize(dtype)
    out: Tensor = torch.ops.qgemm.float_weight(*weight[:5], *weight[6:9], dtype)
    return out


def _compute(*arguments: Any) -> Tensor:
    *fields, dtype = arguments
    return dispatch.float_weight(ScaledWeight.without_bias(*fields), dtype)


def _fake(weight: Tensor, *others: Any) -> Tensor:
    return weight.new_empty((weight.shape[0], others[4]), dtype=others[-1])


operator(
    "float_weight(Tensor weight, Tensor scale, Tensor? zero_point, Tensor? global_scale, Tensor? input_order, "
    "int in_features, str format, int group_size, ScalarType dtype) -> Tensor",
    compute=_compute,
    fake=_fake,
    **NO_GRADIENT,
)
