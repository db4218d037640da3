"""``SwappedEpilogue``: from sums ``[n, m]``, rows of the weight by rows of x, to outputs. For Hopper, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qgemm.kernels.stages.aggregate import OPTIONAL, aggregate
from qgemm.kernels.stages.epilogue import added


@aggregate
class SwappedEpilogue:
    """``sums[n, m] * global_scale[0] / global_scale[1] + bias[n]``, rounded, plus ``residual[m, n]``.

    Each operand may be None. The residual has contiguous columns; ``stride`` is the stride of its rows.
    """

    global_scale: OPTIONAL
    bias: OPTIONAL
    residual: OPTIONAL
    stride: gl.tensor
    M: gl.tensor
    N: gl.tensor

    @gluon.jit
    def scale(self, sums):
        """``sums`` times the global scale."""
        if self.global_scale is not None:
            sums = sums * gl.load(self.global_scale) / gl.load(self.global_scale + 1)
        return sums

    @gluon.jit
    def add(self, sums, n, m):
        """Scaled ``sums`` of rows ``n`` of the weight and ``m`` of x, plus bias and residual."""
        sums = self.add_bias(sums, n)
        if self.residual is not None:
            sums = added(sums, self.load_residual(n, m)[0])
        return sums

    @gluon.jit
    def add_bias(self, sums, n):
        """Scaled ``sums`` plus the bias."""
        if self.bias is not None:
            sums += gl.load(self.bias + n, mask=n < self.N, other=0.0).to(gl.float32)[:, None]
        return sums

    @gluon.jit
    def load_residual(self, n, m):
        """The residual at rows ``n`` of the weight and ``m`` of x, as a tuple of one; empty if there is none."""
        found = ()
        if self.residual is not None:
            there = self.residual + m.to(gl.int64)[None, :] * self.stride + n[:, None]
            inside = (n < self.N)[:, None] & (m < self.M)[None, :]
            found = found + (gl.load(there, mask=inside, other=0.0),)
        return found
