"""Quantization of rows from any source: ``scale = max(amax / 127, min_scale)``, ``q = round_half_even(x / scale)``.

A row's source is a stage with ``ptr``, whose element type is the row's, ``length``, ``unroll``, and ``load(k)``, which
returns the values of columns ``k``, 0 beyond the row. ``StridedRow`` and ``GatedRow`` are here; a row that is
normalized first is another source. The results equal those of ``reference.py`` bit for bit.

A division per value would take longer than the memory access. So there are three ways to compute the quotient:

- bfloat16 with the row's own scale: one product. Apart from rounding, which changes ``x / scale`` by less than 2^-22 of
  itself, it is ``127 * x / amax``. With 8-bit significands, that is either exactly halfway between two integers or at
  least 2^-16 of itself away from halfway. It is halfway in two cases. If ``amax = 254 * 2^n``, the scale is a power of
  2 and every step is exact. If ``x = amax / 2``, the row does divide, and changes its multiplier by 2^-21 of itself if
  the product rounds the other way. The tests compare every pair of ``x`` and ``amax``.
- Other types, or a static scale: the product is corrected by its remainder in two fused steps (Markstein 1990). No
  quotient differed among 1.3 * 10^8 of float16 and 2.7 * 10^8 around halves of float32. The remainder must be exact, so
  the scale must be from 2^-100 to 2^100.
- Any other scale, and rows with NaN or Inf: a division.

Values of fp8 (e4m3) are kept as their bytes, in int8. They use the corrected product, too: it gives the quotient in
float32, which one instruction rounds, or integer arithmetic on devices that don't have it.
"""

import triton
import triton.language as tl

from qgemm.kernels.stages.activations import gate_value, up_value
from qgemm.kernels.stages.aggregate import INTERPRETING, OPTIONAL, aggregate
from qgemm.kernels.stages.epilogue import product, rounded
from qgemm.numerics import formats
from qgemm.numerics.blocks import BLOCK

# Adding 1.5 * 2^23 rounds |x| < 2^22 half to even: no bits are left for a fraction, and the low byte is the int8 value.
ROUND = tl.constexpr(1.5 * 2.0**23)
GROUP = tl.constexpr(BLOCK)


@aggregate
class StridedRow:
    """A row in memory."""

    ptr: tl.tensor
    length: tl.tensor
    stride: tl.tensor
    unroll: tl.constexpr = 4

    @triton.jit
    def load(self, k):
        """Columns ``k`` in the row's dtype."""
        return tl.load(self.ptr + k.to(tl.int64) * self.stride, mask=k < self.length, other=0.0)


@aggregate
class GatedRow:
    """``activation`` of a row in memory: ``length`` gates, followed by as many ups if the activation is gated.

    ``function``: the device function of ``activation.name``. ``activation``: a ``GatedActivation``. ``rounds_gate``:
    whether the activated gate is rounded before it is multiplied by ``up``, as when both are separate modules.
    ``up_first``: whether the ups are before the gates.
    """

    ptr: tl.tensor
    length: tl.tensor
    function: tl.constexpr
    activation: tl.constexpr
    rounds_gate: tl.constexpr = False
    up_first: tl.constexpr = False
    unroll: tl.constexpr = 1

    @triton.jit
    def load(self, k):
        """Columns ``k``, computed in float32 and rounded to the row's dtype."""
        return self.load_where(k, k < self.length)

    @triton.jit
    def load_where(self, k, inside):
        """The same where ``inside``."""
        gates = self.ptr + self.length if self.up_first else self.ptr
        gate = tl.load(gates + k, mask=inside, other=0.0).to(tl.float32)
        out = gate_value(gate, self.function, self.activation)
        if self.activation.gated:
            ups = self.ptr if self.up_first else self.ptr + self.length
            up = tl.load(ups + k, mask=inside, other=0.0)
            if self.rounds_gate:
                return product(rounded(out, up.dtype), up)
            out *= up_value(up.to(tl.float32), self.activation)
        return rounded(out, self.ptr.dtype.element_ty)


@aggregate
class JoinedRow:
    """``first`` values in memory, and behind them those of ``rest``; ``length`` in all."""

    ptr: tl.tensor
    first: tl.tensor
    rest: GatedRow
    length: tl.tensor
    unroll: tl.constexpr = 1

    @triton.jit
    def load(self, k):
        """Columns ``k``, the activated ones computed in float32 and rounded to the row's dtype."""
        before = tl.load(self.ptr + k, mask=k < self.first, other=0.0)
        behind = self.rest.load_where(k - self.first, (k >= self.first) & (k < self.length))
        return tl.where(k < self.first, before, behind)


