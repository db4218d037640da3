"""Blocks of GGUF's types ``Q*``, ``TQ*``, ``IQ4*``, ``MXFP4``, ``NVFP4``: their bytes as numbers, scales, zero points.

A block has 32 values or, in the types ``*_K`` and others, 256:

- ``Q4_0``, ``Q5_0``, ``Q8_0``: one float16 scale per 32 values; ``Q4_1`` and ``Q5_1`` also a float16 zero point.
- ``Q2_K`` to ``Q6_K``: one float16 number per 256 values, times a whole number per 16 or 32 of them; ``Q2_K``, ``Q4_K``
  and ``Q5_K`` have zero points that are made in the same way. The products are float32, and exact.
- ``IQ4_NL``, ``IQ4_XS``: ``q`` is one of 16 numbers of 8 bits that a table has.
- ``TQ1_0``, ``TQ2_0``: ``q`` is -1, 0 or 1; ``Q1_0``, of 128 values: -1 or 1.
- ``MXFP4``: e2m1 values, and a power of two per 32 of them; ``NVFP4``, of 64 values: an e4m3 scale per 16.

The functions accept uint8 ``[n, bytes of a block]``. ``q`` of ``Q4_1`` and ``Q4_K``, from 0 to 15, becomes ``q - 8``,
and ``8 * scale`` is added to the zero point. That sum is rounded to float32 where it needs more than 24 bits, by half a
unit of its last place at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qgemm.numerics.formats import FP8

# The first of e4m3's bytes that is no positive number.
_NAN = 0x7F
# The values of IQ4_NL and IQ4_XS.
_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Blocks(NamedTuple):
    """Decoded blocks ``[n, values]``: whole numbers, or e2m1 codes, with scales and zero points ``[n, groups]``."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None = None


def half(blocks: Tensor, start: int) -> Tensor:
    """A float16 number of each block, ``[n, 1]``."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def fields(octets: Tensor, bits: int, run: int) -> Tensor:
    """Fields of ``bits`` of octets ``[n, bytes]``: the lowest of ``run`` bytes, then the next, then those of others."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=octets.device)[:, None]
    fields = (octets.reshape(len(octets), -1, 1, run) >> shifts) & ((1 << bits) - 1)
    return fields.flatten(1)


def q4_0(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 18]``."""
    return Blocks(fields(blocks[:, 2:], 4, 16).view(torch.int8) - 8, half(blocks, 0))


def q4_1(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 20]``."""
    scale = half(blocks, 0).float()
    codes = fields(blocks[:, 4:], 4, 16).view(torch.int8) - 8
    return Blocks(codes, scale, _shifted(scale, half(blocks, 2).float()))


def _fifth_bits(octets: Tensor) -> Tensor:
    """16 where a bit of four ``octets`` is set, for each of 32 values."""
    return fields(octets, 1, 1) << 4


def q5_0(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 22]``."""
    codes = fields(blocks[:, 6:], 4, 16) | _fifth_bits(blocks[:, 2:6])
    return Blocks(codes.view(torch.int8) - 16, half(blocks, 0))


def q5_1(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 24]``."""
    codes = fields(blocks[:, 8:], 4, 16) | _fifth_bits(blocks[:, 4:8])
    return Blocks(codes.view(torch.int8), half(blocks, 0).float(), half(blocks, 2).float())


def q8_0(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 34]``."""
    return Blocks(blocks[:, 2:].contiguous().view(torch.int8), half(blocks, 0))


def q2_k(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 84]``."""
    factors, codes = blocks[:, :16], fields(blocks[:, 16:80], 2, 32)
    scale = half(blocks, 80).float() * (factors & 15)
    return Blocks(codes.view(torch.int8), scale, -(half(blocks, 82).float() * (factors >> 4)))


