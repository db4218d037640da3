"""GGUF's types ``IQ1``, ``IQ2`` and ``IQ3``: whole numbers that tables have in groups of eight, or of four.

The tables are those of the package gguf. A value is one of few numbers, times a sign, times a scale:

- ``IQ2_XXS``, ``IQ2_XS``, ``IQ2_S``: 8, 25 or 43.
- ``IQ3_XXS``: 4, 12, 20, 28, 36, 44, 52 or 62.
- ``IQ3_S``: an odd number up to 15. That is ``2 * q + 1`` with ``q`` of 4 bits: a zero point of half the scale.
- ``IQ1_S``: -1, 0 or 1, and an eighth that is added to all of a group, or taken away: a zero point.
- ``IQ1_M``: the same, but for each eight values: ``8 * q`` plus or minus 1, of 8 bits.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from qgemm.checkpoint.gguf_blocks import Blocks, fields, half


def iq2_xxs(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 66]``."""
    words = _words(blocks[:, 2:]).view(len(blocks), 8, 2)[..., 1]
    index = blocks[:, 2:].reshape(-1, 8, 8)[..., :4].flatten(1)
    codes = _signed(_entries("IQ2_XXS", index), _packed_signs(words))
    return Blocks(codes, half(blocks, 0).float() * (0.5 + (words >> 28 & 15)) * 0.25)


def iq2_xs(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 74]``."""
    words = _halfwords(blocks[:, 2:66])
    codes = _signed(_entries("IQ2_XS", words & 511), _with_parity(words >> 9))
    return Blocks(codes, half(blocks, 0).float() * (0.5 + fields(blocks[:, 66:], 4, 1)) * 0.25)


def iq2_s(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 82]``."""
    index = blocks[:, 2:34].int() | fields(blocks[:, 66:74], 2, 1).int() << 8
    codes = _signed(_entries("IQ2_S", index), blocks[:, 34:66])
    return Blocks(codes, half(blocks, 0).float() * (0.5 + fields(blocks[:, 74:], 4, 1)) * 0.25)


def iq3_xxs(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 98]``."""
    words = _words(blocks[:, 66:])
    codes = _signed(_entries("IQ3_XXS", blocks[:, 2:66]), _packed_signs(words))
    return Blocks(codes, half(blocks, 0).float() * (0.5 + (words >> 28 & 15)) * 0.5)


def iq3_s(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 110]``."""
    index = blocks[:, 2:66].int() | fields(blocks[:, 66:74], 1, 1).int() << 8
    odd = _signed(_entries("IQ3_S", index), blocks[:, 74:106])
    scale = half(blocks, 0).float() * (1 + 2 * fields(blocks[:, 106:], 4, 1).int())
    return Blocks(odd >> 1, scale * 2, scale)


def iq1_s(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 50]``."""
    words = _halfwords(blocks[:, 34:])
    index = blocks[:, 2:34].int() | _each(words, (0, 3, 6, 9), 7) << 8
    scale = half(blocks, 0).float() * (2 * (words >> 12 & 7) + 1)
    return Blocks(_entries("IQ1_S", index), scale, scale * 0.125 * (1 - 2 * (words >> 15)))


def iq1_m(blocks: Tensor) -> Blocks:
    """Blocks ``[n, 56]``: four bits of the factor are the first of each 16 that have four scales."""
    words, high = _halfwords(blocks[:, 48:]), fields(blocks[:, 32:48], 4, 1)
    bits = (words >> 12) << torch.tensor([0, 4, 8, 12], device=words.device)
    factor = bits.sum(1, keepdim=True).short().view(torch.float16).float()
    grid = _entries("IQ1_S", blocks[:, :32].int() | (high & 7).int() << 8)
    delta = (1 - 2 * (high >> 3).view(torch.int8)).repeat_interleave(8, dim=1)
    return Blocks(8 * grid + delta, factor * (2 * _each(words, (0, 3, 6, 9), 7) + 1) * 0.125)


@functools.cache
def _grid(name: str) -> Tensor:
    """The table of a type, int8 ``[entries, values]``."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    return torch.from_numpy(kind.grid[0, 0]).to(torch.int8)


def _entries(name: str, index: Tensor) -> Tensor:
    """The entries of a table at ``index``, ``[n, count]``, side by side."""
    grid = _grid(name).to(index.device)
    return grid[index.long()].flatten(1)


def _signed(values: Tensor, signs: Tensor) -> Tensor:
    """``values``, ``[n, 8 * count]``, negative where bits of ``signs``, ``[n, count]``, are set."""
    negative = fields(signs.to(torch.uint8), 1, 1).view(torch.int8)
    return values * (1 - 2 * negative)


def _packed_signs(words: Tensor) -> Tensor:
    return _with_parity(_each(words, (0, 7, 14, 21), 127))


def _with_parity(seven: Tensor) -> Tensor:
    """Bytes of seven bits and an eighth, which makes the number of those that are set even."""
    parity = seven ^ seven >> 4
    parity = parity ^ parity >> 2
    return seven | ((parity ^ parity >> 1) & 1) << 7


def _each(words: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """The fields of ``words``, ``[n, count]``, at ``shifts``: ``[n, count * len(shifts)]``."""
    return (words[..., None] >> torch.tensor(shifts, device=words.device) & mask).flatten(1)


def _words(octets: Tensor) -> Tensor:
    """int32 of each four bytes."""
    return octets.contiguous().view(torch.int32)


def _halfwords(octets: Tensor) -> Tensor:
    """The whole numbers from 0 to 65,535 of each two bytes, int32."""
    return octets.contiguous().view(torch.int16).int() & 0xFFFF
