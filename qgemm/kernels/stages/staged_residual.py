"""``add_residual``: to a tile of outputs in shared memory, before the copy engine stores it. In Gluon, for Hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qgemm.kernels.stages.epilogue import added

VALUES = gl.constexpr(32)  # of a residual, that a thread loads at a time


@gluon.jit
def add_residual(staging, epilogue, row, col, M, N):
    """Adds the residual of ``epilogue`` at ``(row, col)``, some rows at a time: sums leave few registers."""
    ROWS: gl.constexpr = staging.shape[0]
    COLS: gl.constexpr = staging.shape[1]
    STEP: gl.constexpr = min(VALUES * 32 * gl.num_warps() // COLS, ROWS)
    # Threads side by side have 16 bytes each of a row.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [gl.num_warps(), 1], [1, 0])
    rows = row + gl.arange(0, STEP, gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, COLS, gl.SliceLayout(0, layout))
    for start in gl.static_range(0, ROWS, STEP):
        part = staging.slice(start, STEP)
        values = added(part.load(layout), epilogue.load_residual(rows + start, cols, M, N))
        part.store(values.to(staging.dtype))
