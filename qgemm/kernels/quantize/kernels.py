"""Row quantization, one row per program: ``stages/rows.py`` applied to rows in memory.

A row that fits is read once and kept in registers; a longer row is read twice. Memory is the limit
(docs/performance/rows.md).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.rows import StridedRow, quantize_row, quantize_row_groups, row_quantization


@triton.jit(do_not_specialize=["M"])
def _quantize_rows_kernel(
    x_ptr, q_ptr, row_scale_ptr, scale_ptr, zero_ptr,
    M, K, stride_xm, stride_xk, stride_scale, stride_group,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
    NEXT_EARLY: tl.constexpr, E4M3: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Each program quantizes a row. ``q``: contiguous ``[M, K]``. ``scale_ptr``, ``zero_ptr``: see ``RowQuantization``.

    ``PDL``: see ``Launch``. ``BLOCKS``: see ``quantize_row``.

    ``E4M3``: None for int8; for fp8, whose bytes are stored in ``q``, see ``row_quantization``. ``GROUPED``: with a
    scale for each 128 values; these are ``stride_group`` apart, and those of rows ``stride_scale``.

    ``NEXT_EARLY``: lets the next kernel start at once, before the preceding one has ended, instead of when this one
    ends.
    """
    if NEXT_EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if q_ptr.dtype.element_ty != tl.int8:
        q_ptr = q_ptr.to(tl.pointer_type(tl.int8), bitcast=True)
    if row < M:
        source = StridedRow(x_ptr + row * stride_xm, K, stride_xk)
        quantization = row_quantization(scale_ptr, zero_ptr, E4M3)
        if GROUPED:
            row_scale_ptr += row * stride_scale
            offsets = tl.arange(0, BLOCK)
            quantize_row_groups(source, quantization, q_ptr + row * K, row_scale_ptr, stride_group, offsets, BLOCKS)
        else:
            quantize_row(source, quantization, q_ptr + row * K, row_scale_ptr + row, tl.arange(0, BLOCK), BLOCKS)
