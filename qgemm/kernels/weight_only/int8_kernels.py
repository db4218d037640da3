"""int4 weights by int8 rows on every GPU: ``C[m, n] = x_scale[m] * sum over g of sums[m, n, g] * w_scale[n, g]``.

``sums`` are exact int32 over the values of group ``g``, of any size, or over the whole row. ``bias[n]`` is added and
the result is rounded once; a residual is added to the rounded result. Weights are packed as in
``qgemm.numerics.packing``.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.epilogue import added, rounded


@triton.jit(do_not_specialize=["M"])
def _int4_int8_kernel(
    x, weight, C, x_scale, scale, zero_point, bias, residual,
    M, N, K, G, width,
    group,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr, HALF: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile. ``x``: int8 ``[M, K]``, contiguous. ``width``: the bytes of a row of the weight.

    ``C``: ``[M, N]``, contiguous. ``residual``: None, or the same. ``STEP``: how many values along K are multiplied at
    a time, all of one group: a power of 2, 16 or more. ``WHOLE``: whether groups consist of whole steps, so that each
    step is in one half of a block. int8 products take at least 32 values; smaller steps are multiplied in float16,
    where a step's sum is exact as well.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    m = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, STEP)
    if PDL:
        gdc_wait()
    x_rows = x + m.to(tl.int64)[:, None] * K
    # Rows beyond the last repeat it.
    own = tl.minimum(n, N - 1).to(tl.int64)
    w_rows = weight + own[None, :] * width
    scales = scale + own * G
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for g in range(G):
        if zero_point is not None:
            zeros = tl.load(zero_point + own * G + g)[None, :]
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        end = min((g + 1) * group, K)
        for start in range(g * group, end, STEP):
            k = start + j
            a = tl.load(x_rows + k[None, :], mask=(m < M)[:, None] & (k < end)[None, :], other=0)
            at = start // (2 * HALF) * HALF + start % HALF + j if WHOLE else k // (2 * HALF) * HALF + k % HALF
            packed = tl.load(w_rows + at[:, None], mask=(k < end)[:, None], other=0)
            if not WHOLE:
                packed = tl.where((k // HALF % 2 == 0)[:, None], packed << 4, packed)
            elif start // HALF % 2 == 0:
                packed = packed << 4
            q = packed.to(tl.int8, bitcast=True) >> 4
            if zero_point is not None:
                q = q - zeros
            if STEP < 32:
                sums += tl.dot(a.to(tl.float16), q.to(tl.float16)).to(tl.int32)
            else:
                sums = tl.dot(a, q, sums, out_dtype=tl.int32)
        total += sums.to(tl.float32) * tl.load(scales + g).to(tl.float32)[None, :]
    out = total * tl.load(x_scale + m, mask=m < M, other=0.0)[:, None]
    if bias is not None:
        out += tl.load(bias + own).to(tl.float32)[None, :]
    if PDL:
        gdc_launch_dependents()
    inside = (m < M)[:, None] & (n < N)[None, :]
    if residual is not None:
        before = residual + m.to(tl.int64)[:, None] * N + n[None, :]
        out = added(out, tl.load(before, mask=inside, other=0.0))
    to = C + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, rounded(out, C.dtype.element_ty), mask=inside)
