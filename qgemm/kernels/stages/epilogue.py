"""``Epilogue``: what happens to a sum before it is stored.

``activation(acc * a_scale[m] * b_scale[n] + bias[n])``, in float32, rounded once to the output's dtype. A residual is
added to the rounded value and the sum is rounded again, as two separate kernels would do. The functions accept any
layout, so Triton and Gluon kernels share them.
"""

import triton
import triton.language as tl

from qgemm.kernels.stages.aggregate import INTERPRETING, OPTIONAL, aggregate


@aggregate
class Epilogue:
    """The operands of an epilogue in memory, each of which may be None, and its activation.

    ``a_scale``: one per output row. ``b_scale``, ``bias``: one per column. With a stride of 0 all share one value.
    ``activation``: a ``@triton.jit`` function of float32 values, or None. ``residual``: of the output's shape and
    dtype, with contiguous columns; ``stride_residual`` is the stride of its rows.
    """

    a_scale: OPTIONAL
    b_scale: OPTIONAL
    bias: OPTIONAL
    stride_a: tl.tensor = 1
    stride_b: tl.tensor = 1
    stride_bias: tl.tensor = 1
    activation: tl.constexpr = None
    residual: OPTIONAL = None
    stride_residual: tl.tensor = 1

    @triton.jit
    def beyond(self, values):
        """The epilogue for the output's columns from ``values`` on. Its vectors must be contiguous."""
        bias = self.bias + values if self.bias is not None else None
        return Epilogue(self.a_scale, self.b_scale + values, bias)

    @triton.jit
    def load_scales(self, rows, cols, end, N, INDEX: tl.constexpr = tl.int32):
        """Loads the scales of ``rows`` below ``end`` and ``cols`` below ``N``. ``INDEX``: the type of offsets."""
        if self.a_scale is None:
            return 1.0, 1.0  # not used by ``apply``
        else:
            a_scale = tl.load(self.a_scale + rows.to(INDEX) * self.stride_a, mask=rows < end, other=0.0)
            b_scale = tl.load(self.b_scale + cols.to(INDEX) * self.stride_b, mask=cols < N, other=0.0)
            return a_scale, b_scale

    @triton.jit
    def apply(self, acc, scales, cols, N, INDEX: tl.constexpr = tl.int32):
        """The float32 outputs of sums ``acc`` at columns ``cols``. ``scales``: from ``load_scales``, or None."""
        if self.a_scale is not None:
            acc = scaled(acc, scales[0], scales[1])
        if self.bias is not None:
            acc = biased(acc, tl.load(self.bias + cols.to(INDEX) * self.stride_bias, mask=cols < N, other=0.0))
        if self.activation is not None:
            acc = self.activation(acc.to(tl.float32))
        return acc

    @triton.jit
    def load_residual(self, rows, cols, end, N):
        """Loads the residual ``[rows, cols]``, for rows below ``end`` and columns below ``N``."""
        pointers = self.residual + rows.to(tl.int64)[:, None] * self.stride_residual + cols[None, :]
        return tl.load(pointers, mask=(rows < end)[:, None] & (cols < N)[None, :], other=0.0)

    @triton.jit
    def store(self, acc, out, tile):
        """Stores the values of a tile of ``out``, an ``OutputView``."""
        rm, rn = tile.indices()
        scales = ()
        if self.a_scale is not None:
            scales = self.load_scales(rm, rn, out.rows, out.cols, tl.int64)
        values = self.apply(acc, scales, rn, out.cols, tl.int64)
        if self.residual is not None:
            values = added(values, self.load_residual(rm, rn, out.rows, out.cols))
        out.store(values, tile)


@triton.jit
def scaled(acc, a_scale, b_scale):
    """``acc[m, n] * a_scale[m] * b_scale[n]`` in float32."""
    return acc.to(tl.float32) * a_scale.to(tl.float32)[:, None] * b_scale.to(tl.float32)[None, :]


@triton.jit
def biased(acc, bias):
    """``acc[m, n] + bias[n]`` in float32."""
    return acc.to(tl.float32) + bias.to(tl.float32)[None, :]


@triton.jit
def added(values, residual):
    """``values``, rounded to the dtype of ``residual``, plus ``residual``; returned in float32."""
    return rounded(values, residual.dtype).to(tl.float32) + residual.to(tl.float32)


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """``values`` rounded to ``dtype``."""
    if INTERPRETING and dtype == tl.bfloat16:
        # The interpreter's own cast drops bits instead of rounding.
        values = _round_to_bfloat16(values.to(tl.float32))
    return values.to(dtype)


@triton.jit
def product(a, b):
    """``a * b`` of one dtype, rounded to it once: float32 holds the exact product of 16-bit values."""
    if INTERPRETING:
        # The interpreter can't multiply bfloat16.
        return rounded(a.to(tl.float32) * b.to(tl.float32), a.dtype)
    else:
        return a * b


@triton.jit
def _round_to_bfloat16(x):
    """``x`` rounded to bfloat16, in float32."""
    bits = x.to(tl.int32, bitcast=True)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF
    return tl.where(x == x, kept.to(tl.float32, bitcast=True), x)
