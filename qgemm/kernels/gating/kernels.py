"""Heads of rows times functions of their gates, which may lie between other columns or be one for each head."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.epilogue import product, rounded


@triton.jit(do_not_specialize=["PROGRAMS"])
def _gate_kernel(
    x, gate, out,
    PROGRAMS, K, D, stride_xm, stride_xh, stride_gm, stride_gh,
    FUNCTION: tl.constexpr, OF_HEADS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """``out [M, K]`` from ``K / D`` heads: each of ``PROGRAMS`` programs has a block of a row.

    ``FUNCTION``: of gates. ``OF_HEADS``: whether a head has one. ``PDL``, ``NEXT_EARLY``: as in ``_norm_kernel``.
    """
    if NEXT_EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    program = tl.program_id(0)
    if program < PROGRAMS:
        blocks = tl.cdiv(K, BLOCK)
        row, k = (program // blocks).to(tl.int64), (program % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside, head = k < K, k // D
        column = k - head * D
        values = tl.load(x + row * stride_xm + head * stride_xh + column, mask=inside, other=0.0)
        at = gate + row * stride_gm + head * stride_gh
        gates = tl.load(at if OF_HEADS else at + column, mask=inside, other=0.0)
        factors = rounded(FUNCTION(gates.to(tl.float32)), values.dtype)
        tl.store(out + row * K + k, product(factors, values), mask=inside)
