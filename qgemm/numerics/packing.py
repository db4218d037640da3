"""Groups along K with a scale each, and int4 values, eight of which are packed into an int32.

Where K is no multiple of the group's size, the last group of each row is shorter.

Packed: ``[N, ceil(K / 8)]`` int32, value k in bits ``4 * (k % 8)`` to ``4 * (k % 8) + 3`` of number ``k // 8``, as
``q + 8``; what is left over in a row's last number is 0. It is the layout of compressed-tensors' ``pack-quantized``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.numerics.formats import INT4, Format
from qgemm.numerics.integers import cdiv

PER_WORD = 32 // INT4.bits
_ZERO = -int(INT4.low)  # as which 0 is packed
# Temporaries are of so many values at a time.
_PIECE = 1 << 22

WORD_OF_ZEROS = sum(_ZERO << INT4.bits * place for place in range(PER_WORD)) - (1 << 32)
"""A packed int32 that holds eight values of 0."""


def grouped(values: Tensor, group_size: int) -> Tensor:
    """``[n, K]`` as ``[n, groups, group_size]``, the last group filled up with zeros."""
    n, K = values.shape
    count = cdiv(K, group_size)
    return F.pad(values, (0, count * group_size - K)).reshape(n, count, group_size)


def spread(scale: Tensor, group_size: int, K: int) -> Tensor:
    """The scale of each value, ``[n, K]``, from those of groups ``[n, ceil(K / group_size)]``."""
    if scale.shape[1] == 1:
        return scale.expand(-1, K)
    return scale.repeat_interleave(group_size, dim=1)[:, :K]


def quantize_groups(weight: Tensor, group_size: int, form: Format = INT4) -> tuple[Tensor, Tensor]:
    """Rounds float ``[n, K]`` to nearest: values of ``form``, ``[n, K]``, and float32 ``[n, ceil(K / group_size)]``."""
    values = weight.float()
    scale = form.scale_of(grouped(values, group_size).abs().amax(-1))
    return form.store(values / spread(scale, group_size, weight.shape[1])), scale


def pack(values: Tensor) -> Tensor:
    """int8 ``[n, K]`` from -8 to 7 as int32 ``[n, ceil(K / 8)]``."""
    octets = F.pad((values + _ZERO).view(torch.uint8), (0, -values.shape[1] % PER_WORD))
    packed = torch.empty(values.shape[0], cdiv(values.shape[1], PER_WORD), dtype=torch.int32, device=values.device)
    torch.bitwise_or(octets[:, ::2], octets[:, 1::2] << 4, out=packed.view(torch.uint8))
    return packed


def unpack(packed: Tensor, K: int) -> Tensor:
    """int8 ``[n, K]`` from int32 ``[n, ceil(K / 8)]``."""
    octets = packed.contiguous().view(torch.uint8)
    values = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)[:, :K]
    return values.view(INT4.storage) - _ZERO


def dequantize(packed: Tensor, scale: Tensor, group_size: int, K: int, dtype: torch.dtype) -> Tensor:
    """The float weight ``[n, K]``: ``q * scale`` in float32, or in float64 if that is ``dtype``, then in ``dtype``."""
    n = packed.shape[0]
    out = torch.empty(n, K, dtype=dtype, device=packed.device)
    step = max(1, _PIECE // max(K, 1))
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    for start in range(0, n, step):
        part = slice(start, start + step)
        out[part] = unpack(packed[part], K).to(exact).mul_(spread(scale[part], group_size, K))
    return out
