"""Products of up to 16 rows with stored 4- and 8-bit weights on Hopper (sm_90), in Gluon.

A program computes one tile; its warps copy blocks to shared memory themselves. Used for a single row by a 4-bit weight,
and for what the kernel with a ring doesn't accept: rows that end within a block of 128 bytes, and scales of small
groups.

Where outputs are gates and ups, a program has as many rows of both and stores ``act(gate) * up``. A decode step of
Llama 3 8B in int4 saves 0.8 us in each layer (docs/performance/w4a16_design.md).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.weight_only.few_rows_blocks import (
    CopiedBlocks,
    begin,
    multiply,
    weight_blocks,
    x_blocks,
    x_rows_layout,
)
from qgemm.kernels.weight_only.few_rows_products import products_of, store_activated
from qgemm.kernels.weight_only.hopper_epilogue import SwappedEpilogue


@gluon.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x, weight, scale, zero_point, global_scale, bias, residual, out,
    M, N, K,
    stride_xm, stride_wn, stride_sn, stride_residual, stride_out,
    FORM: gl.constexpr, TILE: gl.constexpr, PDL: gl.constexpr,
    FUNCTION: gl.constexpr, ACTIVATION: gl.constexpr, UP_FIRST: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = gl.program_id(0) * TILE.rows
    # K is a multiple of 8, but the compiler only detects multiples of 16.
    K = K // 8 * 8
    w, scales, zeros = weight_blocks(weight, scale, zero_point, row, N, K, stride_wn, stride_sn, FORM, TILE)
    m = gl.minimum(gl.arange(0, TILE.x_rows, x_rows_layout(TILE, FORM)), M - 1)  # rows beyond the last repeat it
    blocks = CopiedBlocks(w, x_blocks(x, m, K, stride_xm, FORM, TILE), scales, zeros, FORM, TILE)
    products = products_of(scale, zero_point, stride_sn, M, N, K, x.dtype.element_ty, FORM, TILE, 1)
    loaded = begin(blocks, products, row, M)
    if PDL:
        gdc_wait()
    acc = multiply(blocks, products, row, loaded)
    epilogue = SwappedEpilogue(global_scale, bias, residual, stride_residual, M, N)
    outputs = products.outputs(products.total(acc), row, epilogue, out.dtype.element_ty)
    if TILE.gated:
        store_activated(outputs, row, M, N, out, stride_out, FUNCTION, ACTIVATION, UP_FIRST, TILE)
    else:
        products.store(outputs, row, M, out, stride_out)
