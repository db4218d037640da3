"""A quantized linear layer of one row in one launch: every program quantizes the row, then computes its tile.

``c[n] = sum over k of (q[k] * b[k, n]) * q_scale * b_scale[n] + bias[n]``, plus a residual, with ``q`` and ``q_scale``
from ``quantize_row``: the numbers are those of ``_quantize_rows_kernel`` and ``_gemm_kernel``, bit for bit.

A product of one row is mainly a read of the weights, and quantizing a short row takes less time than a launch. So each
program quantizes the row for itself, into its own memory, and waits for no other (docs/performance/int8.md).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages import GemmContext, ScheduleContext, make_output_view, make_tensor_view
from qgemm.kernels.stages.epilogue import Epilogue
from qgemm.kernels.stages.rows import RowQuantization, StridedRow, quantize_row


@triton.jit
def _quant_linear_kernel(
    x, q, q_scale, x_scale, B, C, b_scale, bias, residual,
    N, K, part,
    stride_xk, stride_bk, stride_bn, stride_b_scale, stride_bias,
    ROW_BLOCK: tl.constexpr, ROW_BLOCKS: tl.constexpr,
    CONFIG: tl.constexpr, EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile. ``x_scale``: one static scale, or None. ``PDL``: see ``Launch``.

    ``q``, ``q_scale``: where the first program keeps the quantized row and its scale. The next program's are ``part``
    bytes further, a multiple of 16. ``ROW_BLOCK``, ``ROW_BLOCKS``: as in ``quantize_row``.
    """
    program = tl.program_id(0)
    own = program.to(tl.int64) * part
    q += own
    q_scale += own // 4
    tensorA = make_tensor_view(q, 1, K, K, 1)
    tensorB = make_tensor_view(B, K, N, stride_bk, stride_bn)
    tensorC = make_output_view(C, 1, N, N, 1)
    epilogue = Epilogue(q_scale, b_scale, bias, 1, stride_b_scale, stride_bias, None, residual)
    ctx = GemmContext(CONFIG.block_m, CONFIG.block_n, CONFIG.block_k, num_sms=1, even_k=EVEN_K, quantized=True)
    out_tile = ScheduleContext(1, N, K, ctx).get_tile_from_coord(0, program)

    if PDL:
        gdc_wait()
    source, offsets = StridedRow(x, K, stride_xk), tl.arange(0, ROW_BLOCK)
    quantize_row(source, RowQuantization(x_scale), q, q_scale, offsets, ROW_BLOCKS)
    # Threads read what other threads wrote.
    tl.debug_barrier()
    acc = ctx.reduce_axis(tensorA, tensorB, out_tile)
    if PDL:
        gdc_launch_dependents()
    epilogue.store(acc, tensorC, out_tile)
