"""``StoredForm``: how a 4- or 8-bit weight of a layer or of experts is stored; kernels are compiled for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from qgemm.numerics.formats import FORMATS

BLOCK_BYTES = 128
"""The bytes of a row of the weight that are multiplied at a time."""
WORD = 4
"""The bytes of a word."""
VECTOR = 16
"""The bytes of a row that a thread reads at a time."""
MXFP4_GROUP = 32
"""How many values of mxfp4 share a power of 2."""
WHOLE_ROW = 2**30
"""A group longer than any row, where one scale of a row can't be left to the sums."""
Precision = Literal["exact", "two", "float"]
"""How values are multiplied by scales: in the dtype of x, by two parts of a scale in that dtype, or in float32."""


@dataclass(frozen=True)
class StoredForm:
    """How a weight is stored. The meaning of its scales follows from their dtype: ``stages.unpack.scale_value``."""

    name: str
    """The name of the format."""
    group: int
    """How many values share a scale; 0 if all of a row do."""
    has_zeros: bool = False
    """Whether there are zero points."""
    float_zeros: bool = False
    """Whether they are floats, which are added to the scaled values."""
    paired: bool = False
    """Whether the scales of a block's two halves are 32 bits that may be loaded together."""
    whole: bool = False
    """Whether a row consists of whole blocks, and the scales of each of them may be copied together."""

    @classmethod
    def of(cls, name: str, group: int, zero_point: Tensor | None) -> StoredForm:
        """The form of a weight with these zero points. ``group``: 0 if all of a row share a scale."""
        float_zeros = zero_point is not None and zero_point.is_floating_point()
        if float_zeros:
            group = group or WHOLE_ROW
        return cls(name, group, has_zeros=zero_point is not None, float_zeros=float_zeros)

    def of_rows(self, K: int, scale: Tensor, zero_point: Tensor | None) -> StoredForm:
        """The form with what rows of ``K`` values, and these scales and zero points, allow kernels to load together."""
        whole = self.has_small_groups and K % self.block == 0
        if whole:
            count = self.block // self.group
            for each in (scale,) if zero_point is None else (scale, zero_point):
                aligned = each.data_ptr() % VECTOR == 0 and each.stride(-2) % count == 0
                whole = whole and aligned and count * each.itemsize >= WORD
        pairs = self.bits == 4 and self.group == BLOCK_BYTES and not self.float_zeros and K % self.block == 0
        pairs = pairs and 2 * scale.itemsize == WORD and scale.stride(-2) % 2 == 0 and scale.data_ptr() % WORD == 0
        return replace(self, paired=pairs, whole=whole)

    @property
    def has_codebook(self) -> bool:
        """Whether values are float32 numbers of a table."""
        return FORMATS[self.name].has_codebook

    @property
    def bits(self) -> int:
        """The number of bits of a value."""
        return FORMATS[self.name].bits

    @property
    def has_small_groups(self) -> bool:
        """Whether half a block has several groups."""
        return self.group % BLOCK_BYTES > 0

    @property
    def by_groups(self) -> bool:
        """Whether few rows are multiplied group by group."""
        return self.whole and self.group in (16, 32, 64)

    @property
    def scales_values(self) -> bool:
        """Whether scales multiply the values instead of sums of products: of small groups, and with float zeros."""
        return self.has_small_groups or self.float_zeros

    def precision(self, exact: bool, bfloat16: bool) -> Precision:
        """How values are multiplied by scales that are ``exact`` in the dtype of x, or not.

        Of two parts, bfloat16s of which the second is what the first lacks, each product and the sum are rounded, which
        is hardly more than one rounding. Float zeros, and float16, need float32.
        """
        return "exact" if exact else "two" if bfloat16 and not self.float_zeros else "float"

    @property
    def block(self) -> int:
        """The number of a row's values in ``BLOCK_BYTES``."""
        return BLOCK_BYTES * 8 // self.bits
