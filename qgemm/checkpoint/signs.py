"""Weights whose scales may be negative in files, for layers that need positive scales: moves signs into the values.

That is exact: in fp8 the sign is a bit, and in int8 every value except -128 has an opposite.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qgemm.checkpoint.contents import Contents
from qgemm.numerics.formats import INT8


def note_scaled(
    contents: Contents,
    sources: tuple[str, str],
    names: tuple[str, str],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    to_scale: Callable[[Tensor], Tensor] = Tensor.float,
    to_weight: Callable[[Tensor], Tensor] = lambda value: value,
    block: tuple[int, int] | None = None,
) -> None:
    """Notes that a weight and its scale, ``sources``, become ``names``, with the same products and positive scales.

    ``shapes``: of the weight ``[..., N, K]``, and of its scale, float32 ``[..., N]`` or one for each ``block``.
    """
    dtype = contents.stored[sources[0]].dtype
    made = {names[0]: (sources[0], shapes[0], dtype), names[1]: (sources[1], shapes[1], torch.float32)}

    def make(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return with_positive_scales(to_weight(weight), to_scale(scale), block)

    contents.convert_together(sources, made, make)


def with_positive_scales(weight: Tensor, scale: Tensor, block: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    """Returns ``weight`` and ``scale``, changed if necessary so that products stay the same and no scale is below 0.

    Raises ``ValueError`` for a -128 whose sign would have to change.
    """
    below = scale < 0
    if not bool(below.any()):
        return weight, scale
    signed = weight.clone()
    if block is None:
        signed[below] = _negated(weight[below])
    else:
        for *experts, i, j in below.nonzero().tolist():
            place = (*experts, slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            signed[place] = _negated(weight[place])
    return signed, scale.abs()


def _negated(values: Tensor) -> Tensor:
    if values.dtype != INT8.storage:
        return (values.view(torch.uint8) ^ 128).view(values.dtype)
    if bool((values == -128).any()):
        raise ValueError(
            "holds -128 in rows with a negative scale, and int8 has no 128 for the opposite one: dequantize it with "
            "its own library and quantize the float model"
        )
    return -values