def q3_k(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 110]``."""
    low, high = fields(blocks[:, 32:96], 2, 32), fields(blocks[:, :32], 1, 32)
    factors = fields(blocks[:, 96:104], 4, 8) | fields(blocks[:, 104:108], 2, 4) << 4
    scale = half(blocks, 108).float() * (factors.view(torch.int8) - 32)
    return Blocks((low | high << 2).view(torch.int8) - 4, scale)


def _factors_k(octets: Tensor) -> tuple[Tensor, Tensor]:
    """Two whole numbers of 6 bits for each of 8 groups, from 12 bytes: of scales, and of zero points."""
    first, second, last = octets[:, :4], octets[:, 4:8], octets[:, 8:]
    of_scales = torch.cat((first & 63, (last & 15) | (first >> 2 & 48)), dim=1)
    return of_scales, torch.cat((second & 63, last >> 4 | (second >> 2 & 48)), dim=1)


def q4_k(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 144]``."""
    factors, of_zeros = _factors_k(blocks[:, 4:16])
    scale = half(blocks, 0).float() * factors
    zeros = -(half(blocks, 2).float() * of_zeros)
    return Blocks(fields(blocks[:, 16:], 4, 32).view(torch.int8) - 8, scale, _shifted(scale, zeros))


def q5_k(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 176]``."""
    factors, of_zeros = _factors_k(blocks[:, 4:16])
    codes = fields(blocks[:, 48:], 4, 32) | fields(blocks[:, 16:48], 1, 32) << 4
    scale = half(blocks, 0).float() * factors
    return Blocks(codes.view(torch.int8), scale, -(half(blocks, 2).float() * of_zeros))


def q6_k(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 210]``."""
    codes = fields(blocks[:, :128], 4, 64) | fields(blocks[:, 128:192], 2, 32) << 4
    return Blocks(codes.view(torch.int8) - 32, half(blocks, 208).float() * blocks[:, 192:208].view(torch.int8))


def _looked_up(codes: Tensor) -> Tensor:
    return torch.tensor(_TABLE, dtype=torch.int8, device=codes.device)[codes.long()]


def iq4_nl(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 18]``."""
    return Blocks(_looked_up(fields(blocks[:, 2:], 4, 16)), half(blocks, 0))


def iq4_xs(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 136]``."""
    # Four bits of eight factors side by side, and two bits of all of them in a word of 16.
    factors = fields(blocks[:, 4:8], 4, 1) | fields(blocks[:, 2:4], 2, 1) << 4
    scale = half(blocks, 0).float() * (factors.view(torch.int8) - 32)
    return Blocks(_looked_up(fields(blocks[:, 8:], 4, 16)), scale)


def tq1_0(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 54]``."""
    # Five values to base 3 in a byte, as a fraction of 256.
    fields = [_thirds(blocks[:, begin:end], count) for begin, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))]
    return Blocks(torch.cat(fields, dim=1).view(torch.int8) - 1, half(blocks, 52))


def _thirds(octets: Tensor, count: int) -> Tensor:
    powers = torch.tensor([3**each for each in range(count)], dtype=torch.uint8, device=octets.device)[:, None]
    return ((octets[:, None] * powers).short() * 3 >> 8).to(torch.uint8).flatten(1)


def tq2_0(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 66]``."""
    return Blocks(fields(blocks[:, :64], 2, 32).view(torch.int8) - 1, half(blocks, 64))


def q1_0(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 18]``."""
    return Blocks(2 * fields(blocks[:, 2:], 1, 1).view(torch.int8) - 1, half(blocks, 0))


def mxfp4(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 17]``."""
    return Blocks(fields(blocks[:, 1:], 4, 16), blocks[:, :1])


def nvfp4(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 36]``. Scales have no sign, and none is NaN: any other byte is damage, and becomes NaN."""
    scale = blocks[:, :4]
    return Blocks(fields(blocks[:, 4:], 4, 8), scale.where(scale < _NAN, _NAN).view(FP8.storage))


def _shifted(scale: Tensor, zeros: Tensor) -> Tensor:
    """Zero points for ``q - 8``; products by 8 are exact, and their sum is rounded once."""
    return torch.add(zeros, scale, alpha=8)
