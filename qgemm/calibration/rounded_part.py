"""``rounded_part``: the part of a layer's input and weight that is rounded.

Under most schemes that is all of it. A rotated layer rounds ``x @ H`` and ``W @ H`` (``qgemm.numerics.hadamard``). A
layer with outlier columns rounds the other columns; the outlier columns are zeros here, which round to zeros and don't
affect a scale. Either way, the layer's output is the product of both parts, plus that of the outlier columns, which has
no error. So methods that decide weights, and code that measures errors, work on these parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgemm.calibration.method import LayerWork
from qgemm.calibration.statistics import InputStatistics
from qgemm.nn.linear_layer import linear_weight
from qgemm.numerics.hadamard import hadamard
from qgemm.scheme import TensorScheme


def rounded_part(work: LayerWork, x: Tensor) -> Tensor:
    """The part of ``x [..., K]`` that is rounded, where ``x`` is rows of the layer's weight or of its input."""
    if work.scheme.rotates:
        return hadamard(x)
    if work.outlier_columns is not None:
        return x.index_fill(-1, work.outlier_columns.to(x.device), 0)
    return x


def rounded_weight(work: LayerWork) -> Tensor:
    """The part of the layer's float weight ``[N, K]`` that is rounded."""
    return rounded_part(work, linear_weight(work.module).detach())


def rounded_moment(work: LayerWork, seen: InputStatistics) -> Tensor:
    """The second moment ``[K, K]`` of the part of the layer's input that is rounded."""
    assert seen.second_moment is not None
    return rounded_part(work, rounded_part(work, seen.second_moment).t())


def rounded_input(work: LayerWork, seen: InputStatistics, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The part of ``seen.rows / scales`` that is rounded, ``[n, K]`` in float32, before and after rounding.

    For a static scheme, the range is that of all inputs seen, or of the rows alone if the input is rotated.
    """
    assert seen.rows is not None
    scales = torch.ones_like(seen.channel_amax) if scales is None else scales
    x = rounded_part(work, seen.rows.float() / scales)
    activation = work.scheme.activation
    if activation is None:
        return x, x
    seen_amax = x.abs().max() if work.scheme.rotates else rounded_part(work, seen.channel_amax / scales).max()
    return x, _round(x, activation, seen_amax)


def _round(x: Tensor, activation: TensorScheme, amax: Tensor) -> Tensor:
    form = activation.format
    if activation.symmetric:
        amax = x.abs().amax(-1, keepdim=True) if activation.dynamic else amax
        scale = torch.where(amax > 0, amax / form.steps, 1.0)
        return form.nearest_(x / scale) * scale
    scale = (x.max().clamp(min=0) - x.min().clamp(max=0)) / form.steps
    return (x / scale).round() * scale if scale > 0 else x
