"""GEMM kernels made of the stages.

- ``_gemm_kernel``: one tile per program, or persistent programs. One kernel for every product: int8 with scales, raw
  int8, floats with an activation. Whatever an epilogue lacks is passed as None and compiled away.
- ``_gemm_streamk_kernel``: for int8 problems with too few tiles for the device. Programs add int32 partial sums into a
  zeroed workspace with atomics; the last program to arrive at a tile applies the epilogue. Integer sums don't depend on
  their order, so the result is exact and has the same bits every time.
- ``_block_scaled_kernel``: fp8 with a scale for each 128 values of K of a row, and for each 128 x 128 of the weight.
  Each block of K is multiplied separately, and its sums are scaled and added in float32.

Most products on Hopper run ``hopper_kernels.py`` instead. With few rows of A, a product is mainly a read of the
weights, for which one tile per program is faster than persistent programs (docs/performance/int8.md).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages import GemmContext, ScheduleContext, make_output_view, make_tensor_view
from qgemm.kernels.stages.context import DECODED
from qgemm.kernels.stages.epilogue import Epilogue
from qgemm.kernels.stages.rows import GROUP


@triton.jit(do_not_specialize=["M"])
def _gemm_kernel(
    A, B, C, A_scale, B_scale, bias, residual,
    M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    stride_a_scale, stride_b_scale, stride_bias, stride_residual,
    CONFIG: tl.constexpr, NUM_SMS: tl.constexpr, NUM_XCDS: tl.constexpr, EVEN_K: tl.constexpr,
    QUANTIZED: tl.constexpr, ALLOW_TF32: tl.constexpr, ACTIVATION: tl.constexpr,
    PERSISTENT: tl.constexpr, PDL: tl.constexpr, DECODES: tl.constexpr,
):  # fmt: skip
    """``CONFIG``: a ``GemmConfig``. ``PERSISTENT``: launched with ``NUM_SMS`` programs, else with one for each tile.

    ``PDL``: see ``Launch``. ``DECODES``: as in ``GemmContext``.
    """
    tensorA = make_tensor_view(A, M, K, stride_am, stride_ak)
    tensorB = make_tensor_view(B, K, N, stride_bk, stride_bn)
    tensorC = make_output_view(C, M, N, stride_cm, stride_cn)
    epilogue = Epilogue(
        A_scale, B_scale, bias, stride_a_scale, stride_b_scale, stride_bias, ACTIVATION, residual, stride_residual
    )
    ctx = GemmContext(
        CONFIG.block_m, CONFIG.block_n, CONFIG.block_k, NUM_SMS, NUM_XCDS, CONFIG.group_size_m,
        even_k=EVEN_K, quantized=QUANTIZED, allow_tf32=ALLOW_TF32, decodes=DECODES,
    )  # fmt: skip
    sched = ScheduleContext(M, N, K, ctx)

    if PDL:
        gdc_wait()
    if PERSISTENT:
        start, total, stride = sched.persistent_tile_range()
        for tile_id in range(start, total, stride):
            out_tile = sched.get_tile_from_idx(tile_id)
            acc = ctx.reduce_axis(tensorA, tensorB, out_tile)
            epilogue.store(acc, tensorC, out_tile)
    else:
        out_tile = sched.get_tile_from_idx(tl.program_id(0))
        acc = ctx.reduce_axis(tensorA, tensorB, out_tile)
        if PDL:
            # If this came earlier, programs of the next kernel would crowd onto the SMs that happen to be free.
            gdc_launch_dependents()
        epilogue.store(acc, tensorC, out_tile)


@triton.jit(do_not_specialize=["M"])
def _gemm_streamk_kernel(
    A, B, C, A_scale, B_scale, bias, residual, workspace, arrivals,
    M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    stride_a_scale, stride_b_scale, stride_bias, stride_residual,
    CONFIG: tl.constexpr, NUM_SMS: tl.constexpr, NUM_XCDS: tl.constexpr, EVEN_K: tl.constexpr,
    STREAMK_TILES: tl.constexpr,
):  # fmt: skip
    """``workspace``: int32 ``[M, N]`` of zeros. ``arrivals``: int32 zeros, one per tile."""
    tensorA = make_tensor_view(A, M, K, stride_am, stride_ak)
    tensorB = make_tensor_view(B, K, N, stride_bk, stride_bn)
    tensorC = make_output_view(C, M, N, stride_cm, stride_cn)
    partial = make_output_view(workspace, M, N, N, 1)
    epilogue = Epilogue(
        A_scale, B_scale, bias, stride_a_scale, stride_b_scale, stride_bias, None, residual, stride_residual
    )
    ctx = GemmContext(
        CONFIG.block_m, CONFIG.block_n, CONFIG.block_k, NUM_SMS, NUM_XCDS, CONFIG.group_size_m,
        even_k=EVEN_K, quantized=True,
    )  # fmt: skip
    sched = ScheduleContext(M, N, K, ctx, streamk_tiles=STREAMK_TILES)
    num_k = tl.cdiv(K, ctx.block_k)

    start, total, stride = sched.persistent_tile_range()
    for tile_id in range(start, total, stride):
        out_tile = sched.get_tile_from_idx(tile_id)
        acc = ctx.reduce_axis(tensorA, tensorB, out_tile)
        epilogue.store(acc, tensorC, out_tile)

    iter_id, end = sched.iter_range()
    while iter_id < end:
        pid_m, pid_n, k_start = sched.get_iter(iter_id)
        out_tile = sched.get_tile_from_coord(pid_m, pid_n)
        # The part of this program's run that lies in this tile.
        k_end = tl.minimum(num_k, k_start + end - iter_id)
        acc = ctx.init_accumulator()
        for k_idx in range(k_start, k_end):
            acc = ctx.reduce_tile(tensorA, tensorB, out_tile, k_idx, acc, boundary=not EVEN_K)
        if k_end - k_start == num_k:
            epilogue.store(acc, tensorC, out_tile)
        else:
            ptrs, mask = partial.tile_ptrs(out_tile, False, False)
            tl.atomic_add(ptrs, acc, mask=mask, sem="relaxed")
            # All threads must have added their sums before the program's arrival is counted.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + iter_id // num_k, k_end - k_start, sem="acq_rel")
            if arrived + k_end - k_start == num_k:
                acc = partial.load(out_tile)
                epilogue.store(acc, tensorC, out_tile)
        iter_id += k_end - k_start


@triton.jit(do_not_specialize=["M"])
def _block_scaled_kernel(
    A, B, C, A_scale, B_scale, bias, residual,
    M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    stride_a_scale, stride_b_scale, stride_bias, stride_residual, stride_a_block, stride_b_block,
    CONFIG: tl.constexpr, NUM_XCDS: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr, DECODES: tl.constexpr,
):  # fmt: skip
    """``sum over g of (A_g @ B_g)[m, n] * A_scale[m, g] * B_scale[n // 128, g]``, plus ``bias[n]``; ``g``: 128 of K.

    Each program computes one tile. ``CONFIG``: a ``GemmConfig`` with ``block_k`` 128. ``DECODES``: as in
    ``GemmContext``.
    """
    tensorA = make_tensor_view(A, M, K, stride_am, stride_ak)
    tensorB = make_tensor_view(B, K, N, stride_bk, stride_bn)
    tensorC = make_output_view(C, M, N, stride_cm, stride_cn)
    epilogue = Epilogue(None, None, bias, 1, 1, stride_bias, None, residual, stride_residual)
    ctx = GemmContext(
        CONFIG.block_m, CONFIG.block_n, GROUP, 1, NUM_XCDS, CONFIG.group_size_m, even_k=EVEN_K, decodes=DECODES
    )  # fmt: skip
    out_tile = ScheduleContext(M, N, K, ctx).get_tile_from_idx(tl.program_id(0))
    rm, rn = out_tile.indices()
    a_scale = A_scale + rm.to(tl.int64) * stride_a_scale
    b_scale = B_scale + (rn // GROUP).to(tl.int64) * stride_b_scale

    if PDL:
        gdc_wait()
    acc = reduce_blocks(
        ctx, tensorA, tensorB, out_tile, a_scale, b_scale, stride_a_block, stride_b_block, rm < M, rn < N
    )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    epilogue.store(acc, tensorC, out_tile)


@triton.jit
def reduce_blocks(ctx, A, B, out_tile, a_scale, b_scale, stride_a_block, stride_b_block, rows, cols):
    """The sum over all of K for one output tile; sums over 128 values of K are multiplied by their blocks' scales.

    ``ctx`` has ``block_k`` 128. ``a_scale``, ``b_scale``: pointers to the first scales of the tile's rows and columns.
    ``rows``, ``cols``: masks of those that exist.
    """
    acc = ctx.init_accumulator()
    num_whole = A.cols // GROUP
    for g in range(num_whole):
        sums = ctx.reduce_tile(A, B, out_tile, g, ctx.init_accumulator())
        acc += sums * _factors(a_scale + g * stride_a_block, b_scale + g * stride_b_block, rows, cols)
    if not ctx.even_k:
        sums = ctx.reduce_tile(A, B, out_tile, num_whole, ctx.init_accumulator(), boundary=True)
        a_scale += num_whole * stride_a_block
        b_scale += num_whole * stride_b_block
        acc += sums * _factors(a_scale, b_scale, rows, cols)
    if ctx.decodes:
        acc *= DECODED
    return acc


@triton.jit
def _factors(a_scale, b_scale, rows, cols):
    a = tl.load(a_scale, mask=rows, other=0.0)
    b = tl.load(b_scale, mask=cols, other=0.0)
    return a[:, None] * b[None, :]
