"""A quantized linear layer of very few rows in one launch: every program quantizes the rows, then computes its tile.

``c[m, n] = sum over k of (q[m, k] * b[k, n]) * q_scale[m] * b_scale[n] + bias[n]``, with ``q`` and ``q_scale`` from
``_quantize_row``: the numbers are those of ``_quantize_rows_kernel`` and ``_gemm_kernel``, bit for bit.

A product of one row is a read of the weights. A kernel ahead of it that quantizes the row costs the host a launch and
the device a handover. Quantizing a row of some thousand values takes a program about as long as one read from memory,
so each does it for itself: nobody waits for anybody. All of them write to the same buffer, and all write the same
bytes. A program reads what it wrote, after a barrier of its own threads, so whichever write came last is right.

Meanwhile the memory would be idle. So a program first asks the cache for the start of its weights. That is a hint,
which reads nothing, so it may come before the wait for the kernel ahead.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.quantize_kernels import _quantize_row
from qgemm.kernels.stages import (
    GemmContext,
    ScheduleContext,
    make_bias_view,
    make_output_view,
    make_scale_view,
    make_tensor_view,
)


@triton.jit
def _prefetch_columns(B, tile, BYTES: tl.constexpr, PARTS: tl.constexpr):
    """Asks the second-level cache for the first ``PARTS`` times ``BYTES`` bytes of a tile's columns of ``B``.

    For int8 with K contiguous, and columns that are multiples of 16 bytes apart; sm_90 and later.
    """
    request = tl.arange(0, tile.block_n * PARTS)
    column = (tile.pid_n * tile.block_n + request // PARTS) % B.cols
    address = B.ptr + column.to(tl.int64) * B.stride_col + request % PARTS * BYTES
    size = tl.full((tile.block_n * PARTS,), BYTES, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [address, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _quant_linear_kernel(
    x, q, q_scale, x_scale, B, C, b_scale, bias,
    M, N, K,
    stride_xm, stride_xk, stride_bk, stride_bn, stride_b_scale, stride_bias,
    MIN_SCALE: tl.constexpr, ROW_BLOCK: tl.constexpr, ROW_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr, EVEN_K: tl.constexpr,
    PREFETCH: tl.constexpr, PREFETCH_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile a program. ``q``, ``C``: contiguous ``[M, K]``, ``[M, N]``. ``x_scale``: one static scale, or None.

    ``ROW_BLOCK``, ``ROW_BLOCKS``: as in ``_quantize_row``. ``PREFETCH``: bytes of each part, or 0: ``_prefetch_columns``.
    ``PDL``: see ``Launch``.
    """
    tensorA = make_tensor_view(q, M, K, K, 1)
    tensorB = make_tensor_view(B, K, N, stride_bk, stride_bn)
    tensorC = make_output_view(C, M, N, N, 1)
    scale_view = make_scale_view(q_scale, b_scale, M, N, 1, stride_b_scale)
    bias_view = make_bias_view(bias, N, stride_bias) if bias is not None else None

    ctx = GemmContext(BLOCK_M, BLOCK_N, BLOCK_K, 1, 1, GROUP_SIZE_M, even_k=EVEN_K, quantized=True)
    sched = ScheduleContext(M, N, K, ctx)
    out_tile = sched.get_tile_from_idx(tl.program_id(0))

    if PREFETCH:
        _prefetch_columns(tensorB, out_tile, PREFETCH, PREFETCH_PARTS)
    if PDL:
        gdc_wait()
    x_row = x
    q_row = q
    q_row_scale = q_scale
    for _ in range(M):
        _quantize_row(x_row, q_row, q_row_scale, x_scale, K, stride_xk, MIN_SCALE, ROW_BLOCK, ROW_BLOCKS)
        x_row += stride_xm
        q_row += K
        q_row_scale += 1
    # What one thread wrote, others read.
    tl.debug_barrier()
    acc = ctx.reduce_axis(tensorA, tensorB, out_tile)
    if PDL:
        gdc_launch_dependents()
    tensorC.store(acc, out_tile, scale=scale_view, bias=bias_view)
