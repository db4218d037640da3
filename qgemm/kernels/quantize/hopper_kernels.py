"""Row quantization within a product, for Hopper: the product's programs share the rows and wait for one another.

So a layer is one launch (``hopper.in_one_launch`` says when; docs/performance.md, what it saves). The values are those
of ``_quantize_rows_kernel``, bit for bit, and every row is quantized once: by the warps that multiply later, while the
one that loads fills its ring with weights and then waits for all rows.

Programs count in memory which rows are done. A program may wait for one that hasn't started: another stream's kernel
can occupy the SM that it needs, and may itself wait for an SM. So the wait is bounded: a program that has asked
``PATIENCE`` times quantizes all rows itself. Others may write the same bytes to the same place then.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from qgemm.kernels.stages.rows import RowQuantization, StridedRow, quantize_row

# Renamed in Triton 3.7.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _quantize_every(step, first, quantization, row_scale, M, K, BLOCK: gl.constexpr, BLOCKS: gl.constexpr):
    """Quantizes every ``step``-th row from ``first`` on. Returns how many."""
    x, q, static_scale, _, stride_xm, stride_xk = quantization
    offsets = gl.arange(0, BLOCK, gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    count = 0
    for row in range(first, M, step):
        x_row, q_row = x + row.to(gl.int64) * stride_xm, q + row.to(gl.int64) * K
        quantize_row(
            StridedRow(x_row, K, stride_xk), RowQuantization(static_scale), q_row, row_scale + row, offsets, BLOCKS
        )
        count += 1
    return count


@gluon.jit
def _quantize_own(quantization, row_scale, M, K, ready, ROW: gl.constexpr):
    """Quantizes this program's rows and counts them: the first arrival at the barrier ``ready``.

    ``quantization``: ``x [M, K]``; ``q``, int8, contiguous ``[M, K]``; a static scale or None; ``counts``; the strides
    of ``x``. ``counts``: two int32 zeros, for the rows that are done and the programs that know of all of them.
    ``ROW``: the length of a block and ``BLOCKS`` of ``quantize_row``, and ``PATIENCE``.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    count = _quantize_every(programs, program, quantization, row_scale, M, K, ROW[0], ROW[1])
    if program < M:
        _fence_async()
        # All threads' values come before the count.
        _barrier()
        gl.atomic_add(quantization[3], count, sem="release", scope="gpu")
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _await_rows(quantization, row_scale, M, K, ready, ROW: gl.constexpr):
    """Returns when all programs have quantized their rows, or this one all of them: the second arrival at ``ready``.

    By the warp that loads.
    """
    counts = quantization[3]
    done = _load_acquire(counts)
    asked = 0
    while (done < M) & (asked < ROW[2]):
        done = _load_acquire(counts)
        asked += 1
    if done < M:
        _quantize_every(1, 0, quantization, row_scale, M, K, 256, 0)
    _fence_async()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _forget_rows(quantization, ready):
    """Zeroes ``counts`` if this is the last program that needed them."""
    counts = quantization[3]
    # This program's own rows are counted.
    mbarrier.wait(ready, 0)
    others = gl.atomic_add(counts + 1, 1, sem="acq_rel", scope="gpu")
    if others == gl.num_programs(0) - 1:
        gl.store(counts, 0)
        gl.store(counts + 1, 0)


@gluon.jit
def _load_acquire(pointer):
    """An int32 that other programs change, and what they wrote before they did. The same in all threads of a warp."""
    asm: gl.constexpr = "ld.acquire.gpu.global.u32 $0, [$1]; shfl.sync.idx.b32 $0, $0, 0, 31, -1;"
    return gl.inline_asm_elementwise(asm, "=r,l", [pointer.to(gl.uint64)], gl.int32, False, 1)


@gluon.jit
def _fence_async():
    """Between what ordinary instructions write to memory and what the copy engine reads there: by both sides.

    A fence for all kinds of memory would wait for everything that is on its way, half a microsecond.
    """
    asm: gl.constexpr = "fence.proxy.async.global; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,r", [gl.program_id(0)], gl.int32, False, 1)
