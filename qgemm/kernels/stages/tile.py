"""``Tile``: one block of a matrix, given by its position and shape.

Tile ``(pid_m, pid_n)`` of shape ``block_m x block_n`` covers rows ``pid_m * block_m + [0, block_m)`` and columns
``pid_n * block_n + [0, block_n)``. It may extend beyond the matrix's last row or column: ``layout`` gives the mask.
"""

import triton
import triton.language as tl

from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.epilogue import scaled


@aggregate
class Tile:
    """A tile at run-time coordinates ``(pid_m, pid_n)`` with the compile-time shape ``block_m x block_n``."""

    pid_m: tl.tensor
    pid_n: tl.tensor
    block_m: tl.constexpr
    block_n: tl.constexpr

    @triton.jit
    def indices(self):
        """Row indices ``[block_m]`` and column indices ``[block_n]``; they may lie beyond the matrix."""
        rm = self.pid_m * self.block_m + tl.arange(0, self.block_m)
        rn = self.pid_n * self.block_n + tl.arange(0, self.block_n)
        return rm, rn

    @triton.jit
    def layout(self, M, N, wrap_m: tl.constexpr = True, wrap_n: tl.constexpr = True):
        """Row indices, column indices, and the mask ``[block_m, block_n]`` of what lies in an ``M x N`` matrix.

        The mask is made from the raw indices. The indices are then wrapped (``rm % M``, ``rn % N``), so that every
        address made from them is valid even without the mask. ``wrap_m=False`` or ``wrap_n=False`` leaves a
        dimension raw where the tile is known to lie inside: a remainder in a hot loop costs instructions.
        """
        rm, rn = self.indices()
        mask = (rm < M)[:, None] & (rn < N)[None, :]
        if wrap_m:
            rm = rm % M
        if wrap_n:
            rn = rn % N
        return rm, rn, mask

    @triton.jit
    def scale(self, acc, A_scale_ptr, B_scale_ptr, M, N, stride_a=1, stride_b=1):
        """``acc * a_scale[m] * b_scale[n]`` in float32.

        ``A_scale_ptr``: one scale per row, length ``M``. ``B_scale_ptr``: one per column, length ``N``. With a stride
        of 0
        all rows (columns) share one scale.
        """
        rm, rn = self.indices()
        a_scale = tl.load(A_scale_ptr + rm.to(tl.int64) * stride_a, mask=rm < M, other=0.0)
        b_scale = tl.load(B_scale_ptr + rn.to(tl.int64) * stride_b, mask=rn < N, other=0.0)
        return scaled(acc, a_scale, b_scale)

    @triton.jit
    def bias(self, acc, bias_ptr, M, stride_bias=1):
        """``acc + bias[m]`` in float32: one value per *row*, length ``M``. ``BiasView`` does it per column."""
        rm, _ = self.indices()
        bias = tl.load(bias_ptr + rm.to(tl.int64) * stride_bias, mask=rm < M, other=0.0)
        return acc.to(tl.float32) + bias.to(tl.float32)[:, None]