@aggregate
class RowQuantization:
    """How rows are quantized: each by its own scale or all by a static one, with or without a zero point.

    ``scale``: a pointer to one float, or None. ``zero_point``: a pointer to the int8 zero point of that scale, or None.
    ``lowest`` (used with a zero point), ``low``, ``high``, ``steps`` and ``min_scale`` describe the number format.
    ``e4m3``: None for int8; for fp8 see ``e4m3_quantization``.
    """

    scale: OPTIONAL
    zero_point: OPTIONAL = None
    lowest: tl.constexpr = float(formats.INT8.asymmetric.low)
    low: tl.constexpr = float(formats.INT8.low)
    high: tl.constexpr = float(formats.INT8.high)
    steps: tl.constexpr = float(formats.INT8.steps)
    min_scale: tl.constexpr = formats.MIN_SCALE
    e4m3: tl.constexpr = None

    @triton.jit
    def row_scale(self, amax):
        """The scale of a row whose largest magnitude is ``amax``; NaN if the row has NaN or Inf."""
        if self.scale is not None:
            scale = tl.load(self.scale).to(tl.float32)
        else:
            scale = tl.where(amax == 0, 1.0, tl.maximum(tl.math.div_rn(amax, self.steps), self.min_scale))
        return tl.where(amax < float("inf"), scale, float("nan"))

    @triton.jit
    def inverse(self, amax, scale, DTYPE: tl.constexpr):
        """The factor that ``quantize`` multiplies values of ``DTYPE`` by."""
        if tl.bfloat16 == DTYPE and self.scale is None and self.e4m3 is None:
            return _multiplier(amax, scale)
        else:
            return tl.math.div_rn(1.0, scale)

    @triton.jit
    def multiplies(self, scale, DTYPE: tl.constexpr):
        """Whether ``quantize`` is exact for values of ``DTYPE``; if not, use ``divide``."""
        # The interpreter rounds a fused multiply-add twice: a corrected quotient would be wrong there.
        EXACT: tl.constexpr = (tl.bfloat16 == DTYPE and self.scale is None and self.e4m3 is None) or not INTERPRETING
        return (scale > 2.0**-100) & (scale < 2.0**100) & EXACT

    @triton.jit
    def quantize(self, x, scale, inverse, zero):
        """Finite ``x`` as int8: 2 instructions per value with one product, 5 with a corrected one."""
        ONE_PRODUCT: tl.constexpr = x.dtype == tl.bfloat16 and self.scale is None and self.e4m3 is None
        x = x.to(tl.float32)
        if ONE_PRODUCT:
            integer = tl.math.fma(x, inverse, ROUND)
        else:
            if zero is not None:
                x = tl.minimum(tl.maximum(x, (self.lowest - zero) * scale), (self.high - zero) * scale)
            elif self.scale is not None:
                x = tl.minimum(tl.maximum(x, self.low * scale), self.high * scale)
            quotient = x * inverse
            quotient = tl.math.fma(tl.math.fma(-quotient, scale, x), inverse, quotient)
            integer = quotient if self.e4m3 is not None else quotient + ROUND
            if zero is not None:
                integer += zero
        if self.e4m3 is not None:
            return to_e4m3(integer, self.e4m3)
        else:
            return integer.to(tl.int32, bitcast=True).to(tl.int8)

    @triton.jit
    def quantize_finely(self, x, scale):
        """``x`` as e4m3, with scales of its shape, which may be NaN. For groups, whose scales may be extreme.

        ``x`` and the scale are first multiplied by a power of 2, so that the corrected product is exact.
        """
        if INTERPRETING:
            return self.divide(x, scale, None)
        else:
            # The power of 2 that moves the scale into [1, 2): the scale is from 2^-126 to 2^120.
            move = ((254 << 23) - (scale.to(tl.int32, bitcast=True) & 0x7F800000)).to(tl.float32, bitcast=True)
            scale = scale * move
            inverse = tl.math.div_rn(1.0, scale)
            x = x.to(tl.float32) * move
            quotient = x * inverse
            quotient = tl.math.fma(tl.math.fma(-quotient, scale, x), inverse, quotient)
            return tl.where(scale == scale, to_e4m3(quotient, self.e4m3), 0)

    @triton.jit
    def divide(self, x, scale, zero):
        """Any ``x`` as int8, with any scale: one division per value."""
        quotient = tl.math.div_rn(x.to(tl.float32), scale)
        if zero is not None:
            quotient = tl.minimum(tl.maximum(quotient, self.lowest - zero), self.high - zero)
            integer = (quotient + ROUND) - ROUND + zero
        else:
            quotient = tl.minimum(tl.maximum(quotient, self.low), self.high)
            integer = (quotient + ROUND) - ROUND
        if self.e4m3 is not None:
            return tl.where(scale == scale, to_e4m3(quotient, self.e4m3), 0).to(tl.int8)
        else:
            return tl.where(scale == scale, integer, 0.0).to(tl.int8)


