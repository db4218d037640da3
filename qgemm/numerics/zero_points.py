"""Zero points of asymmetrically quantized activations, and their contribution to a product.

With ``x ~ (q - z) * s``, where ``z`` is the zero point, and a weight ``w * w_scale``:

    x @ W.T + b = (q @ w.T) * s * w_scale + (b - z * s * w_scale * sum_k w)

The last term is the same for every row of ``x``, so it is computed once and stored as the bias. It may be a thousand
times as large as the result, and much of it cancels, so it is kept in float32 whatever the model's dtype. There, its
rounding error and that of the product amount to 2^-23 of it, which is a small part of a step of ``q``: a step is 2^-8
of the range of ``x``, and a sum of many terms is off by about the root of their number of steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgemm.numerics.formats import INT8, MIN_SCALE

_FORMAT = INT8.asymmetric
ZERO_POINTS = f"a whole number, {_FORMAT.low} to {_FORMAT.high}"
"""The description of a valid zero point in errors."""

# Temporaries have this many values at a time.
_PIECE = 1 << 24


def range_to_scale(low: float, high: float) -> tuple[float, int]:
    """``(scale, zero point)`` for values from ``low``, at most 0, to ``high``, at least 0; ``(1, 0)`` if both are 0.

    ``scale = (high - low) / 255`` and ``zero point = round(-128 - low / scale)``, so that 0 is stored exactly.
    """
    scale = max((high - low) / _FORMAT.steps, MIN_SCALE)
    if not high > low:
        return 1.0, 0
    return scale, int(max(_FORMAT.low, min(_FORMAT.high, round(_FORMAT.low - low / scale))))


def correction(weight: Tensor, weight_scale: Tensor, input_scale: Tensor, zero_point: Tensor) -> Tensor:
    """``z * s * weight_scale * sum_k weight``: float64 ``[N]``, from int8 ``[N, K]`` and float32 ``[N]``."""
    sums = torch.empty(weight.shape[0], dtype=torch.float64, device=weight.device)
    step = max(1, _PIECE // max(weight.shape[1], 1))
    for start in range(0, weight.shape[0], step):
        part = slice(start, start + step)
        sums[part] = weight[part].sum(1, dtype=torch.int64).double()
    return sums * weight_scale.double() * input_scale.double() * zero_point.double()


def is_zero_point(value: float) -> bool:
    """Whether ``value`` is one of ``ZERO_POINTS``."""
    return value.is_integer() and _FORMAT.low <= value <= _FORMAT.high
