"""The types of GGUF's tensors: what a block of a row holds, and how it becomes whole numbers, scales and zero points.

A row is a sequence of blocks, each of 32 values or, in most types, of 256. Types that are read here are ``q * scale``
or ``q * scale + zero_point`` with whole ``q``: ``gguf_blocks.py`` and ``gguf_grids.py`` decode them. ``q`` has 4 bits
if it fits, else 8, and is stored as the format says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from qgemm.checkpoint import gguf_blocks as blocks
from qgemm.checkpoint import gguf_grids as grids
from qgemm.numerics.groups import SCALE_DTYPES, dequantize, store_values, stored_weight
from qgemm.scheme import QuantScheme, resolve_scheme

# Temporaries have this many values at a time.
_PIECE = 1 << 22


class Parts(NamedTuple):
    """A layer's parameters: the ``weight`` as it is stored, scales and zero points ``[N, groups]``, a global scale."""

    weight: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None


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
    decode: Callable[[Tensor], blocks.Blocks] | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether it isn't one of plain numbers."""
        return self.code == "U8"

    @cached_property
    def scheme(self) -> QuantScheme:
        """The scheme that computes it."""
        return resolve_scheme(self.scheme_name)

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """The size of a tensor of ``shape``."""
        return math.prod(shape) // self.values * self.nbytes

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which a tensor of ``shape`` is read."""
        return (*shape[:-1], shape[-1] // self.values * self.nbytes) if self.is_quantized else shape

    def part_shapes(
        self, N: int, K: int, scheme: QuantScheme | None = None
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the parameters that ``parts`` returns for a weight ``[N, K]``, by name."""
        weight = (scheme or self.scheme).weight
        grid = (N, K // _group_size(scheme or self.scheme))
        scale = SCALE_DTYPES[weight.scale_dtype] if weight.dtype == "fp4" else torch.float32
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "weight": stored_weight(N, K, weight.format),
            "weight_scale": (grid, torch.float16 if scheme is None and self.name in _HALF_SCALES else scale),
        }
        if not weight.symmetric:
            found["weight_zero_point"] = (grid, torch.float32)
        if self.has_global_scale:
            found["weight_global_scale"] = ((2,), torch.float32)
        return found

    @property
    def has_global_scale(self) -> bool:
        """Whether a number in a tensor of its own multiplies all scales of a weight."""
        return self.scheme.weight.scale_dtype == "e4m3"

    def group_order(self, columns: Tensor) -> Tensor | None:
        """The order of groups of values if a weight's ``columns`` are put in that order; None if groups are divided."""
        size = _group_size(self.scheme)
        if len(columns) % size:
            return None
        groups = columns.reshape(-1, size)
        order = groups[:, 0] // size
        whole = order[:, None] * size + torch.arange(size, device=columns.device)
        return order if torch.equal(groups, whole) else None

    def parts(
        self,
        rows: Tensor,
        factor: Tensor | None = None,
        columns: Tensor | None = None,
        scheme: QuantScheme | None = None,
    ) -> Parts:
        """The parameters of a layer whose weight is stored as ``rows``, uint8 ``[N, bytes]``.

        ``factor``: the number that multiplies all scales, of a type that has one; None for 1. ``columns``: the order in
        which the layer has the columns, with groups as they are. ``scheme``: a ``common_scheme`` of this type and
        others; by default its own.
        """
        parts = self._all_parts(rows, columns, scheme)
        if not self.has_global_scale:
            return parts
        pair = torch.ones(2, device=rows.device)
        if factor is not None:
            pair[0] = factor.reshape(())
        return parts._replace(global_scale=pair)

    def _all_parts(self, rows: Tensor, columns: Tensor | None, scheme: QuantScheme | None) -> Parts:
        N, K = rows.shape[0], rows.shape[1] // self.nbytes * self.values
        step = max(1, _PIECE // max(K, 1))
        pieces = [self._parts(rows[start : start + step], K, columns, scheme) for start in range(0, max(N, 1), step)]
        if len(pieces) == 1:
            return pieces[0]
        zeros = [piece.zero_point for piece in pieces if piece.zero_point is not None]
        weight, scale = torch.cat([piece.weight for piece in pieces]), torch.cat([piece.scale for piece in pieces])
        return Parts(weight, scale, torch.cat(zeros) if zeros else None)

    def _parts(self, rows: Tensor, K: int, columns: Tensor | None, scheme: QuantScheme | None) -> Parts:
        assert self.decode is not None
        n = rows.shape[0]
        codes, scale, zeros = self.decode(rows.reshape(-1, self.nbytes))
        codes, scale = codes.reshape(n, K), scale.reshape(n, -1)
        zeros = None if zeros is None else zeros.reshape(n, -1)
        if columns is not None:
            order = self.group_order(columns)
            assert order is not None
            codes, scale = codes[:, columns], scale[:, order]
            zeros = None if zeros is None else zeros[:, order]
        weight = self.scheme.weight
        if scheme is not None:
            times, weight = _group_size(self.scheme) // _group_size(scheme), scheme.weight
            scale = scale.float().repeat_interleave(times, dim=1)
            zeros = None if zeros is None else zeros.repeat_interleave(times, dim=1)
            zeros = torch.zeros_like(scale) if zeros is None and not weight.symmetric else zeros
        return Parts(store_values(codes, weight.format), scale, zeros)

    def dequantize(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The floats ``[..., K]`` that ``rows``, uint8 ``[..., bytes]``, stand for: in float32, then in ``dtype``.

        Raises ``ValueError`` for scales that are NaN or Inf.
        """
        weight, K = self.scheme.weight, rows.shape[-1] // self.nbytes * self.values
        values, scale, zeros, factor = self.parts(rows.reshape(-1, rows.shape[-1]))
        is_finite = scale != 255 if scale.dtype == torch.uint8 else scale.float().isfinite()
        if not bool(is_finite.all()) or (zeros is not None and not bool(zeros.isfinite().all())):
            raise ValueError("it holds NaN or Inf; the file is damaged: get it again")
        floats = dequantize(values, scale, zeros, factor, weight.format, _group_size(self.scheme), K, dtype)
        return floats.reshape(*rows.shape[:-1], K)


def _group_size(scheme: QuantScheme) -> int:
    assert scheme.weight.group_size is not None  # blocks have
    return scheme.weight.group_size


def common_scheme(kinds: Sequence[BlockType]) -> QuantScheme | None:
    """The scheme of a layer whose rows are of these types, each with its own values; None if there is none.

    It has the bits of the largest, the groups of the smallest, and zero points if one has them.
    """
    weights = [kind.scheme.weight for kind in kinds if kind.is_quantized]
    if len(weights) < len(kinds) or any(weight.dtype not in ("int4", "int8") for weight in weights):
        return None
    name = "int8-weight" if any(weight.dtype == "int8" for weight in weights) else "int4"
    size = min(_group_size(kind.scheme) for kind in kinds)
    return resolve_scheme(f"{name}-{size}{'' if all(weight.symmetric for weight in weights) else '-float-zeros'}")


_KNOWN = {
    0: BlockType("F32", 1, 4, "F32"),
    1: BlockType("F16", 1, 2, "F16"),
    2: BlockType("Q4_0", 32, 18, "U8", "int4-32", blocks.q4_0),
    3: BlockType("Q4_1", 32, 20, "U8", "int4-32-float-zeros", blocks.q4_1),
    6: BlockType("Q5_0", 32, 22, "U8", "int8-weight-32", blocks.q5_0),
    7: BlockType("Q5_1", 32, 24, "U8", "int8-weight-32-float-zeros", blocks.q5_1),
    8: BlockType("Q8_0", 32, 34, "U8", "int8-weight-32", blocks.q8_0),
    10: BlockType("Q2_K", 256, 84, "U8", "int4-16-float-zeros", blocks.q2_k),
    11: BlockType("Q3_K", 256, 110, "U8", "int4-16", blocks.q3_k),
    12: BlockType("Q4_K", 256, 144, "U8", "int4-32-float-zeros", blocks.q4_k),
    13: BlockType("Q5_K", 256, 176, "U8", "int8-weight-32-float-zeros", blocks.q5_k),
    14: BlockType("Q6_K", 256, 210, "U8", "int8-weight-16", blocks.q6_k),
    16: BlockType("IQ2_XXS", 256, 66, "U8", "int8-weight-32", grids.iq2_xxs),
    17: BlockType("IQ2_XS", 256, 74, "U8", "int8-weight-16", grids.iq2_xs),
    18: BlockType("IQ3_XXS", 256, 98, "U8", "int8-weight-32", grids.iq3_xxs),
    19: BlockType("IQ1_S", 256, 50, "U8", "int4-32-float-zeros", grids.iq1_s),
    20: BlockType("IQ4_NL", 32, 18, "U8", "int8-weight-32", blocks.iq4_nl),
    21: BlockType("IQ3_S", 256, 110, "U8", "int4-32-float-zeros", grids.iq3_s),
    22: BlockType("IQ2_S", 256, 82, "U8", "int8-weight-16", grids.iq2_s),
    23: BlockType("IQ4_XS", 256, 136, "U8", "int8-weight-32", blocks.iq4_xs),
    24: BlockType("I8", 1, 1, "I8"),
    25: BlockType("I16", 1, 2, "I16"),
    26: BlockType("I32", 1, 4, "I32"),
    27: BlockType("I64", 1, 8, "I64"),
    28: BlockType("F64", 1, 8, "F64"),
    29: BlockType("IQ1_M", 256, 56, "U8", "int8-weight-16", grids.iq1_m),
    30: BlockType("BF16", 1, 2, "BF16"),
    34: BlockType("TQ1_0", 256, 54, "U8", "int4-256", blocks.tq1_0),
    35: BlockType("TQ2_0", 256, 66, "U8", "int4-256", blocks.tq2_0),
    39: BlockType("MXFP4", 32, 17, "U8", "mxfp4", blocks.mxfp4),
    40: BlockType("NVFP4", 64, 36, "U8", "nvfp4", blocks.nvfp4),
    41: BlockType("Q1_0", 128, 18, "U8", "int4", blocks.q1_0),
}
# Types of the library's own use.
_UNREAD = {9: ("Q8_1", 32, 40), 15: ("Q8_K", 256, 292)}
TYPES = _KNOWN | {number: BlockType(*about) for number, about in _UNREAD.items()}
"""The types by their numbers in files."""

# Of those whose scale is a number of the file, not a product.
_HALF_SCALES = ("Q1_0", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "TQ1_0", "TQ2_0")
