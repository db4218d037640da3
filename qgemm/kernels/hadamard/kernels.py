"""Blocks of ``n`` values times the Walsh-Hadamard matrix ``H_n``, by tensor cores.

``H_n`` with ``n = a * b`` is the Kronecker product of ``H_a`` and ``H_b``. So a block, as a matrix ``[a, b]``, becomes
``H_a @ block @ H_b``: ``a + b`` products for each value instead of ``n``, and no sum goes through memory. The matrices
are made from the numbers of rows and columns, whose common bits tell the sign.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.dot import float_dot
from qgemm.kernels.stages.epilogue import rounded


@triton.jit(do_not_specialize=["ROWS"])
def _hadamard_kernel(
    x, out,
    ROWS,
    SCALE: tl.constexpr, A: tl.constexpr, B: tl.constexpr, IS_ONE: tl.constexpr,
    PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """``out = x @ H_n * SCALE`` of blocks, one after another, in float16 or bfloat16: ``ROWS`` of ``B`` values in all.

    A program has ``A`` of these rows. They are one block, and ``n`` is ``A * B``; or, unless ``IS_ONE``, each is one.
    """
    if NEXT_EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * A + tl.arange(0, A)[:, None]
    column, inside = tl.arange(0, B)[None, :], row < ROWS
    zeros = tl.zeros((A, B), tl.float32)
    values = tl.load(x + row * B + column, mask=inside, other=0.0)
    sums = float_dot(values, _signs(B, x.dtype.element_ty), zeros)
    if IS_ONE:
        # Three bfloat16s have all bits of a float32 and its range.
        signs = _signs(A, tl.bfloat16)
        high = sums.to(tl.bfloat16)
        rest = sums - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        sums = float_dot(signs, low, zeros)
        sums = float_dot(signs, middle, sums)
        sums = float_dot(signs, high, sums)
    tl.store(out + row * B + column, rounded(sums * SCALE, out.dtype.element_ty), mask=inside)


@triton.jit
def _signs(N: tl.constexpr, dtype: tl.constexpr):
    """Sylvester's ``H_N``, of ones and minus ones, for ``N`` up to 256."""
    common = tl.arange(0, N)[:, None] & tl.arange(0, N)[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    return (1 - 2 * (common & 1)).to(tl.float32).to(dtype)
