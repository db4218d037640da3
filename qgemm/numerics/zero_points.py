"""Zero points of asymmetrically quantized activations, and what they add to a product.

With ``x ~ (q - z) * s``, where ``z`` is the zero point, and a weight ``w * w_scale``:

    x @ W.T + b = (q @ w.T) * s * w_scale + (b - z * s * w_scale * sum_k w)

The last term is the same for every row of ``x``, so it is computed once and stored as the bias. It may be a thousand
times as large as the result, and much of it is taken off again: it is kept in float32 whatever dtype the model has.
There its rounding, and that of the product, come to 2^-23 of it, a small part of a step of ``q``: steps are 2^-8 of the
range of ``x``, and a sum of many has about the root of their number of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgemm.numerics.formats import INT8, MIN_SCALE

_FORMAT = INT8.asymmetric
ZERO_POINTS = f"a whole number, {_FORMAT.low} to {_FORMAT.high}"
"""What a zero point must be, as errors say it."""

# Temporaries are of so many values at a time.
_PIECE = 1 << 24


def range_to_scale(low: float, high: float) -> tuple[float, int]:
    """``(scale, zero point)`` for values from ``low``, 0 or less, to ``high``, 0 or more; ``(1, 0)`` for zeros alone.

    ``scale = (high - low) / 255`` and ``zero point = round(-128 - low / scale)``, so that 0 is stored exactly.
    """
    scale = max((high - low) / _FORMAT.steps, MIN_SCALE)
    if not high > low:
        return 1.0, 0
    return scale, int(max(_FORMAT.low, min(_FORMAT.high, round(_FORMAT.low - low / scale))))


def correction(weight: Tensor, weight_scale: Tensor, input_scale: Tensor, zero_point: Tensor) -> Tensor:
    """``z * s * weight_scale * sum_k weight``: float64 ``[N]``, of int8 ``[N, K]`` and float32 ``[N]``."""
    sums = torch.empty(weight.shape[0], dtype=torch.float64, device=weight.device)
    step = max(1, _PIECE // max(weight.shape[1], 1))
    for start in range(0, weight.shape[0], step):
        part = slice(start, start + step)
        sums[part] = weight[part].sum(1, dtype=torch.int64).double()
    return sums * weight_scale.double() * input_scale.double() * zero_point.double()


def is_zero_point(value: float) -> bool:
    """Whether ``value`` is one of ``ZERO_POINTS``."""
    return value.is_integer() and _FORMAT.low <= value <= _FORMAT.high
