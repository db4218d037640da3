"""Two codes of 4 bits in a byte.

A row's K codes are cut in blocks of 256, and byte ``j`` of a block is ``code[j] | code[j + 128] << 4``. What is left
over in the last block is filled up. So ``[N, K]`` codes are uint8 ``[N, 128 * ceil(K / 256)]``.

It is the layout for tensor cores: the two masks ``(p << 4) & 0xF0F0F0F0`` and ``p & 0xF0F0F0F0`` make eight int8 of a
32-bit word, each 16 times an int4, in the order in which the words of a tile are read; and with a scale for each 128
values all low nibbles of a tile have one scale, and all high ones.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.numerics.integers import cdiv

HALF = 128
"""How far apart the two codes in a byte are."""


def packed_width(K: int) -> int:
    """The bytes of a row of ``K`` codes."""
    return cdiv(K, 2 * HALF) * HALF


def pack_codes(codes: Tensor, fill: int = 0) -> Tensor:
    """uint8 ``[N, K]``, from 0 to 15, as uint8 ``[N, packed_width(K)]``. ``fill``: the code after the last ones."""
    n, K = codes.shape
    blocks = F.pad(codes, (0, -K % (2 * HALF)), value=fill).view(n, cdiv(K, 2 * HALF), 2, HALF)
    # low | high << 4, in one step, which takes a CPU a quarter of the time.
    return torch.add(blocks[:, :, 0], blocks[:, :, 1], alpha=16).view(n, packed_width(K))


def unpack_codes(packed: Tensor, K: int) -> Tensor:
    """uint8 ``[N, K]`` from uint8 ``[N, packed_width(K)]``."""
    blocks = packed.reshape(packed.shape[0], cdiv(K, 2 * HALF), HALF)
    return torch.stack((blocks & 15, blocks >> 4), dim=2).flatten(1)[:, :K]
