"""Row quantization, one row per program.

``scale = max(amax / 127, MIN_SCALE)``, ``q = round_half_even(x / scale)``; ``reference.py`` has the whole rule. A row
that fits is read once and kept in registers; a longer row is read twice. Memory is the limit (docs/performance.md).

The values are the reference's, bit for bit, and a division per value would cost more than the memory. So there are
three ways to the quotient:

- bfloat16 with its own scale takes one product. But for roundings, which change it by less than 2^-22 of itself,
  ``x / scale`` is ``127 * x / amax``. With significands of 8 bits that is a half or at least 2^-16 of itself away from
  one. It is a half where ``amax = 254 * 2^n``, and then the scale is a power of 2 and every step exact; and where
  ``x = amax / 2``. For that one the row does divide, and moves its multiplier by 2^-21 if the product rounds the other
  way. The tests compare every pair of ``x`` and ``amax``.
- Other types, and a static scale, correct the product by its remainder in two fused steps (Markstein 1990). No quotient
  differed in 1.3 * 10^8 of float16 and 2.7 * 10^8 around halves of float32. The remainder must be exact, so the scale
  is from 2^-100 to 2^100.
- Any other scale, and rows with NaN or Inf, divide.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages import INTERPRETING

# Adding 1.5 * 2^23 rounds |x| < 2^22 half to even: no bits are left for a fraction, and the low byte is the int8 value.
ROUND = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _magnitude(x):
    """``|x|`` as the integer of its bits. They order as the values do, with Inf and then NaN above every number.

    The integers of 16-bit types stay in pairs, two to an instruction and a register.
    """
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return x.to(tl.int16, bitcast=True) & 0x7FFF


@triton.jit
def _float_of(magnitude, dtype: tl.constexpr):
    """The scalar ``magnitude`` of a value of ``dtype``, as float32."""
    if dtype == tl.float32:
        return magnitude.to(tl.float32, bitcast=True)
    else:
        return magnitude.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _multiplier(amax, scale):
    """What to multiply a bfloat16 ``x`` by, for a product that rounds as the quotient ``x / scale`` does."""
    inverse = tl.math.div_rn(1.0, scale)
    half = amax * 0.5
    wanted = tl.math.div_rn(half, scale) + ROUND
    found = tl.math.fma(half, inverse, ROUND)
    return inverse * tl.where(wanted > found, 1 + 2.0**-21, tl.where(wanted < found, 1 - 2.0**-21, 1.0))


@triton.jit
def _quantize(x, scale, inverse, ONE_PRODUCT: tl.constexpr, STATIC: tl.constexpr, zero=None):
    """For finite ``x`` and scales from 2^-100 to 2^100: 2 instructions a value with one product, 5 without.

    ``zero``: the zero point, float32, for a static scale; None for none.
    """
    x = x.to(tl.float32)
    if ONE_PRODUCT:
        rounded = tl.math.fma(x, inverse, ROUND)
    else:
        if zero is not None:
            x = tl.minimum(tl.maximum(x, (-128.0 - zero) * scale), (127.0 - zero) * scale)
        elif STATIC:
            x = tl.minimum(tl.maximum(x, -127.0 * scale), 127.0 * scale)
        quotient = x * inverse
        rounded = tl.math.fma(tl.math.fma(-quotient, scale, x), inverse, quotient) + ROUND
        if zero is not None:
            rounded += zero
    return rounded.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _quantize_any(x_row, q_row, K, stride_xk, scale, offsets, zero=None):
    """A row with any values and any scale, a division for each value."""
    for start in range(0, K, offsets.shape[0]):
        k = start + offsets
        x = tl.load(x_row + k.to(tl.int64) * stride_xk, mask=k < K, other=0.0).to(tl.float32)
        quotient = tl.math.div_rn(x, scale)
        if zero is not None:
            quotient = tl.minimum(tl.maximum(quotient, -128.0 - zero), 127.0 - zero)
            rounded = (quotient + ROUND) - ROUND + zero
        else:
            quotient = tl.minimum(tl.maximum(quotient, -127.0), 127.0)
            rounded = (quotient + ROUND) - ROUND
        tl.store(q_row + k, tl.where(scale == scale, rounded, 0.0).to(tl.int8), mask=k < K)


@triton.jit
def _quantize_row(
    x_row, q_row, row_scale_ptr, scale_ptr, K, stride_xk, offsets,
    MIN_SCALE: tl.constexpr, BLOCKS: tl.constexpr,
    zero_ptr=None,
):  # fmt: skip
    """Quantizes one row: ``K`` int8 values to ``q_row``, side by side, and its scale to ``row_scale_ptr``.

    ``scale_ptr``: a static scale, or None. ``zero_ptr``: its zero point, or None. ``offsets``: those within a block.
    ``BLOCKS``: how many blocks hold the row; 0 to read it twice, a block at a time.
    """
    STATIC: tl.constexpr = scale_ptr is not None
    ONE_PRODUCT: tl.constexpr = x_row.dtype.element_ty == tl.bfloat16 and not STATIC
    BLOCK: tl.constexpr = offsets.shape[0]
    zero = None
    if zero_ptr is not None:
        zero = tl.load(zero_ptr).to(tl.float32)

    blocks = ()
    largest = _magnitude((offsets * 0).to(x_row.dtype.element_ty))
    if BLOCKS:
        for i in tl.static_range(BLOCKS):
            k = i * BLOCK + offsets
            blocks = blocks + (tl.load(x_row + k.to(tl.int64) * stride_xk, mask=k < K, other=0.0),)
        for i in tl.static_range(BLOCKS):
            largest = tl.maximum(largest, _magnitude(blocks[i]))
    else:
        for start in tl.range(0, K, BLOCK, loop_unroll_factor=4):
            k = start + offsets
            x = tl.load(x_row + k.to(tl.int64) * stride_xk, mask=k < K, other=0.0)
            largest = tl.maximum(largest, _magnitude(x))
    amax = _float_of(tl.max(largest, axis=0), x_row.dtype.element_ty)

    if STATIC:
        scale = tl.load(scale_ptr).to(tl.float32)
    else:
        scale = tl.where(amax == 0, 1.0, tl.maximum(tl.math.div_rn(amax, 127.0), MIN_SCALE))
    scale = tl.where(amax < float("inf"), scale, float("nan"))
    tl.store(row_scale_ptr, scale)

    inverse = _multiplier(amax, scale) if ONE_PRODUCT else tl.math.div_rn(1.0, scale)
    # The interpreter rounds a fused multiply-add twice: a corrected quotient would be wrong there.
    if (scale > 2.0**-100) & (scale < 2.0**100) & (ONE_PRODUCT or not INTERPRETING):
        if BLOCKS:
            for i in tl.static_range(BLOCKS):
                k = i * BLOCK + offsets
                tl.store(q_row + k, _quantize(blocks[i], scale, inverse, ONE_PRODUCT, STATIC, zero), mask=k < K)
        else:
            for start in tl.range(0, K, BLOCK, loop_unroll_factor=4):
                k = start + offsets
                x = tl.load(x_row + k.to(tl.int64) * stride_xk, mask=k < K, other=0.0)
                tl.store(q_row + k, _quantize(x, scale, inverse, ONE_PRODUCT, STATIC, zero), mask=k < K)
    else:
        _quantize_any(x_row, q_row, K, stride_xk, scale, offsets, zero)


@triton.jit(do_not_specialize=["M"])
def _quantize_rows_kernel(
    x_ptr, q_ptr, row_scale_ptr, scale_ptr,
    M, K, stride_xm, stride_xk,
    MIN_SCALE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
    NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """A row a program. ``q`` is contiguous ``[M, K]``. ``PDL``: see ``Launch``; the rest: ``_quantize_row``.

    ``NEXT_EARLY``: let the next kernel start at once, before the one ahead has ended, instead of when this one ends.
    """
    if NEXT_EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if row < M:
        _quantize_row(
            x_ptr + row * stride_xm, q_ptr + row * K, row_scale_ptr + row, scale_ptr, K, stride_xk,
            tl.arange(0, BLOCK), MIN_SCALE, BLOCKS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _quantize_rows_asymmetric_kernel(
    x_ptr, q_ptr, row_scale_ptr, scale_ptr, zero_ptr,
    M, K, stride_xm, stride_xk,
    MIN_SCALE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``_quantize_rows_kernel``, with a static scale and its zero point, int8."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    _quantize_row(
        x_ptr + row * stride_xm, q_ptr + row * K, row_scale_ptr + row, scale_ptr, K, stride_xk,
        tl.arange(0, BLOCK), MIN_SCALE, BLOCKS, zero_ptr,
    )  # fmt: skip
