"""Activations, alone and with the quantization of their rows, and the gradients of experts' activations.

With quantization, each program has a row. One that fits is computed once and kept in registers; a longer one is
computed twice. Without quantization, each program has a block of a row.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.activations import gate_slope, gate_value, up_value
from qgemm.kernels.stages.epilogue import rounded
from qgemm.kernels.stages.rows import GatedRow, JoinedRow, quantize_row, row_quantization


@triton.jit(do_not_specialize=["M"])
def _activation_quantize_kernel(
    x, q, row_scale, scale, prefix,
    M, K, first, stride_xm, stride_pm,
    FUNCTION: tl.constexpr, ACTIVATION: tl.constexpr, UP_FIRST: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Each program has a row of ``x``: ``K - first`` gates, and as many ups if there are any. It writes ``q [M, K]``.

    ``prefix``: ``[M, first]``, quantized before what the activation returns; or None, and ``first`` is 0.
    ``FUNCTION``, ``ACTIVATION``, ``UP_FIRST``: as in ``GatedRow``, rounded twice. ``scale``: as in ``RowQuantization``.
    ``BLOCKS``: see ``quantize_row``. ``PDL``, ``NEXT_EARLY``: as in ``_norm_kernel``. ``E4M3``: see
    ``row_quantization``.
    """
    if NEXT_EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if row < M:
        quantization = row_quantization(scale, None, E4M3)
        source = GatedRow(x + row * stride_xm, K - first, FUNCTION, ACTIVATION, rounds_gate=True, up_first=UP_FIRST)
        if prefix is not None:
            joined = JoinedRow(prefix + row * stride_pm, first, source, K)
            quantize_row(joined, quantization, q + row * K, row_scale + row, tl.arange(0, BLOCK), BLOCKS)
        else:
            quantize_row(source, quantization, q + row * K, row_scale + row, tl.arange(0, BLOCK), BLOCKS)


@triton.jit(do_not_specialize=["PROGRAMS"])
def _activation_kernel(
    x, out,
    PROGRAMS, K, stride_xm,
    FUNCTION: tl.constexpr, ACTIVATION: tl.constexpr, UP_FIRST: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """Each of ``PROGRAMS`` programs has a block of a row of ``x``, laid out as above, and writes ``out [M, K]``."""
    if NEXT_EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    program = tl.program_id(0)
    if program < PROGRAMS:
        blocks = tl.cdiv(K, BLOCK)
        row, k = (program // blocks).to(tl.int64), (program % blocks) * BLOCK + tl.arange(0, BLOCK)
        source = GatedRow(x + row * stride_xm, K, FUNCTION, ACTIVATION, rounds_gate=True, up_first=UP_FIRST)
        tl.store(out + row * K + k, source.load(k), mask=k < K)


@triton.jit
def _activation_backward_kernel(
    h, grad, factors, end, grad_h, grad_factors,
    K, FUNCTION: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program has a row, of ``end`` there are: the gradients of ``factor * (grad . activation(row of h))``.

    ``h``, ``grad_h``: contiguous ``[M, K]``, or gates before ups ``[M, 2 K]``; ``grad``: contiguous ``[M, K]``;
    ``factors``, ``grad_factors``: float32 ``[M]``; ``end``: int32. ``ACTIVATION``: a ``GatedActivation``.
    """
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(end):
        width = 2 * K if ACTIVATION.gated else K
        h += row * width
        grad_h += row * width
        grad += row * K
        factor = tl.load(factors + row)
        offsets = tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, K, BLOCK):
            k = start + offsets
            inside = k < K
            gate = tl.load(h + k, mask=inside, other=0.0).to(tl.float32)
            given = tl.load(grad + k, mask=inside, other=0.0).to(tl.float32)
            value, slope = gate_value(gate, FUNCTION, ACTIVATION), gate_slope(gate, ACTIVATION)
            if ACTIVATION.gated:
                up = tl.load(h + K + k, mask=inside, other=0.0).to(tl.float32)
                factor_of_gate = up_value(up, ACTIVATION)
                grad_up = given * factor * value
                if ACTIVATION.limit is not None:
                    grad_up = tl.where(tl.abs(up) > ACTIVATION.limit, 0.0, grad_up)
                tl.store(grad_h + K + k, rounded(grad_up, grad_h.dtype.element_ty), mask=inside)
                value *= factor_of_gate
                slope *= factor_of_gate
            tl.store(grad_h + k, rounded(given * factor * slope, grad_h.dtype.element_ty), mask=inside)
            total += given * value
        tl.store(grad_factors + row, tl.sum(total, axis=0))
