"""Grouped products of float rows with stored 4- and 8-bit weights: device code for any GPU.

``C[m] = A[m] @ W[g].T + bias[g]`` for the group ``g`` of row ``m``, where ``W = (q - z) * s``, or ``q * s + z`` with a
float ``z``. Tiles come from the table of ``write_tiles``. A piece of the weight is unpacked in registers. With few rows
of A, the tensor cores read it from there; with many, it goes through shared memory, from which Hopper's instructions
read it.

A value times its scale is rounded once, to the dtype of A, which changes nothing for powers of two. Sums are float32.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.grouped.kernels import GroupTiles
from qgemm.kernels.stages import GemmContext
from qgemm.kernels.stages.aggregate import INTERPRETING
from qgemm.kernels.stages.epilogue import biased, product, rounded
from qgemm.kernels.stages.unpack import scale_value, unpack, widen

HALF = tl.constexpr(128)  # of a packed block: the distance in K of the two values of a byte


@triton.jit
def _grouped_weight_kernel(
    A, W, C, scale, zero_point, global_scale, bias, tiles,
    N, K,
    FORM: tl.constexpr, CONFIG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``A [T, K]``, ``W [G, N, bytes]``, ``C [T, N]``, ``scale`` and ``zero_point [G, N, groups]``, ``bias [G, N]``.

    ``global_scale``: float32 ``[G, 2]``, a factor and a divisor. The last four may be None; all are contiguous.
    ``FORM``: a ``StoredForm``. ``CONFIG``: a ``WeightConfig``.
    """
    if PDL:
        gdc_wait()
    BLOCK_M: tl.constexpr = CONFIG.block_m
    BLOCK_N: tl.constexpr = CONFIG.block_n
    table = GroupTiles(tiles)
    ctx = GemmContext(BLOCK_M, BLOCK_N, HALF, num_sms=1, group_size_m=CONFIG.group_size_m)
    if tl.program_id(0) < table.count() * tl.cdiv(N, BLOCK_N):
        pid_m, pid_n = table.schedule(N, K, ctx).get_tile(tl.program_id(0))
        group, first, end = table.get(pid_m)
        group = group.to(tl.int64)
        rows = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        n = group * N + tl.minimum(rows, N - 1)
        acc = _sums(A, W, scale, zero_point, n, first, end, K, FORM, CONFIG)
        if PDL:
            gdc_launch_dependents()
        if FORM.group == 0:
            acc = acc * scale_value(tl.load(scale + n))[None, :]
        if global_scale is not None:
            acc = acc * (tl.load(global_scale + 2 * group) / tl.load(global_scale + 2 * group + 1))
        if bias is not None:
            acc = biased(acc, tl.load(bias + n))
        m = first + tl.arange(0, BLOCK_M)
        out = C + m.to(tl.int64)[:, None] * N + rows[None, :]
        tl.store(out, rounded(acc, C.dtype.element_ty), mask=(m < end)[:, None] & (rows < N)[None, :])


