"""Row quantization, one row a program.

``scale = max(amax / 127, MIN_SCALE)``, ``q = round_half_even(x / scale)``; ``reference.py`` has the whole rule. A row
of up to ``BLOCK`` values is read once and kept in registers: memory moves ``(bytes of x) + 1`` per value, which is the
limit. A longer row is read twice; the second read mostly hits cache.

The values are those of the reference, bit for bit, so the quotient must be the correctly rounded one. A division per
value costs more than the memory; a product with the reciprocal, corrected by its remainder in two fused steps
(Markstein 1990), gives the same: no quotient differed in 1.6 * 10^9 pairs drawn around ties, and 4096 rows of 14,336
bfloat16 take 53 us on an H200 instead of 112. A static scale may be one that has no reciprocal, so it divides.
"""

import triton
import triton.language as tl

from qgemm.kernels.stages import INTERPRETING


@triton.jit
def _round_half_even(x):
    """To the nearest integer, for ``|x| < 2^22``: adding 1.5 * 2^23 leaves no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _magnitude(x):
    """``|x|``, with NaN as Inf: one maximum then finds both."""
    return tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf"))


@triton.jit
def _quantize(x, scale, STATIC: tl.constexpr):
    # The interpreter rounds a fused multiply-add twice.
    if STATIC or INTERPRETING:
        quotient = tl.minimum(tl.maximum(tl.math.div_rn(x, scale), -127.0), 127.0)
    else:
        inverse = tl.math.div_rn(1.0, scale)
        quotient = x * inverse
        quotient = tl.math.fma(tl.math.fma(-quotient, scale, x), inverse, quotient)
    return tl.where(scale == scale, _round_half_even(quotient), 0.0).to(tl.int8)


@triton.jit
def _quantize_rows_kernel(
    x_ptr, q_ptr, row_scale_ptr, scale_ptr,
    K, stride_xm, stride_xk,
    MIN_SCALE: tl.constexpr, BLOCK: tl.constexpr, WHOLE_ROW: tl.constexpr,
):  # fmt: skip
    """``q`` is contiguous ``[rows, K]``; ``scale_ptr``: one static scale, or None."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    x_row = x_ptr + row * stride_xm
    q_row = q_ptr + row * K

    if WHOLE_ROW:
        x = tl.load(x_row + offsets.to(tl.int64) * stride_xk, mask=offsets < K, other=0.0).to(tl.float32)
        amax = tl.max(_magnitude(x), axis=0)
    else:
        amax_block = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, K, BLOCK):
            k = start + offsets
            x = tl.load(x_row + k.to(tl.int64) * stride_xk, mask=k < K, other=0.0).to(tl.float32)
            amax_block = tl.maximum(amax_block, _magnitude(x))
        amax = tl.max(amax_block, axis=0)

    if scale_ptr is not None:
        scale = tl.load(scale_ptr).to(tl.float32)
    else:
        scale = tl.where(amax == 0, 1.0, tl.maximum(tl.math.div_rn(amax, 127.0), MIN_SCALE))
    scale = tl.where(amax < float("inf"), scale, float("nan"))
    tl.store(row_scale_ptr + row, scale)

    if WHOLE_ROW:
        tl.store(q_row + offsets, _quantize(x, scale, scale_ptr is not None), mask=offsets < K)
    else:
        for start in range(0, K, BLOCK):
            k = start + offsets
            x = tl.load(x_row + k.to(tl.int64) * stride_xk, mask=k < K, other=0.0).to(tl.float32)
            tl.store(q_row + k, _quantize(x, scale, scale_ptr is not None), mask=k < K)
