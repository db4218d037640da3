"""Views: a matrix or a vector in memory, as a kernel sees it.

``InputView`` and ``OutputView`` are matrices: element ``(i, j)`` lies at ``ptr + i * stride_row + j * stride_col``,
whatever the order in memory. ``ScaleView`` and ``BiasView`` are the vectors that an epilogue reads. The ``make_*``
factories build them from a kernel's arguments.

Offsets are 64-bit: a matrix may have more than 2^31 elements. Nothing is asserted about alignment or contiguity: Triton
derives both from the arguments, and a claim that doesn't hold for a partial tile would give a wrong address. A tile's
row offsets don't change along K, so the compiler hoists them out of the K loop, 64-bit or not.

An epilogue takes its bounds from the output that it stores to, never from the lengths its vectors were made with.
"""

import triton
import triton.language as tl

from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.epilogue import biased, rounded
from qgemm.kernels.stages.tile import Tile


@triton.jit
def _tile_ptrs(self, tile: Tile, wrap_rows: tl.constexpr = True, wrap_cols: tl.constexpr = True):
    """Pointers ``[block_m, block_n]`` to a tile's elements, and the mask of those inside the matrix.

    Indices are wrapped at the edges, so every pointer is valid; see ``Tile.layout``.
    """
    rm, rn, mask = tile.layout(self.rows, self.cols, wrap_rows, wrap_cols)
    rows = rm.to(tl.int64)[:, None] * self.stride_row
    cols = rn.to(tl.int64)[None, :] * self.stride_col
    return self.ptr + rows + cols, mask


@triton.jit
def _load(
    self,
    tile: Tile,
    boundary: tl.constexpr = False,
    # Triton makes other defaults compile-time values by itself, but not strings.
    cache_modifier: tl.constexpr = tl.constexpr(".cg"),
    rows: tl.constexpr = tl.constexpr("wrap"),
    cols: tl.constexpr = tl.constexpr("wrap"),
):
    """A tile's elements ``[block_m, block_n]``.

    ``boundary=True`` reads 0 beyond the edges of the matrix. Without it, ``rows`` and ``cols`` say what happens there:

    - ``"wrap"``: elements from the other side are repeated. Right for rows and columns that the store masks, wrong
      along a dimension that is summed over.
    - ``"mask"`` (rows only): gives 0 and reads nothing.
    - ``"inside"``: the caller promises that the tile lies inside.
    """
    ptrs, mask = self.tile_ptrs(tile, rows == "wrap", cols == "wrap")
    if boundary:
        return tl.load(ptrs, mask=mask, other=0.0, cache_modifier=cache_modifier)
    elif rows == "mask":
        rm, _ = tile.indices()
        return tl.load(ptrs, mask=(rm < self.rows)[:, None], other=0.0, cache_modifier=cache_modifier)
    else:
        return tl.load(ptrs, cache_modifier=cache_modifier)


@aggregate
class InputView:
    """A matrix ``rows x cols`` to read."""

    ptr: tl.tensor
    rows: tl.tensor
    cols: tl.tensor
    stride_row: tl.tensor
    stride_col: tl.tensor

    tile_ptrs = _tile_ptrs
    load = _load


@aggregate
class OutputView:
    """A matrix ``rows x cols`` to write, and to read back."""

    ptr: tl.tensor
    rows: tl.tensor
    cols: tl.tensor
    stride_row: tl.tensor
    stride_col: tl.tensor

    tile_ptrs = _tile_ptrs
    load = _load

    @triton.jit
    def store(self, data, tile: Tile, mask=None, scale=None, bias=None, activation: tl.constexpr = None):
        """Stores ``activation(data * scale + bias)``, cast to the matrix's dtype.

        ``data``: ``[block_m, block_n]``. ``scale``: a ``ScaleView`` or None. ``bias``: a ``BiasView`` or None.
        ``activation``: a ``@triton.jit`` function of the float32 values, or None. ``mask``: ``[block_m, block_n]``,
        which elements to write; elements outside the matrix are never written.
        """
        if scale is not None:
            data = scale.apply(data, tile, self.rows, self.cols)
        if bias is not None:
            data = bias.apply(data, tile, self.rows, self.cols)
        if activation is not None:
            data = activation(data.to(tl.float32))
        ptrs, inside = self.tile_ptrs(tile, False, False)
        if mask is not None:
            inside = inside & mask
        tl.store(ptrs, rounded(data, self.ptr.dtype.element_ty), mask=inside)


@aggregate
class ScaleView:
    """Scales of a quantized product: one per row (``M``) and one per column (``N``)."""

    a_scale_ptr: tl.tensor
    b_scale_ptr: tl.tensor
    M: tl.tensor
    N: tl.tensor
    stride_a: tl.tensor
    stride_b: tl.tensor

    @triton.jit
    def apply(self, acc, tile: Tile, M, N):
        """``acc * a_scale[m] * b_scale[n]`` in float32, for a tile of an ``M x N`` output."""
        return tile.scale(acc, self.a_scale_ptr, self.b_scale_ptr, M, N, self.stride_a, self.stride_b)


@aggregate
class BiasView:
    """A bias vector: one value per output column (``axis=1``, as in ``nn.Linear``) or per row (``axis=0``).

    ``N`` is the length it was made with. ``apply`` doesn't use it: the output's own size bounds the reads.
    """

    ptr: tl.tensor
    N: tl.tensor
    stride: tl.tensor
    axis: tl.constexpr = 1

    @triton.jit
    def apply(self, acc, tile: Tile, M, N):
        """``acc + bias`` in float32, for a tile of an ``M x N`` output."""
        if self.axis == 0:
            return tile.bias(acc, self.ptr, M, self.stride)
        else:
            _, rn = tile.indices()
            bias = tl.load(self.ptr + rn.to(tl.int64) * self.stride, mask=rn < N, other=0.0)
            return biased(acc, bias)


@triton.jit
def make_input_view(ptr, rows, cols, stride_row, stride_col):
    """An ``InputView``. Strides may be compile-time constants or run-time values, in any mix."""
    return InputView(ptr, rows, cols, stride_row, stride_col)


make_tensor_view = make_input_view
"""The name that ``docs/stages.md`` uses for ``make_input_view``."""


@triton.jit
def make_output_view(ptr, rows, cols, stride_row, stride_col):
    """An ``OutputView``. Strides may be compile-time constants or run-time values, in any mix."""
    return OutputView(ptr, rows, cols, stride_row, stride_col)


@triton.jit
def make_scale_view(a_scale_ptr, b_scale_ptr, M, N, stride_a=1, stride_b=1):
    """A ``ScaleView`` over ``M`` row scales and ``N`` column scales. With a stride of 0, all share one scale."""
    return ScaleView(a_scale_ptr, b_scale_ptr, M, N, stride_a, stride_b)


@triton.jit
def make_bias_view(bias_ptr, N, stride=1, axis: tl.constexpr = 1):
    """A ``BiasView`` per output column, or per row with ``axis=0``.

    The length ``N`` documents the vector; the output bounds the reads, so passing the other dimension is harmless.
    """
    return BiasView(bias_ptr, N, stride, axis)
