"""``add_residual``: adds a residual to an output tile in shared memory, before TMA stores it. In Gluon, for Hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qgemm.kernels.stages.epilogue import added

VALUES = gl.constexpr(32)  # of the residual, that a thread loads at a time


@gluon.jit
def add_residual(staging, residual, stride, row, col, M, N):
    """Adds ``residual[row:, col:]`` to a tile in shared memory, a few rows at a time: accumulators leave few registers.

    ``residual``: ``[M, N]`` with contiguous columns. ``stride``: the stride of its rows.
    """
    ROWS: gl.constexpr = staging.shape[0]
    COLS: gl.constexpr = staging.shape[1]
    STEP: gl.constexpr = min(VALUES * 32 * gl.num_warps() // COLS, ROWS)
    # Each thread has 16 bytes of a row, and neighbouring threads neighbouring bytes.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [gl.num_warps(), 1], [1, 0])
    rows = row + gl.arange(0, STEP, gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, COLS, gl.SliceLayout(0, layout))
    for start in gl.static_range(0, ROWS, STEP):
        part, m = staging.slice(start, STEP), rows + start
        values = part.load(layout)
        pointers = residual + m.to(gl.int64)[:, None] * stride + cols[None, :]
        values = added(values, gl.load(pointers, mask=(m < M)[:, None] & (cols < N)[None, :], other=0.0))
        part.store(values.to(staging.dtype))
