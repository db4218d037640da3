"""A head's keys and values in a cache, ``[L, D]``, block by block: ``FloatKeys``, ``Int8Keys``, ``...Values``.

``Rows`` gives their addresses.

Keys are multiplied by queries; values are summed with weights. Int8 keys and values have a float32 scale for each of
the ``L`` rows. They aren't dequantized one by one, which would take longer than reading them:

- Each query value becomes two int8 numbers, ``q ~ scale * (254 * high + low)``, precise to 2^-16 of the row's largest.
  Products with keys are then exact int32 sums (below 2^31 for D up to 512), and a key's scale multiplies its score.
- A value row's scale multiplies its weight, which is then below 2 (``order``) and becomes float16. Two values side by
  side are read as one 16-bit number, because the tensor cores' loads can transpose those. To become float16, an integer
  ``n`` from 0 to 255 is put into the low bits of the float16 number 1024, which gives ``1024 + n``.
"""

import triton
import triton.language as tl

from qgemm.kernels.stages.aggregate import OPTIONAL, aggregate
from qgemm.kernels.stages.dot import float_dot
from qgemm.kernels.stages.epilogue import rounded

PARTS_OF_STEP = tl.constexpr(254)  # ``low`` is from -127 to 127
MIN_ORDER = tl.constexpr(-100)


