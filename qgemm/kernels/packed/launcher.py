"""Products with 4-bit weights, whose groups and layout are those of ``qgemm.numerics.packing``.

There is no kernel that multiplies by such a weight yet: ``packed_linear`` makes the float weight for every call. So it
saves memory, and time only where a float weight wouldn't fit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.kernels.checks import FLOAT_DTYPES, conversion
from qgemm.numerics.packing import dequantize, groups, words


@torch.no_grad()
def packed_linear(
    x: Tensor, weight: Tensor, scale: Tensor, in_features: int, group_size: int, bias: Tensor | None
) -> Tensor:
    """``x @ W.T + bias`` in the dtype of ``x``, where ``W`` is the weight that ``dequantize`` gives in that dtype.

    ``x``: float ``[..., K]``, ``K`` being ``in_features``. ``weight``: int32 ``[N, ceil(K / 8)]``. ``scale``: float32
    ``[N, ceil(K / group_size)]``. ``bias``: float ``[N]``. The product is PyTorch's.
    """
    check_packed_linear(x, weight, scale, in_features, group_size, bias)
    with torch.autocast(x.device.type, enabled=False):
        float_weight = dequantize(weight, scale, group_size, in_features, x.dtype)
        return F.linear(x, float_weight, None if bias is None else bias.to(x.dtype))


def check_packed_linear(
    x: Tensor, weight: Tensor, scale: Tensor, in_features: int, group_size: int, bias: Tensor | None
) -> None:
    """Raises if ``packed_linear`` can't take these."""
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"x is {x.dtype}; a quantized layer takes float16, bfloat16, float32: {conversion(x)}")
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ValueError(
            f"x has {x.shape[-1] if x.ndim else 'no'} columns but the layer's in_features is {in_features}"
        )
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}; it must be at least 1")
    N = weight.shape[0] if weight.ndim else 0
    for name, tensor, dtype, shape in (
        ("weight", weight, torch.int32, (N, words(in_features))),
        ("scale", scale, torch.float32, (N, groups(in_features, group_size))),
    ):
        if tensor.dtype != dtype or tensor.shape != shape:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be {dtype} {list(shape)}")
    if bias is not None and (bias.dtype not in FLOAT_DTYPES or bias.shape != (N,)):
        wanted = f"float16, bfloat16 or float32, [{N}]: {conversion(bias)}"
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}; it must be {wanted}")
    for name, other in (("weight", weight), ("scale", scale), ("bias", bias)):
        if other is not None and other.device != x.device:
            raise ValueError(f"x is on {x.device} but {name} is on {other.device}: move them to one device")
