"""Columns of rows in another order, which is read before the program waits for the preceding kernel: it is a weight."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["PROGRAMS"])
def _reorder_kernel(
    x, order, out,
    PROGRAMS, K, stride_xm,
    BLOCK: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """``out[m, k] = x[m, order[k]]``; NaN where ``order[k]`` is no column. ``out``: contiguous ``[M, K]``.

    Each of ``PROGRAMS`` programs has a block of a row. ``PDL``, ``NEXT_EARLY``: as in ``_norm_kernel``.
    """
    if NEXT_EARLY:
        gdc_launch_dependents()
    program, blocks = tl.program_id(0), tl.cdiv(K, BLOCK)
    row, k = (program // blocks).to(tl.int64), program % blocks * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(order + k, mask=k < K, other=-1)
    if PDL:
        gdc_wait()
    if program < PROGRAMS:
        known = (column >= 0) & (column < K)
        values = tl.load(x + row * stride_xm + column, mask=known, other=float("nan"))
        tl.store(out + row * K + k, values, mask=k < K)