@triton.jit
def row_quantization(scale, zero_point, E4M3: tl.constexpr):
    """``RowQuantization`` to int8, or to fp8 where ``E4M3`` isn't None; see ``e4m3_quantization`` for its value."""
    if E4M3 is None:
        return RowQuantization(scale, zero_point)
    else:
        return e4m3_quantization(scale, E4M3)


@triton.jit
def e4m3_quantization(scale, INSTRUCTION: tl.constexpr):
    """``RowQuantization`` to fp8. ``INSTRUCTION``: whether the device has an instruction that rounds to it."""
    return RowQuantization(
        scale, None, 0.0, float(formats.FP8.low), float(formats.FP8.high), float(formats.FP8.steps), formats.MIN_SCALE,
        INSTRUCTION,
    )  # fmt: skip


@triton.jit
def to_e4m3(x, INSTRUCTION: tl.constexpr):
    """The bytes, as int8, of float32 ``x`` rounded to e4m3, halves to even; values beyond 448 saturate."""
    if INSTRUCTION:
        return x.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
        # e4m3's exponent bias is 120 less than float32's, and 20 bits of the significand are dropped. Below 2^-6 the
        # steps are 2^-9; adding 2^14 rounds to those.
        normal = (size + 0x7FFFF + ((size >> 20) & 1) - (120 << 23)) >> 20
        few = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
        code = tl.where(size < (121 << 23), few, normal) & 0x7F
        return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def quantize_row(source, quantization, q_row, scale_ptr, offsets, BLOCKS: tl.constexpr):
    """Writes a row's int8 values to ``q_row``, contiguous, and its scale to ``scale_ptr``.

    ``offsets``: the offsets within a block. ``BLOCKS``: how many blocks hold the row in registers; with 0, the row is
    read twice instead.
    """
    dtype: tl.constexpr = source.ptr.dtype.element_ty
    BLOCK: tl.constexpr = offsets.shape[0]
    zero = None
    if quantization.zero_point is not None:
        zero = tl.load(quantization.zero_point).to(tl.float32)
    blocks = load_blocks(source, offsets, BLOCKS)
    if BLOCKS:
        largest = _largest_magnitude(blocks, BLOCKS)
    else:
        largest = _magnitude((offsets * 0).to(dtype))
        for start in tl.range(0, source.length, BLOCK, loop_unroll_factor=source.unroll):
            k = start + offsets
            largest = tl.maximum(largest, _magnitude(source.load(k)))
    amax = _float_of(tl.max(largest, axis=0), dtype)
    scale = quantization.row_scale(amax)
    tl.store(scale_ptr, scale)

    inverse = quantization.inverse(amax, scale, dtype)
    if quantization.multiplies(scale, dtype):
        if BLOCKS:
            for i in tl.static_range(BLOCKS):
                k = i * BLOCK + offsets
                tl.store(q_row + k, quantization.quantize(blocks[i], scale, inverse, zero), mask=k < source.length)
        else:
            for start in tl.range(0, source.length, BLOCK, loop_unroll_factor=source.unroll):
                k = start + offsets
                x = source.load(k)
                tl.store(q_row + k, quantization.quantize(x, scale, inverse, zero), mask=k < source.length)
    else:
        for start in range(0, source.length, BLOCK):
            k = start + offsets
            values = quantization.divide(source.load(k), scale, zero)
            tl.store(q_row + k, values, mask=k < source.length)


@triton.jit
def copy_row(source, row, offsets):
    """Copies a row's values to ``row``, contiguous, in the row's dtype. ``offsets``: the offsets within a block."""
    for start in tl.range(0, source.length, offsets.shape[0], loop_unroll_factor=source.unroll):
        k = start + offsets
        tl.store(row + k, source.load(k), mask=k < source.length)