@aggregate
class Rows:
    """The rows of a sequence's keys or values, or the scales of either: one after the other, or anywhere.

    ``pages`` is None, or a pointer to int64, the place of each row, or to int32, the page of each ``PAGE`` rows.
    Without pages, rows are ``stride`` apart. With ``PAGE > 0``, a page has that many rows, and pages are
    ``stride_page`` apart. ``WHOLE``: no block of rows spans two pages of a table.
    """

    ptr: tl.tensor
    stride: tl.tensor
    stride_page: tl.tensor = 0  # type: ignore[assignment]
    pages: OPTIONAL = None
    PAGE: tl.constexpr = 0
    WHOLE: tl.constexpr = False

    @triton.jit
    def at(self, start, offsets, last):
        """Pointers to rows ``start + offsets``, in the shape of ``offsets``; from ``last`` on, to any row."""
        if self.pages is None:
            return self.ptr + start.to(tl.int64) * self.stride + offsets * self.stride
        elif self.pages.dtype.element_ty == tl.int64:
            place = tl.load(self.pages + start + offsets, mask=start + offsets < last, other=0)
            if self.PAGE > 0:
                return self.ptr + place // self.PAGE * self.stride_page + place % self.PAGE * self.stride
            else:
                return self.ptr + place * self.stride
        elif self.WHOLE:
            page = _page(self.pages + tl.minimum(start, last - 1) // self.PAGE).to(tl.int64)
            return self.ptr + page * self.stride_page + start % self.PAGE * self.stride + offsets * self.stride
        else:
            row = start + offsets
            page = tl.load(self.pages + row // self.PAGE, mask=row < last, other=0).to(tl.int64)
            return self.ptr + page * self.stride_page + row % self.PAGE * self.stride

    @triton.jit
    def pairs(self):
        """The same rows with two int8 values side by side as one int16. Strides must be even."""
        ptr = self.ptr.to(tl.pointer_type(tl.int16))
        return Rows(ptr, self.stride // 2, self.stride_page // 2, self.pages, self.PAGE, self.WHOLE)


@triton.jit
def _page(ptr):
    """Loads an int32 that no program changes.

    With a ``tl.load`` here, Triton would pipeline the loads of page numbers instead of those of keys and values.
    """
    if tl.target_info.is_cuda():
        return tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [ptr], tl.int32, is_pure=True, pack=1)
    else:
        return tl.load(ptr)


@aggregate
class FloatKeys:
    """Keys of the dtype of ``queries [rows, BLOCK_D]``."""

    queries: tl.tensor
    rows: Rows
    D: tl.constexpr

    @triton.jit
    def products(self, start, offsets, last):
        """Queries times the keys at ``start + offsets``, float32 ``[rows, block]``; 0 from ``last`` on."""
        BLOCK_D: tl.constexpr = self.queries.shape[1]
        keys = _load_transposed(self.rows, start, offsets, last, self.D, BLOCK_D)
        return float_dot(self.queries, keys, tl.zeros((self.queries.shape[0], offsets.shape[0]), tl.float32))


@aggregate
class Int8Keys:
    """Int8 keys, with the queries as ``query_scale * (254 * high + low)``."""

    high: tl.tensor
    low: tl.tensor
    query_scale: tl.tensor
    rows: Rows
    scales: Rows
    D: tl.constexpr

    @triton.jit
    def products(self, start, offsets, last):
        """As ``FloatKeys.products``."""
        BLOCK_D: tl.constexpr = self.high.shape[1]
        keys = _load_transposed(self.rows, start, offsets, last, self.D, BLOCK_D)
        zeros = tl.zeros((self.high.shape[0], offsets.shape[0]), tl.int32)
        products = tl.dot(self.high, keys, zeros, out_dtype=tl.int32) * PARTS_OF_STEP
        products = tl.dot(self.low, keys, products, out_dtype=tl.int32)
        scale = _load_vector(self.scales, start, offsets, last)
        return products.to(tl.float32) * self.query_scale[:, None] * scale[None, :]


@triton.jit
def int8_keys(queries, rows, scales, D: tl.constexpr):
    """``Int8Keys`` for float ``queries``; a row with NaN or Inf gives NaN."""
    x = queries.to(tl.float32)
    amax = tl.max(tl.abs(x), axis=1)
    query_scale = tl.where(amax == 0.0, 1.0, amax * (1.0 / 127.0))
    finite = tl.abs(x) < float("inf")
    steps = tl.where(finite, x / query_scale[:, None], 0.0)
    high = tl.floor(steps + 0.5)
    low = tl.floor((steps - high) * PARTS_OF_STEP + 0.5)
    # NaN and Inf times 0 are NaN, which makes the whole row NaN.
    query_scale = query_scale * (1.0 / PARTS_OF_STEP) + tl.sum(x * 0.0, axis=1)
    return Int8Keys(high.to(tl.int8), low.to(tl.int8), query_scale, rows, scales, D)


@aggregate
class FloatValues:
    """Values of a float dtype."""

    rows: Rows
    D: tl.constexpr
    BLOCK_D: tl.constexpr

    @triton.jit
    def zeros(self, ROWS: tl.constexpr):
        """Sums of zero, to start with."""
        return (tl.zeros((ROWS, self.BLOCK_D), tl.float32),)

    @triton.jit
    def add(self, sums, decay, weights, start, offsets, last):
        """``sums * decay + weights @ values``, for the values at ``start + offsets``."""
        values = _load(self.rows, start, offsets, last, self.D, self.BLOCK_D)
        return (float_dot(rounded(weights, values.dtype), values, sums[0] * decay[:, None]),)

    @triton.jit
    def whole(self, sums):
        """The sums as ``[rows, BLOCK_D]``."""
        return sums[0]


@aggregate
class Int8Values:
    """Int8 values. ``D``, strides and addresses must be even."""

    rows: Rows
    scales: Rows
    D: tl.constexpr
    BLOCK_D: tl.constexpr

    @triton.jit
    def zeros(self, ROWS: tl.constexpr):
        """Sums of zero, to start with: those of even columns, and those of odd ones."""
        nothing = tl.zeros((ROWS, self.BLOCK_D // 2), tl.float32)
        return (nothing, nothing)

    @triton.jit
    def order(self, start, offsets, last):
        """For ``add_scores``: the exponents of the scales of values at ``start + offsets``."""
        scale = _load_vector(self.scales, start, offsets, last)
        exponent = (scale.to(tl.int32, bitcast=True) >> 23) - 127
        return tl.maximum(exponent, MIN_ORDER).to(tl.float32)

    @triton.jit
    def add(self, sums, decay, weights, start, offsets, last):
        """As ``FloatValues.add``."""
        scale = _load_vector(self.scales, start, offsets, last)
        pairs = _load(self.rows.pairs(), start, offsets, last, self.D // 2, self.BLOCK_D // 2)
        even, odd = _unpack(pairs)
        weights = (weights * scale[None, :]).to(tl.float16)
        return float_dot(weights, even, sums[0] * decay[:, None]), float_dot(weights, odd, sums[1] * decay[:, None])

    @triton.jit
    def whole(self, sums):
        """The sums as ``[rows, BLOCK_D]``."""
        return tl.reshape(tl.join(sums[0], sums[1]), (sums[0].shape[0], self.BLOCK_D))


@triton.jit
def _load(rows, start, offsets, last, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows ``start + offsets`` as ``[block, BLOCK_D]``, zeros from ``last`` on."""
    d = tl.arange(0, BLOCK_D)
    first = rows.at(start, offsets[:, None], last)
    return tl.load(first + d[None, :], mask=(start + offsets < last)[:, None] & (d < D)[None, :], other=0)


@triton.jit
def _load_transposed(rows, start, offsets, last, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows ``start + offsets`` as ``[BLOCK_D, block]``, zeros from ``last`` on."""
    d = tl.arange(0, BLOCK_D)
    first = rows.at(start, offsets[None, :], last)
    return tl.load(first + d[:, None], mask=(start + offsets < last)[None, :] & (d < D)[:, None], other=0)


@triton.jit
def _load_vector(rows, start, offsets, last):
    """The numbers at ``start + offsets``, ones from ``last`` on."""
    return tl.load(rows.at(start, offsets, last), mask=start + offsets < last, other=1.0)


@triton.jit
def _unpack(pairs):
    """The low and the high bytes of int16 ``pairs`` as float16."""
    if tl.target_info.is_cuda():
        asm: tl.constexpr = """
        {
            .reg .b32 flipped, bias;
            mov.b32 bias, 0x64806480;
            xor.b32 flipped, $2, 0x80808080;
            prmt.b32 $0, flipped, 0x64646464, 0x4240;
            prmt.b32 $1, flipped, 0x64646464, 0x4341;
            sub.f16x2 $0, $0, bias;
            sub.f16x2 $1, $1, bias;
        }
        """
        return tl.inline_asm_elementwise(asm, "=r,=r,r", [pairs], (tl.float16, tl.float16), True, 2)
    else:
        flipped = pairs ^ -32640  # 0x8080: each byte from -128..127 to 0..255
        even = ((flipped & 0xFF) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
        odd = (((flipped >> 8) & 0xFF) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
        return even, odd