@triton.jit
def _sums(A, W, scale, zero_point, n, first, end, K, FORM: tl.constexpr, CONFIG: tl.constexpr):
    """The sums ``[block_m, block_n]`` of A's rows from ``first`` to ``end`` and the weight's rows ``n``."""
    BLOCK_M: tl.constexpr = CONFIG.block_m
    BLOCK_N: tl.constexpr = CONFIG.block_n
    PIECE: tl.constexpr = CONFIG.piece
    FORMAT: tl.constexpr = FORM.name
    j = tl.arange(0, PIECE)
    m = tl.minimum(first + tl.arange(0, BLOCK_M), end - 1)
    x_rows = A + m.to(tl.int64)[:, None] * K + j[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if FORM.bits == 4:
        w_rows = W + n[:, None] * (tl.cdiv(K, 2 * HALF) * HALF) + j[None, :]
        rest = tl.minimum(K % (2 * HALF), HALF)
        # Scales are loaded a step ahead: they are too short to be copied asynchronously.
        low_factors = _load_factors(scale, zero_point, n, K * 0, K, FORM, PIECE)
        high_factors = _load_factors(scale, zero_point, n, K * 0 + HALF, K, FORM, PIECE)
        for piece in range(K // (2 * HALF) * (HALF // PIECE) + tl.cdiv(rest, PIECE)):
            k = _first_value(piece, PIECE)
            low, high = unpack(tl.load(w_rows + piece * PIECE), FORMAT, A.dtype.element_ty)
            following = _first_value(piece + 1, PIECE)
            next_low = _load_factors(scale, zero_point, n, following, K, FORM, PIECE)
            next_high = _load_factors(scale, zero_point, n, following + HALF, K, FORM, PIECE)
            acc = _add(acc, low, low_factors, x_rows, k, K, FORM, PIECE)
            acc = _add(acc, high, high_factors, x_rows, k + HALF, K, FORM, PIECE)
            low_factors = next_low
            high_factors = next_high
    else:
        w_rows = W + n[:, None] * K + j[None, :]
        factors = _load_factors(scale, zero_point, n, K * 0, K, FORM, PIECE)
        for k in range(0, K, PIECE):
            values = widen(tl.load(w_rows + k, mask=(k + j < K)[None, :], other=0), FORMAT, A.dtype.element_ty)
            next_factors = _load_factors(scale, zero_point, n, k + PIECE, K, FORM, PIECE)
            acc = _add(acc, values, factors, x_rows, k, K, FORM, PIECE)
            factors = next_factors
    return acc


@triton.jit
def _first_value(piece, PIECE: tl.constexpr):
    """The first place in K of the low values of a piece of packed bytes."""
    start = piece * PIECE
    return tl.multiple_of(start // HALF * (2 * HALF) + start % HALF, PIECE)


@triton.jit
def _add(acc, values, factors, x_rows, k, K, FORM: tl.constexpr, PIECE: tl.constexpr):
    """``acc`` plus the product of unscaled values of columns from ``k`` on with those columns of the rows of A."""
    x = tl.load(x_rows + k, mask=(k + tl.arange(0, PIECE) < K)[None, :], other=0.0)
    values = tl.trans(_scaled(values, factors, FORM, PIECE))
    if INTERPRETING:
        # The interpreter's dot multiplies the integers that hold bfloat16 values instead of the values.
        return tl.dot(x.to(tl.float32), values.to(tl.float32), acc)
    else:
        return tl.dot(x, values, acc)


@triton.jit
def _load_factors(scale, zero_point, n, k, K, FORM: tl.constexpr, PIECE: tl.constexpr):
    """The stored scales, and zero points if any, of columns ``k`` to ``k + PIECE``; beyond K they may be anything."""
    GROUP: tl.constexpr = FORM.group
    if GROUP == 0:
        at = n
    else:
        rows = n * tl.cdiv(K, GROUP)
        if GROUP % PIECE == 0:
            at = rows + tl.minimum(k, K - 1) // GROUP
        elif PIECE % GROUP == 0:
            COUNT: tl.constexpr = PIECE // GROUP
            at = rows[:, None] + tl.minimum(k // GROUP + tl.arange(0, COUNT), (K - 1) // GROUP)[None, :]
        else:
            at = rows[:, None] + (tl.minimum(k + tl.arange(0, PIECE), K - 1) // GROUP)[None, :]
    factors = (n,)
    if GROUP != 0:
        factors = (tl.load(scale + at),)
    if zero_point is not None:
        factors = factors + (tl.load(zero_point + at),)
    return factors


@triton.jit
def _scaled(values, factors, FORM: tl.constexpr, PIECE: tl.constexpr):
    """``(q - z) * s``, or ``q * s + z``, of values ``[rows, PIECE]``, in the columns that ``factors`` belong to."""
    GROUP: tl.constexpr = FORM.group
    scale = factors[0]
    zero_point = factors[1] if len(factors) == 2 else None
    if GROUP == 0 or GROUP % PIECE == 0:
        zero_point = zero_point[:, None] if zero_point is not None else None
        return _times(values, scale[:, None], zero_point, FORM)
    elif PIECE % GROUP == 0:
        COUNT: tl.constexpr = PIECE // GROUP
        zero_point = zero_point[:, :, None] if zero_point is not None else None
        cut = tl.reshape(values, (values.shape[0], COUNT, GROUP))
        return tl.reshape(_times(cut, scale[:, :, None], zero_point, FORM), values.shape)
    else:
        return _times(values, scale, zero_point, FORM)


@triton.jit
def _times(values, raw, zero_point, FORM: tl.constexpr):
    """``(values - zero_point) * scale``, or ``values * scale + zero_point``, rounded once.

    ``raw``: the scales as they are stored.
    """
    if zero_point is not None and not FORM.float_zeros:
        values = _minus(values, zero_point)
    if FORM.float_zeros:
        return _multiply_add(values, tl.broadcast_to(raw, values.shape), tl.broadcast_to(zero_point, values.shape))
    elif FORM.group == 0:
        return values
    elif raw.dtype == tl.uint8 and values.dtype == tl.bfloat16:
        bits = tl.where(raw == 0, 1 << 6, raw.to(tl.int16) << 7)
        return product(values, bits.to(tl.int16).to(tl.bfloat16, bitcast=True))
    elif raw.dtype == values.dtype:
        return product(values, raw)
    else:
        return rounded(values.to(tl.float32) * scale_value(raw), values.dtype)


@triton.jit
def _multiply_add(values, scale, zero_point):
    """``values * scale + zero_point`` of floats, rounded to the dtype of ``values``."""
    if values.dtype == scale.dtype and values.dtype == zero_point.dtype and not INTERPRETING:
        return tl.fma(values, scale, zero_point)
    else:
        # The interpreter can't multiply bfloat16.
        sums = tl.fma(values.to(tl.float32), scale.to(tl.float32), zero_point.to(tl.float32))
        return rounded(sums, values.dtype)


@triton.jit
def _minus(values, zero_point):
    """``values - zero_point``, exactly: both types hold larger integers."""
    if INTERPRETING:
        return rounded(values.to(tl.float32) - zero_point.to(tl.float32), values.dtype)
    else:
        return values - zero_point.to(values.dtype)