@triton.jit
def quantize_row_groups(source, quantization, q_row, scale_ptr, stride_scale, offsets, BLOCKS: tl.constexpr):
    """Writes a row's e4m3 values to ``q_row``, contiguous, and a scale for each 128 of them to ``scale_ptr``.

    ``offsets``: the offsets within a block, which consists of whole groups. ``BLOCKS``: how many blocks are loaded at
    once; with 0, one after the other.
    """
    BLOCK: tl.constexpr = offsets.shape[0]
    if BLOCKS:
        blocks = load_blocks(source, offsets, BLOCKS)
        for i in tl.static_range(BLOCKS):
            k = i * BLOCK + offsets
            _quantize_groups(blocks[i], k, source.length, quantization, q_row, scale_ptr, stride_scale)
    else:
        for start in tl.range(0, source.length, BLOCK, loop_unroll_factor=source.unroll):
            k = start + offsets
            _quantize_groups(source.load(k), k, source.length, quantization, q_row, scale_ptr, stride_scale)


@triton.jit
def _quantize_groups(x, k, K, quantization, q_row, scale_ptr, stride_scale):
    BLOCK: tl.constexpr = x.shape[0]
    COUNT: tl.constexpr = BLOCK // GROUP
    x = tl.reshape(x, (COUNT, GROUP))
    scale = quantization.row_scale(_float_of(tl.max(_magnitude(x), axis=1), x.dtype))
    values = quantization.quantize_finely(x, scale[:, None])
    tl.store(q_row + k, tl.reshape(values, (BLOCK,)), mask=k < K)
    # The thread that holds a group's first value stores its scale: computing where the scales lie takes longer.
    scales = tl.reshape(tl.broadcast_to(scale[:, None], (COUNT, GROUP)), (BLOCK,))
    tl.store(scale_ptr + k // GROUP * stride_scale, scales, mask=(k < K) & (k % GROUP == 0))


@triton.jit
def load_blocks(source, offsets, BLOCKS: tl.constexpr):
    """The row's ``BLOCKS`` blocks."""
    BLOCK: tl.constexpr = offsets.shape[0]
    blocks = ()
    for i in tl.static_range(BLOCKS):
        k = i * BLOCK + offsets
        blocks = blocks + (source.load(k),)
    return blocks


@triton.jit
def quantize_blocks(blocks, quantization, BLOCKS: tl.constexpr):
    """``(scale, int8 blocks)`` of a row in ``blocks``, with its own scale."""
    dtype: tl.constexpr = blocks[0].dtype
    amax = _float_of(tl.max(_largest_magnitude(blocks, BLOCKS), axis=0), dtype)
    scale = quantization.row_scale(amax)
    inverse = quantization.inverse(amax, scale, dtype)
    multiplies = quantization.multiplies(scale, dtype)
    out = ()
    for i in tl.static_range(BLOCKS):
        if multiplies:
            values = quantization.quantize(blocks[i], scale, inverse, None)
        else:
            values = quantization.divide(blocks[i], scale, None)
        out = out + (values,)
    return scale, out


@triton.jit
def quantize_rows_of_tile(x, quantization):
    """``(scale [R], int8 [R, K])`` of the rows of ``x [R, K]``, each by its own scale; beyond a row they must be 0."""
    amax = _float_of(tl.max(_magnitude(x), axis=1), x.dtype)
    scale = quantization.row_scale(amax)
    return scale, quantization.divide(x, scale[:, None], None)


@triton.jit
def _largest_magnitude(blocks, BLOCKS: tl.constexpr):
    largest = _magnitude(blocks[0])
    for i in tl.static_range(1, BLOCKS):
        largest = tl.maximum(largest, _magnitude(blocks[i]))
    return largest


@triton.jit
def _magnitude(x):
    """The bits of ``|x|`` as an integer. They are ordered like the values, with Inf and then NaN above all numbers.

    The integers of 16-bit types stay in pairs, two per instruction and register.
    """
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return x.to(tl.int16, bitcast=True) & 0x7FFF


@triton.jit
def _float_of(magnitude, dtype: tl.constexpr):
    """The float32 value of a scalar ``magnitude`` of ``dtype``."""
    if dtype == tl.float32:
        return magnitude.to(tl.float32, bitcast=True)
    else:
        return magnitude.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _multiplier(amax, scale):
    """The factor by which a bfloat16 ``x`` is multiplied so that the product rounds as ``x / scale`` does."""
    inverse = tl.math.div_rn(1.0, scale)
    half = amax * 0.5
    wanted = tl.math.div_rn(half, scale) + ROUND
    found = tl.math.fma(half, inverse, ROUND)
    return inverse * tl.where(wanted > found, 1 + 2.0**-21, tl.where(wanted < found, 1 - 2.0**-21, 1.0))
