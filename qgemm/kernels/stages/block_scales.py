"""The scales of fp8 blocks for ``Ring``'s sums: of A per row and 128 values of K, of B per 128 x 128 values.

For Hopper (sm_90), in Gluon. ``AllBlockScales`` has the scales of both matrices, ``BlockScales`` those of one tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.ring import MMA_ROWS, PANEL


@aggregate
class BlockScales:
    """The scales of a tile of ``MMA_ROWS`` rows, for each block of 128 values along K.

    ``a``: a pointer to the scale of the matrix's first row in the first block of K; the next row's and the next block's
    are ``stride_row`` and ``stride_a`` further. ``b``: a pointer to the scale of the tile's first block of columns; the
    next along K is ``stride_b`` further. A tile of more ``columns`` than a block (192) spans two blocks of columns:
    ``last_b`` points to the second one's scale, and an ``odd`` tile begins with half a block. ``row``: the tile's first
    row, of ``M``. ``blocks``: the number of blocks along K. ``layout``: the layout of the tile's sums.
    """

    a: gl.tensor
    b: gl.tensor
    last_b: gl.tensor
    odd: gl.tensor
    stride_row: gl.tensor
    stride_a: gl.tensor
    stride_b: gl.tensor
    row: gl.tensor
    M: gl.tensor
    blocks: gl.tensor
    columns: gl.constexpr
    layout: gl.constexpr

    @gluon.jit
    def load(self, k, COUNT: gl.constexpr):
        """Loads the scales of ``COUNT`` blocks of K, from ``k`` on; 0 beyond the last block.

        For each block: the scale of the columns, or two of them, then a tensor with the scales of the rows.
        """
        out = ()
        for block in gl.static_range(COUNT):
            at = k + block
            inside = at < self.blocks
            row = self.row + gl.arange(0, MMA_ROWS, gl.SliceLayout(1, self.layout))
            first = self.row + gl.arange(0, 1, gl.SliceLayout(1, self.layout))
            out = out + (gl.load(self.b + at * self.stride_b + _zero(first), mask=inside, other=0.0),)
            if self.columns > PANEL:
                out = out + (gl.load(self.last_b + at * self.stride_b + _zero(first), mask=inside, other=0.0),)
            a = self.a + at * self.stride_a + row * self.stride_row
            out = out + (gl.load(a, mask=(row < self.M) & inside, other=0.0),)
        return out

    @gluon.jit
    def of_halves(self, factors):
        """The factors of each 64 columns of a tile of 192, from the ``factors`` of a block of K."""
        first, last = factors[0] * factors[2], factors[1] * factors[2]
        return first, gl.where(self.odd, last, first), last


@gluon.jit
def _zero(rows):
    """0 for rows that aren't negative, computed per thread so that the compiler doesn't know that it is 0.

    A value that the compiler knows to be the same in all threads goes to a register that they share, and the kernel
    would wait for it as soon as its load has started.
    """
    code: gl.constexpr = "{ .reg .s32 own; mov.u32 own, %laneid; add.s32 own, own, $1; shr.s32 $0, own, 31; }"
    return gl.inline_asm_elementwise(code, "=r,r", [rows], gl.int32, True, 1)


@aggregate
class AllBlockScales:
    """The scales of whole matrices: ``a`` per row and 128 values of K, ``b`` per 128 columns and 128 values of K.

    ``stride_row`` and ``stride_columns`` lead to the next row and the next block of columns, ``stride_a`` and
    ``stride_b`` to the next of ``blocks`` blocks of K.
    """

    a: gl.tensor
    b: gl.tensor
    stride_row: gl.tensor
    stride_a: gl.tensor
    stride_columns: gl.tensor
    stride_b: gl.tensor
    blocks: gl.tensor

    @gluon.jit
    def of_tile(self, row, col, M, N, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
        """The scales of the tile at ``(row, col)`` with ``COLUMNS`` columns, of an ``M x N`` output."""
        b = self.b + col // PANEL * self.stride_columns
        last_b = self.b + gl.minimum(col + COLUMNS - 1, N - 1) // PANEL * self.stride_columns
        return BlockScales(
            self.a, b, last_b, col % PANEL > 0, self.stride_row, self.stride_a, self.stride_b, row, M, self.blocks,
            COLUMNS, LAYOUT,
        )  # fmt: skip
