"""Row quantization within a product, for Hopper: the product's programs share the rows and wait for one another.

So that a layer is one launch (``linear.py`` says when). The values are those of ``_quantize_rows_kernel``, bit for bit,
and every row is quantized once: by the warps that multiply later, while the one that loads fills its ring with weights.

Programs count in memory which rows are done. A program may wait for one that hasn't started: another stream's kernel
can hold the room that it needs, and may itself wait for room. So nobody waits for long: a program that has asked
``PATIENCE`` times quantizes all rows itself. Others may write the same bytes to the same place then.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from qgemm.kernels.quantize_kernels import _quantize_row

# Renamed in Triton 3.7.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _quantize_every(step, first, quantization, row_scale, M, K, ROW: gl.constexpr):
    """Quantizes every ``step``-th row from ``first`` on."""
    x, q, static_scale, _, stride_xm, stride_xk = quantization
    offsets = gl.arange(0, ROW[1], gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    for row in range(first, M, step):
        x_row, q_row = x + row.to(gl.int64) * stride_xm, q + row.to(gl.int64) * K
        _quantize_row(x_row, q_row, row_scale + row, static_scale, K, stride_xk, offsets, ROW[0], ROW[2])


@gluon.jit
def _quantize_together(quantization, row_scale, M, K, ready, ROW: gl.constexpr):
    """Quantizes this program's rows, and completes the barrier ``ready`` when all programs have quantized theirs.

    ``quantization``: ``x [M, K]``; ``q``, int8, contiguous ``[M, K]``; a static scale or None; ``counts``; the strides
    of ``x``. ``counts``: two int32 zeros, for the rows that are done and the programs that have seen it. The last of
    those zeroes them again. ``ROW``: ``MIN_SCALE``, the length of a block and ``BLOCKS`` of ``_quantize_row``, and
    ``PATIENCE``.
    """
    counts = quantization[3]
    program, programs = gl.program_id(0), gl.num_programs(0)
    _quantize_every(programs, program, quantization, row_scale, M, K, ROW)
    # All threads' values come before the count.
    _barrier()
    own = gl.maximum(gl.cdiv(M - program, programs), 0)
    done = gl.atomic_add(counts, own, sem="acq_rel", scope="gpu") + own
    asked = 0
    while (done < M) & (asked < ROW[3]):
        done = gl.atomic_add(counts, 0, sem="acquire", scope="gpu")
        asked += 1
    if done < M:
        _quantize_every(1, 0, quantization, row_scale, M, K, ROW)
    _fence_async()
    _barrier()
    mbarrier.arrive(ready, count=1)
    seen = gl.atomic_add(counts + 1, 1, sem="acq_rel", scope="gpu")
    if seen == programs - 1:
        gl.store(counts, 0)
        gl.store(counts + 1, 0)


@gluon.jit
def _fence_async():
    """What ordinary instructions wrote, here or seen from here, the copy engine reads from here on."""
    gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r,r", [gl.program_id(0)], gl.int32, False, 1)
