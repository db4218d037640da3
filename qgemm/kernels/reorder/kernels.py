"""Columns of rows in another order, which is read before the program waits for the preceding kernel: it is a weight.

With few rows, PyTorch's ``index_select`` takes longer, since the kernel ahead has to end before it starts.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["M", "PROGRAMS"])
def _reorder_kernel(
    x, order, out,
    M, K, PROGRAMS, stride_xm,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """``out[m, k] = x[m, order[k]]``; NaN where ``order[k]`` is no column. ``out``: contiguous ``[M, K]``.

    Each of ``PROGRAMS`` programs has a block of columns of ``ROWS`` rows. ``PDL``, ``NEXT_EARLY``: as in
    ``_norm_kernel``.
    """
    if NEXT_EARLY:
        gdc_launch_dependents()
    program, blocks = tl.program_id(0), tl.cdiv(K, BLOCK)
    k = program % blocks * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(order + k, mask=k < K, other=-1)
    if PDL:
        gdc_wait()
    if program < PROGRAMS:
        m = (program // blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        known = (column >= 0) & (column < K)
        values = tl.load(x + m * stride_xm + column[None, :], mask=(m < M) & known[None, :], other=float("nan"))
        tl.store(out + m * K + k[None, :], values, mask=(m < M) & (k < K)[None, :])
