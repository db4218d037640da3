"""Row quantization within a product, for Hopper, in Gluon: a product's programs share the rows and wait for each other.

So a layer is one launch (``hopper.in_one_launch`` says when; docs/performance/int8.md says what it saves). The values
are those of ``_quantize_rows_kernel``, bit for bit. Every row is quantized once, by the warps that multiply later.
Meanwhile the producer warp fills its ring with weights; then it waits for all rows.

Programs count the finished rows in memory. A program may wait for one that hasn't started: another stream's kernel can
occupy the SM that the other needs, and may itself wait for an SM. So the wait is bounded: a program that has asked
``PATIENCE`` times quantizes all rows itself. Other programs may then write the same bytes to the same place.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from qgemm.kernels.stages.aggregate import aggregate
from qgemm.kernels.stages.ring import load_acquire, thread_barrier
from qgemm.kernels.stages.rows import RowQuantization, StridedRow, quantize_row, quantize_row_groups

QUANTIZING_REGISTERS = gl.constexpr(80)  # per thread of a producer that may have to quantize


@aggregate
class SharedRows:
    """Rows ``x [M, K]`` that a product's programs quantize together, to contiguous ``q [M, K]`` and ``scale [M]``.

    ``counts``: two int32 zeros, which count the finished rows and the programs that know that all are finished.
    ``row``: ``BLOCK`` and ``BLOCKS`` of ``quantize_row``, and ``PATIENCE``. ``grouped``: fp8 with a scale for each 128
    values; ``scale`` is then ``[M, ceil(K / 128)]``.
    """

    x: gl.tensor
    q: gl.tensor
    scale: gl.tensor
    quantization: RowQuantization
    counts: gl.tensor
    M: gl.tensor
    K: gl.tensor
    stride_xm: gl.tensor
    stride_xk: gl.tensor
    row: gl.constexpr
    grouped: gl.constexpr = False

    @gluon.jit
    def quantize_every(self, step, first, BLOCK: gl.constexpr, BLOCKS: gl.constexpr):
        """Quantizes every ``step``-th row from ``first`` on. Returns the number of rows."""
        offsets = gl.arange(0, BLOCK, gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
        count = 0
        for row in range(first, self.M, step):
            source = StridedRow(self.x + row.to(gl.int64) * self.stride_xm, self.K, self.stride_xk)
            q_row = self.q + row.to(gl.int64) * self.K
            if self.grouped:
                scale_row = self.scale + row * gl.cdiv(self.K, 128)
                quantize_row_groups(source, self.quantization, q_row, scale_row, 1, offsets, BLOCKS)
            else:
                quantize_row(source, self.quantization, q_row, self.scale + row, offsets, BLOCKS)
            count += 1
        return count

    @gluon.jit
    def quantize_own(self, ready):
        """Quantizes this program's rows and counts them: the first arrival at the barrier ``ready``."""
        program = gl.program_id(0)
        count = self.quantize_every(gl.num_programs(0), program, self.row[0], self.row[1])
        if program < self.M:
            _fence_async()
            # All threads must have written their values before the rows are counted.
            thread_barrier()
            gl.atomic_add(self.counts, count, sem="release", scope="gpu")
        mbarrier.arrive(ready, count=1)

    @gluon.jit
    def wait_for_all(self, ready):
        """Returns when all rows are quantized, by all programs or by this one: the second arrival at ``ready``.

        Called by the producer warp.
        """
        done = load_acquire(self.counts)
        asked = 0
        while (done < self.M) & (asked < self.row[2]):
            done = load_acquire(self.counts)
            asked += 1
        if done < self.M:
            self.quantize_every(1, 0, 256, 0)
        _fence_async()
        mbarrier.arrive(ready, count=1)

    @gluon.jit
    def forget(self, ready):
        """Resets ``counts`` to zero if this is the last program that needed them."""
        # Waits until this program's own rows are counted.
        mbarrier.wait(ready, 0)
        others = gl.atomic_add(self.counts + 1, 1, sem="acq_rel", scope="gpu")
        if others == gl.num_programs(0) - 1:
            gl.store(self.counts, 0)
            gl.store(self.counts + 1, 0)


@gluon.jit
def _fence_async():
    """A fence between ordinary writes to memory and TMA's reads there. Both sides need it.

    A fence for all kinds of memory would wait for everything in flight, which takes half a microsecond.
    """
    asm: gl.constexpr = "fence.proxy.async.global; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,r", [gl.program_id(0)], gl.int32, False, 1)
