"""Products with 4-bit weights, whose groups and layout are those of ``qgemm.numerics.packing``.

There is no kernel that multiplies by such a weight yet: ``packed_linear`` makes the float weight for every call. So it
saves memory, and time only where a float weight wouldn't fit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.kernels.checks import check_packed_linear
from qgemm.numerics.packing import dequantize


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
