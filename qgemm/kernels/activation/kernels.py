"""Activation and quantization of a row, in one kernel: a row a program.

A row that fits is computed once and held in registers; a longer row is computed twice.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.rows import GatedRow, RowQuantization, quantize_row


@triton.jit(do_not_specialize=["M"])
def _activation_quantize_kernel(
    x, q, row_scale, scale,
    M, K, stride_xm,
    FUNCTION: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """A row a program: of ``x``, which has ``K`` gates, then as many ups if there are any, to ``q [M, K]``.

    ``FUNCTION``, ``ACTIVATION``: as in ``GatedRow``, rounded twice. ``scale``: as in ``RowQuantization``. ``BLOCKS``:
    see ``quantize_row``. ``PDL``, ``NEXT_EARLY``: as in ``_norm_kernel``.
    """
    if NEXT_EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if row < M:
        source = GatedRow(x + row * stride_xm, K, FUNCTION, ACTIVATION, rounds_gate=True)
        quantize_row(source, RowQuantization(scale), q + row * K, row_scale + row, tl.arange(0, BLOCK), BLOCKS)
