"""The types of GGUF's tensors: what a block of a row holds, and how it becomes whole numbers, scales and zero points.

A row is a sequence of blocks, each of 32 values or, in the types ``*_K`` and others, of 256. All types that are read
here are ``q * scale`` or ``q * scale + zero_point`` with whole ``q``:

- ``Q4_0``, ``Q5_0``, ``Q8_0``: one float16 scale per 32 values; ``Q4_1`` and ``Q5_1`` also a float16 zero point.
- ``Q2_K`` to ``Q6_K``: one float16 number per 256 values, times a whole number per 16 or 32 of them; ``Q2_K``, ``Q4_K``
  and ``Q5_K`` have zero points that are made in the same way. The products are float32, and exact.
- ``IQ4_NL``, ``IQ4_XS``: ``q`` is one of 16 numbers of 8 bits that a table has.
- ``TQ1_0``, ``TQ2_0``: ``q`` is -1, 0 or 1.
- ``MXFP4``: e2m1 values, and a power of two per 32 of them.

``q`` has 4 bits if it fits, else 8, and is stored as the format says, but for ``Q4_1`` and ``Q4_K``: their ``q`` from
0 to 15 is stored as ``q - 8``, and ``8 * scale`` is added to the zero point. That sum is rounded to float32 where it
needs more than 24 bits, by half a unit of its last place at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qgemm.numerics.formats import INT8
from qgemm.numerics.groups import dequantize, store_values
from qgemm.numerics.packing import packed_width
from qgemm.scheme import QuantScheme, resolve_scheme

# Temporaries have this many values at a time.
_PIECE = 1 << 22
# The values of IQ4_NL and IQ4_XS.
_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Blocks(NamedTuple):
    """Decoded blocks ``[n, values]``: whole numbers, or e2m1 codes, with scales and zero points ``[n, groups]``."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None = None


class Parts(NamedTuple):
    """A layer's parameters: the ``weight`` as it is stored, scales and zero points ``[N, groups]``."""

    weight: Tensor
    scale: Tensor
    zero_point: Tensor | None


