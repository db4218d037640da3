"""How kernels see a stored weight of 4 or 8 bits, of a layer or of experts: a value that they are compiled for."""

from dataclasses import dataclass

from qgemm.numerics.formats import FORMATS

BLOCK_BYTES = 128
"""Of a row of the weight, that are multiplied at a time."""


@dataclass(frozen=True)
class StoredForm:
    """How a weight is stored. What its scales are, their dtype says: ``stages.unpack.scale_value``."""

    name: str
    """Of the format."""
    group: int
    """Values with one scale; 0 for a row."""
    has_zeros: bool = False
    """Whether there are zero points."""
    paired: bool = False
    """Whether the scales of a block's halves are 32 bits that are loaded together."""

    @property
    def has_codebook(self) -> bool:
        """Whether values are float32 numbers of a table."""
        return FORMATS[self.name].has_codebook

    @property
    def bits(self) -> int:
        """Of a value."""
        return FORMATS[self.name].bits

    @property
    def scales_values(self) -> bool:
        """Whether scales are of so few values that these are multiplied by them, not sums of products."""
        return self.group % BLOCK_BYTES > 0

    @property
    def block(self) -> int:
        """Values of a row in ``BLOCK_BYTES``."""
        return BLOCK_BYTES * 8 // self.bits
