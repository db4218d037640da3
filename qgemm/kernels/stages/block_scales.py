"""The scales of fp8 blocks, of 128 columns and as many values along K, and of a row's 128 values, for ``Ring``'s sums.

For Hopper (sm_90), in Gluon.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.ring import MMA_ROWS, PANEL


@aggregate
class BlockScales:
    """The scales of fp8 blocks of 128 values along K, for the columns of a tile, in one block or two, and its rows.

    ``a``: the first row's first; the next row's and block's are ``stride_row`` and ``stride_a`` further. ``b``: the
    first columns' first; the next is ``stride_b`` further. Of more ``columns`` than a block has, 192, ``last_b`` is the
    last ones', and ``odd`` tiles begin with half a block. ``row``: the tile's first, of ``M``. ``blocks``: of K.
    The tile has ``MMA_ROWS`` rows, with sums of this ``layout``.
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
        """Of ``COUNT`` blocks of K, from ``k`` on: of the columns, one or two, then of the rows; 0 beyond."""
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
        """Of 192 columns, what sums of each 64 of them are multiplied by: ``factors`` of a block of K."""
        first, last = factors[0] * factors[2], factors[1] * factors[2]
        return first, gl.where(self.odd, last, first), last


@gluon.jit
def _zero(rows):
    """0 for rows that aren't negative, which the compiler doesn't know, by thread.

    What it knows to be the same in all threads it would wait for as soon as it is loaded, to have it in a register that
    they share.
    """
    code: gl.constexpr = "{ .reg .s32 own; mov.u32 own, %laneid; add.s32 own, own, $1; shr.s32 $0, own, 31; }"
    return gl.inline_asm_elementwise(code, "=r,r", [rows], gl.int32, True, 1)


@aggregate
class AllBlockScales:
    """The scales of fp8 blocks: ``a``, of rows and 128 values along K, and ``b``, of 128 columns and as many values.

    A stride of each: to the next row, or block of columns, and to the next of ``blocks`` blocks of values.
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
        """Those of a tile at ``(row, col)`` with so many columns, of ``N`` in all."""
        b = self.b + col // PANEL * self.stride_columns
        last_b = self.b + gl.minimum(col + COLUMNS - 1, N - 1) // PANEL * self.stride_columns
        return BlockScales(
            self.a, b, last_b, col % PANEL > 0, self.stride_row, self.stride_a, self.stride_b, row, M, self.blocks,
            COLUMNS, LAYOUT,
        )  # fmt: skip