@dataclass(frozen=True)
class BlockType:
    """A type: ``values`` per block, ``nbytes`` of it, ``code`` (safetensors' name of the dtype that it is read as).

    ``scheme_name``: the scheme that computes it; empty for floats and integers, and for types that can't be read.
    """

    name: str
    values: int
    nbytes: int
    code: str = "U8"
    scheme_name: str = ""
    decode: Callable[[Tensor], Blocks] | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether it isn't one of plain numbers."""
        return self.code == "U8"

    @property
    def scheme(self) -> QuantScheme:
        """The scheme that computes it."""
        return resolve_scheme(self.scheme_name)

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """The size of a tensor of ``shape``."""
        return math.prod(shape) // self.values * self.nbytes

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which a tensor of ``shape`` is read."""
        return (*shape[:-1], shape[-1] // self.values * self.nbytes) if self.is_quantized else shape

    def part_shapes(self, N: int, K: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the parameters that ``parts`` returns for a weight ``[N, K]``, by name."""
        weight = self.scheme.weight
        assert weight.group_size is not None
        small = weight.format.bits == 4
        grid = (N, K // weight.group_size)
        scale = torch.uint8 if weight.dtype == "fp4" else torch.float32
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "weight": ((N, packed_width(K)), torch.uint8) if small else ((N, K), INT8.storage),
            "weight_scale": (grid, torch.float16 if self.name in _HALF_SCALES else scale),
        }
        if not weight.symmetric:
            found["weight_zero_point"] = (grid, torch.float32)
        return found

    def parts(self, rows: Tensor) -> Parts:
        """The parameters of a layer whose weight is stored as ``rows``, uint8 ``[N, bytes]``."""
        N, blocks = rows.shape[0], rows.shape[1] // self.nbytes
        K = blocks * self.values
        step = max(1, _PIECE // max(K, 1))
        pieces = [self._parts(rows[start : start + step], K) for start in range(0, max(N, 1), step)]
        if len(pieces) == 1:
            return pieces[0]
        zeros = [piece.zero_point for piece in pieces if piece.zero_point is not None]
        weight, scale = torch.cat([piece.weight for piece in pieces]), torch.cat([piece.scale for piece in pieces])
        return Parts(weight, scale, torch.cat(zeros) if zeros else None)

    def _parts(self, rows: Tensor, K: int) -> Parts:
        assert self.decode is not None
        n = rows.shape[0]
        codes, scale, zeros = self.decode(rows.reshape(-1, self.nbytes))
        weight = store_values(codes.reshape(n, K), self.scheme.weight.format)
        return Parts(weight, scale.reshape(n, -1), None if zeros is None else zeros.reshape(n, -1))

    def dequantize(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The floats ``[..., K]`` that ``rows``, uint8 ``[..., bytes]``, stand for: in float32, then in ``dtype``.

        Raises ``ValueError`` for scales that are NaN or Inf.
        """
        weight, K = self.scheme.weight, rows.shape[-1] // self.nbytes * self.values
        assert weight.group_size is not None
        values, scale, zeros = self.parts(rows.reshape(-1, rows.shape[-1]))
        is_finite = scale != 255 if scale.dtype == torch.uint8 else scale.isfinite()
        if not bool(is_finite.all()) or (zeros is not None and not bool(zeros.isfinite().all())):
            raise ValueError("it holds NaN or Inf; the file is damaged: get it again")
        floats = dequantize(values, scale, zeros, None, weight.format, weight.group_size, K, dtype)
        return floats.reshape(*rows.shape[:-1], K)


def _half(blocks: Tensor, start: int) -> Tensor:
    """A float16 number of each block, ``[n, 1]``."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _fields(octets: Tensor, bits: int, run: int) -> Tensor:
    """Fields of ``bits`` of octets ``[n, bytes]``: the lowest of ``run`` bytes, then the next, then those of others."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=octets.device)[:, None]
    fields = (octets.reshape(len(octets), -1, 1, run) >> shifts) & ((1 << bits) - 1)
    return fields.flatten(1)


def _q4_0(blocks: Tensor) -> Blocks:
    return Blocks(_fields(blocks[:, 2:], 4, 16).view(torch.int8) - 8, _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Blocks:
    scale = _half(blocks, 0).float()
    codes = _fields(blocks[:, 4:], 4, 16).view(torch.int8) - 8
    return Blocks(codes, scale, _shifted(scale, _half(blocks, 2).float()))


def _fifth_bits(octets: Tensor) -> Tensor:
    """16 where a bit of four ``octets`` is set, for each of 32 values."""
    return _fields(octets, 1, 1) << 4


def _q5_0(blocks: Tensor) -> Blocks:
    codes = _fields(blocks[:, 6:], 4, 16) | _fifth_bits(blocks[:, 2:6])
    return Blocks(codes.view(torch.int8) - 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Blocks:
    codes = _fields(blocks[:, 8:], 4, 16) | _fifth_bits(blocks[:, 4:8])
    return Blocks(codes.view(torch.int8), _half(blocks, 0).float(), _half(blocks, 2).float())


def _q8_0(blocks: Tensor) -> Blocks:
    return Blocks(blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0))


def _q2_k(blocks: Tensor) -> Blocks:
    factors, codes = blocks[:, :16], _fields(blocks[:, 16:80], 2, 32)
    scale = _half(blocks, 80).float() * (factors & 15)
    return Blocks(codes.view(torch.int8), scale, -(_half(blocks, 82).float() * (factors >> 4)))


def _q3_k(blocks: Tensor) -> Blocks:
    low, high = _fields(blocks[:, 32:96], 2, 32), _fields(blocks[:, :32], 1, 32)
    factors = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
    scale = _half(blocks, 108).float() * (factors.view(torch.int8) - 32)
    return Blocks((low | high << 2).view(torch.int8) - 4, scale)


def _factors_k(octets: Tensor) -> tuple[Tensor, Tensor]:
    """Two whole numbers of 6 bits for each of 8 groups, from 12 bytes: of scales, and of zero points."""
    first, second, last = octets[:, :4], octets[:, 4:8], octets[:, 8:]
    of_scales = torch.cat((first & 63, (last & 15) | (first >> 2 & 48)), dim=1)
    return of_scales, torch.cat((second & 63, last >> 4 | (second >> 2 & 48)), dim=1)


def _q4_k(blocks: Tensor) -> Blocks:
    factors, of_zeros = _factors_k(blocks[:, 4:16])
    scale = _half(blocks, 0).float() * factors
    zeros = -(_half(blocks, 2).float() * of_zeros)
    return Blocks(_fields(blocks[:, 16:], 4, 32).view(torch.int8) - 8, scale, _shifted(scale, zeros))


def _q5_k(blocks: Tensor) -> Blocks:
    factors, of_zeros = _factors_k(blocks[:, 4:16])
    codes = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    scale = _half(blocks, 0).float() * factors
    return Blocks(codes.view(torch.int8), scale, -(_half(blocks, 2).float() * of_zeros))


def _q6_k(blocks: Tensor) -> Blocks:
    codes = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    return Blocks(codes.view(torch.int8) - 32, _half(blocks, 208).float() * blocks[:, 192:208].view(torch.int8))


def _looked_up(codes: Tensor) -> Tensor:
    return torch.tensor(_TABLE, dtype=torch.int8, device=codes.device)[codes.long()]


def _iq4_nl(blocks: Tensor) -> Blocks:
    return Blocks(_looked_up(_fields(blocks[:, 2:], 4, 16)), _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Blocks:
    # Four bits of eight factors side by side, and two bits of all of them in a word of 16.
    factors = _fields(blocks[:, 4:8], 4, 1) | _fields(blocks[:, 2:4], 2, 1) << 4
    scale = _half(blocks, 0).float() * (factors.view(torch.int8) - 32)
    return Blocks(_looked_up(_fields(blocks[:, 8:], 4, 16)), scale)


def _tq1_0(blocks: Tensor) -> Blocks:
    # Five values to base 3 in a byte, as a fraction of 256.
    fields = [_thirds(blocks[:, begin:end], count) for begin, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))]
    return Blocks(torch.cat(fields, dim=1).view(torch.int8) - 1, _half(blocks, 52))


def _thirds(octets: Tensor, count: int) -> Tensor:
    powers = torch.tensor([3**each for each in range(count)], dtype=torch.uint8, device=octets.device)[:, None]
    return ((octets[:, None] * powers).short() * 3 >> 8).to(torch.uint8).flatten(1)


def _tq2_0(blocks: Tensor) -> Blocks:
    return Blocks(_fields(blocks[:, :64], 2, 32).view(torch.int8) - 1, _half(blocks, 64))


def _mxfp4(blocks: Tensor) -> Blocks:
    return Blocks(_fields(blocks[:, 1:], 4, 16), blocks[:, :1])


def _shifted(scale: Tensor, zeros: Tensor) -> Tensor:
    """Zero points for ``q - 8``; products by 8 are exact, and their sum is rounded once."""
    return torch.add(zeros, scale, alpha=8)


_KNOWN = {
    0: BlockType("F32", 1, 4, "F32"),
    1: BlockType("F16", 1, 2, "F16"),
    2: BlockType("Q4_0", 32, 18, "U8", "int4-32", _q4_0),
    3: BlockType("Q4_1", 32, 20, "U8", "int4-32-float-zeros", _q4_1),
    6: BlockType("Q5_0", 32, 22, "U8", "int8-weight-32", _q5_0),
    7: BlockType("Q5_1", 32, 24, "U8", "int8-weight-32-float-zeros", _q5_1),
    8: BlockType("Q8_0", 32, 34, "U8", "int8-weight-32", _q8_0),
    10: BlockType("Q2_K", 256, 84, "U8", "int4-16-float-zeros", _q2_k),
    11: BlockType("Q3_K", 256, 110, "U8", "int4-16", _q3_k),
    12: BlockType("Q4_K", 256, 144, "U8", "int4-32-float-zeros", _q4_k),
    13: BlockType("Q5_K", 256, 176, "U8", "int8-weight-32-float-zeros", _q5_k),
    14: BlockType("Q6_K", 256, 210, "U8", "int8-weight-16", _q6_k),
    20: BlockType("IQ4_NL", 32, 18, "U8", "int8-weight-32", _iq4_nl),
    23: BlockType("IQ4_XS", 256, 136, "U8", "int8-weight-32", _iq4_xs),
    24: BlockType("I8", 1, 1, "I8"),
    25: BlockType("I16", 1, 2, "I16"),
    26: BlockType("I32", 1, 4, "I32"),
    27: BlockType("I64", 1, 8, "I64"),
    28: BlockType("F64", 1, 8, "F64"),
    30: BlockType("BF16", 1, 2, "BF16"),
    34: BlockType("TQ1_0", 256, 54, "U8", "int4-256", _tq1_0),
    35: BlockType("TQ2_0", 256, 66, "U8", "int4-256", _tq2_0),
    39: BlockType("MXFP4", 32, 17, "U8", "mxfp4", _mxfp4),
}
# Types of values that tables have in groups of eight, and types of the library's own use.
_UNREAD = {
    **{9: ("Q8_1", 32, 40), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74)},
    **{18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82)},
    **{29: ("IQ1_M", 256, 56), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18)},
}
TYPES = _KNOWN | {number: BlockType(*about) for number, about in _UNREAD.items()}
"""The types by their numbers in files."""

READ_TYPES = [kind.name for kind in _KNOWN.values() if kind.is_quantized]
"""The names of quantized types that are read."""

# Of those whose scale is a number of the file, not a product.
_HALF_SCALES = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "TQ1_0", "TQ2_0")
