"""Residual, norm and quantization in one kernel: each program reads a row once and keeps it in registers.

``total = round(residual + norm(x))`` or ``round(residual + round(gate * x))``, the product in the gate's dtype, and
``norm(total)`` in float or int8; each part is optional. Numbers may multiply what is added, and the total. The norms'
vectors are read before the program waits for the preceding kernel, which doesn't write weights; those of samples are
computed, and read after that.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.norms import add_blocks, multiply_blocks, normalize_blocks, scale_blocks, store_blocks
from qgemm.kernels.stages.rows import StridedRow, load_blocks, quantize_blocks, row_quantization


@triton.jit(do_not_specialize=["M", "vector_rows"])
def _norm_kernel(
    x, residual, branch_weight, gate, weight, bias, total, normed, q, row_scale, scale, total_factor,
    M, K, vector_rows, stride_v, stride_xm, stride_xk, stride_rm, stride_rk,
    NORM: tl.constexpr, FACTOR: tl.constexpr, BY_SAMPLE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    PDL: tl.constexpr, NEXT_EARLY: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Each program has a row, in ``BLOCKS`` blocks.

    All tensors except ``x`` may be None. ``total``, ``normed`` and ``q`` are contiguous ``[M, K]``. ``scale``: as in
    ``RowQuantization``. ``NORM``: a ``Norm``. ``PDL``: see ``Launch``. ``E4M3``: see ``row_quantization``.
    ``gate``: ``[M / vector_rows, K]``, a row for each sample, ``stride_v`` apart. ``BY_SAMPLE``: whether ``weight`` and
    ``bias`` are that, too. ``FACTOR``, ``total_factor``: see ``NormCall``.
    ``NEXT_EARLY``: lets the next kernel start at once, before the preceding one has ended, instead of when this one
    ends.
    """
    if NEXT_EARLY:
        gdc_launch_dependents()
    offsets = tl.arange(0, BLOCK)
    if branch_weight is not None:
        branch_weights = load_blocks(StridedRow(branch_weight, K, 1), offsets, BLOCKS)
    if weight is not None and not BY_SAMPLE:
        weights = load_blocks(StridedRow(weight, K, 1), offsets, BLOCKS)
    biases = None
    if bias is not None and not BY_SAMPLE:
        biases = load_blocks(StridedRow(bias, K, 1), offsets, BLOCKS)
    if total_factor is not None:
        factor_of_total = tl.load(total_factor)
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if row < M:
        blocks = load_blocks(StridedRow(x + row * stride_xm, K, stride_xk), offsets, BLOCKS)
        residuals = None
        if residual is not None:
            residuals = load_blocks(StridedRow(residual + row * stride_rm, K, stride_rk), offsets, BLOCKS)
        if branch_weight is not None:
            blocks = normalize_blocks(blocks, branch_weights, None, K, offsets, NORM, BLOCKS)
        if gate is not None:
            gates = load_blocks(StridedRow(gate + row // vector_rows * stride_v, K, 1), offsets, BLOCKS)
            blocks = multiply_blocks(blocks, gates, BLOCKS)
        if FACTOR != 1.0:
            blocks = scale_blocks(blocks, FACTOR, BLOCKS)
        if residual is not None or gate is not None:
            blocks = add_blocks(blocks, residuals, x.dtype.element_ty, BLOCKS)
        if total_factor is not None:
            blocks = scale_blocks(blocks, factor_of_total, BLOCKS)
        if total is not None:
            store_blocks(total + row * K, blocks, K, offsets, BLOCKS)
        if BY_SAMPLE:
            own = row // vector_rows * stride_v
            own_weights = load_blocks(StridedRow(weight + own, K, 1), offsets, BLOCKS)
            own_biases = None
            if bias is not None:
                own_biases = load_blocks(StridedRow(bias + own, K, 1), offsets, BLOCKS)
            blocks = normalize_blocks(blocks, own_weights, own_biases, K, offsets, NORM, BLOCKS)
        elif weight is not None:
            blocks = normalize_blocks(blocks, weights, biases, K, offsets, NORM, BLOCKS)
        if normed is not None:
            store_blocks(normed + row * K, blocks, K, offsets, BLOCKS)
        if q is not None:
            found, values = quantize_blocks(blocks, row_quantization(scale, None, E4M3), BLOCKS)
            tl.store(row_scale + row, found)
            store_blocks(q + row * K, values, K, offsets, BLOCKS)
