"""Products with weights of 4 and 8 bits on any GPU, in plain Triton, and the float weight.

A weight is made float in registers: ``(q - z) * s``, or ``q * s + z`` with a float ``z``, in float32, and rounded once
to the dtype of x, as a float weight would be. Rows of a stored weight are read by blocks of ``BLOCK`` bytes; a packed
one's have two halves, neighbours in K.
"""

import triton
import triton.language as tl

from qgemm.kernels.stages.aggregate import INTERPRETING
from qgemm.kernels.stages.epilogue import added, rounded
from qgemm.kernels.stages.unpack import scale_value, unpack, widen

BLOCK = tl.constexpr(128)  # bytes of a row; of a packed one those of 256 values, whose halves are neighbours in K


@triton.jit
def _floats(q, scale, zero_point, global_scale, rows, k, K, GROUP: tl.constexpr):
    """``(q - z) * s`` or ``q * s + z`` in float32, of values ``[n, BLOCK]`` from ``k`` on; ``rows``: of the scales."""
    SIZE: tl.constexpr = BLOCK.value
    values = q.to(tl.float32)
    if GROUP == 0:
        at = rows[:, None]
    elif GROUP % SIZE == 0:
        at = rows[:, None] + tl.minimum(k, K - 1) // GROUP
    elif SIZE % GROUP == 0:
        # Whole groups, of which each is loaded once.
        COUNT: tl.constexpr = SIZE // GROUP
        groups = tl.minimum(k // GROUP + tl.arange(0, COUNT), (K - 1) // GROUP)
        at = (rows[:, None] + groups[None, :])[:, :, None]
        values = tl.reshape(values, (q.shape[0], COUNT, GROUP))
    else:
        at = rows[:, None] + (tl.minimum(k + tl.arange(0, SIZE), K - 1) // GROUP)[None, :]
    if zero_point is not None:
        zero = tl.load(zero_point + at)
        if not zero.dtype.is_floating():
            values -= zero.to(tl.float32)
    factor = scale_value(tl.load(scale + at))
    if global_scale is not None:
        factor = tl.div_rn(factor * tl.load(global_scale), tl.load(global_scale + 1))
    values *= factor
    if zero_point is not None:
        if zero.dtype.is_floating():
            values += zero.to(tl.float32)
    return tl.reshape(values, q.shape)


@triton.jit
def _block(
    weight, scale, zero_point, global_scale, n, rows, block, K, stride_wn, FORM: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """A block's float values: one or two tiles ``[n, BLOCK]`` of ``DTYPE``."""
    FORMAT: tl.constexpr = FORM.name
    SIZE: tl.constexpr = BLOCK.value
    GROUP: tl.constexpr = FORM.group
    HALVES: tl.constexpr = 8 // FORM.bits
    EXACT: tl.constexpr = tl.float32 if FORM.has_codebook else tl.bfloat16
    k = block * (SIZE * HALVES)
    j = block * SIZE + tl.arange(0, SIZE)
    pointers = weight + n.to(tl.int64)[:, None] * stride_wn + j[None, :]
    if HALVES == 2:
        low, high = unpack(tl.load(pointers), FORMAT, EXACT)
        low = _floats(low, scale, zero_point, global_scale, rows, k, K, GROUP)
        high = _floats(high, scale, zero_point, global_scale, rows, k + SIZE, K, GROUP)
        return rounded(low, DTYPE), rounded(high, DTYPE)
    else:
        values = widen(tl.load(pointers, mask=(j < K)[None, :], other=0), FORMAT, EXACT)
        values = _floats(values, scale, zero_point, global_scale, rows, k, K, GROUP)
        return (rounded(values, DTYPE),)


@triton.jit
def _add_product(acc, x, w, m, k, M, K, stride_xm):
    """``acc`` plus the product of x, from column ``k`` on, and ``w``."""
    SIZE: tl.constexpr = BLOCK.value
    column = k + tl.arange(0, SIZE)
    inside = (m < M)[:, None] & (column < K)[None, :]
    a = tl.load(x + m.to(tl.int64)[:, None] * stride_xm + column[None, :], mask=inside, other=0.0)
    if INTERPRETING and a.dtype == tl.bfloat16:
        # The interpreter's dot takes bf16 values for the integers that hold them.
        a = a.to(tl.float32)
        w = w.to(tl.float32)
    return tl.dot(a, tl.trans(w), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["M"])
def _weight_only_kernel(
    x, weight, scale, zero_point, global_scale, bias, residual, out,
    M, N, K,
    stride_xm, stride_wn, stride_sn, stride_residual, stride_out,
    FORM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TILES_M: tl.constexpr,
):  # fmt: skip
    """A tile of ``ROWS`` rows of x and ``COLS`` of the weight a program."""
    tile = tl.program_id(0)
    m = tile % TILES_M * ROWS + tl.arange(0, ROWS)
    column = tile // TILES_M * COLS + tl.arange(0, COLS)
    n = tl.minimum(column, N - 1)
    rows = n.to(tl.int64) * stride_sn
    HALVES: tl.constexpr = 8 // FORM.bits
    SIZE: tl.constexpr = BLOCK.value
    DTYPE: tl.constexpr = x.dtype.element_ty
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for block in range(tl.cdiv(K, SIZE * HALVES)):
        values = _block(weight, scale, zero_point, global_scale, n, rows, block, K, stride_wn, FORM, DTYPE)
        for half in tl.static_range(HALVES):
            acc = _add_product(acc, x, values[half], m, (block * HALVES + half) * SIZE, M, K, stride_xm)
    if bias is not None:
        acc += tl.load(bias + n).to(tl.float32)[None, :]
    inside = (m < M)[:, None] & (column < N)[None, :]
    if residual is not None:
        there = residual + m.to(tl.int64)[:, None] * stride_residual + column[None, :]
        acc = added(acc, tl.load(there, mask=inside, other=0.0))
    to = out + m.to(tl.int64)[:, None] * stride_out + column[None, :]
    tl.store(to, rounded(acc, out.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_kernel(
    weight, scale, zero_point, global_scale, out,
    N, K, stride_wn, stride_sn,
    FORM: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The float weight ``[N, K]``, contiguous: a block of ``ROWS`` rows a program, of ``BLOCKS`` along K."""
    program = tl.program_id(0)
    n = program // BLOCKS * ROWS + tl.arange(0, ROWS)
    block = program % BLOCKS
    HALVES: tl.constexpr = 8 // FORM.bits
    SIZE: tl.constexpr = BLOCK.value
    DTYPE: tl.constexpr = out.dtype.element_ty
    row = tl.minimum(n, N - 1)
    rows = row.to(tl.int64) * stride_sn
    values = _block(weight, scale, zero_point, global_scale, row, rows, block, K, stride_wn, FORM, DTYPE)
    for half in tl.static_range(HALVES):
        k = (block * HALVES + half) * SIZE + tl.arange(0, SIZE)
        inside = (n < N)[:, None] & (k < K)[None, :]
        tl.store(out + n.to(tl.int64)[:, None] * K + k[None, :], values[half], mask=inside)
