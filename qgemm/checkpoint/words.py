"""Values of a few bits packed into int32 words or bytes, low bits first, as other libraries store them.

Value i of a row is in its bits ``bits * i`` to ``bits * i + bits - 1``, counted from the lowest bit of the first word.
These are unsigned fields, from 0 up: the format defines what they stand for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.numerics.formats import INT4
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import pack_codes

# Temporaries have this many values at a time, which a CPU's cache holds from one step to the next.
_PIECE = 1 << 20


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """uint8 ``[n, count]`` from int32 ``[n, ceil(count * bits / 32)]``. ``bits``: 4 or 8."""
    octets = _contiguous(words).view(torch.uint8)
    return (unpack_nibbles(octets) if bits == 4 else octets)[:, :count].contiguous()


def pack_words(fields: Tensor, bits: int) -> Tensor:
    """int32 ``[n, ceil(count * bits / 32)]`` from uint8 ``[n, count]``; the rest of the last word is 0."""
    count = fields.shape[1]
    padded = F.pad(fields, (0, cdiv(count * bits, 32) * (32 // bits) - count))
    return _contiguous(pack_nibbles(padded) if bits == 4 else padded).view(torch.int32)


def unpack_nibbles(octets: Tensor, high_first: bool = False) -> Tensor:
    """uint8 ``[..., 2 * n]``, 0 to 15, from bytes ``[..., n]``: the low four bits first, or the high ones."""
    # Two bytes at a time: interleaving two tensors of bytes takes a CPU 3 to 4 times as long.
    pairs = octets.to(torch.int16, memory_format=torch.contiguous_format)
    first, second = (pairs >> 4, pairs << 8) if high_first else (pairs, pairs << 4)
    return second.bitwise_or_(first).bitwise_and_(0x0F0F).view(torch.uint8)


def pack_nibbles(fields: Tensor) -> Tensor:
    """Bytes ``[..., n]`` from uint8 ``[..., 2 * n]``, 0 to 15."""
    return fields[..., ::2] | fields[..., 1::2] << 4


def pack_int4(values: Tensor) -> Tensor:
    """int8 ``[N, K]`` as a layer stores int4. Raises ``ValueError`` for values that aren't from -8 to 7."""
    low, high = (0, 0) if values.numel() == 0 else (int(values.min()), int(values.max()))
    if low < -8 or high > 7:
        raise ValueError(f"its values go from {low} to {high}; those of 4 bits are from -8 to 7")
    return pack_codes(INT4.to_codes(values))


def select_columns(values: Tensor, columns: Tensor) -> Tensor:
    """``values[:, columns]``, with contiguous columns. With contiguous rows, a CPU would move values one by one."""
    return values.t().contiguous().index_select(0, columns).t()


def by_rows(make: Callable[[Tensor], Tensor], rows: Tensor, columns: int) -> Tensor:
    """``make(rows)``, a function that acts row by row, for some rows at a time. ``columns``: the values in a row."""
    step = max(1, _PIECE // max(columns, 1))
    if rows.shape[0] <= step:
        return make(rows)
    first = make(rows[:step])
    out = first.new_empty((rows.shape[0], *first.shape[1:]))
    out[:step] = first
    for start in range(step, rows.shape[0], step):
        out[start : start + step] = make(rows[start : start + step])
    return out


def _contiguous(tensor: Tensor) -> Tensor:
    # A matrix with one column counts as contiguous whatever its stride there, but then can't be viewed as bytes.
    return tensor if tensor.stride() == (tensor.shape[1], 1) else tensor.clone(memory_format=torch.contiguous_format)
