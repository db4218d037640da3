"""Weights that the L2 is told to fetch, for products that are to come, while memory has little else to read.

With few rows, attention to a cache leaves memory idle for as long as a product of 20 MB takes; see docs/performance.md.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LANES = tl.constexpr(32)
LINE = tl.constexpr(128)  # bytes


@triton.jit
def _prefetch_kernel(first, second, first_bytes, second_bytes):
    """The first bytes of one weight or two, a part a thread. Whole lines; programs have one warp."""
    gdc_launch_dependents()
    # Earlier, they would come in between what the product ahead reads.
    gdc_wait()
    _prefetch(first, first_bytes)
    if second is not None:
        _prefetch(second, second_bytes)


@triton.jit
def _prefetch(start, size):
    asm: tl.constexpr = """{
        .reg .pred p;
        setp.gt.s32 p, $2, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
    }"""
    part = tl.cdiv(tl.cdiv(size, tl.num_programs(0) * LANES), LINE) * LINE
    at = (tl.program_id(0) * LANES + tl.arange(0, LANES)) * part
    own = tl.minimum(part, size - at)
    tl.inline_asm_elementwise(asm, "=r,l,r", [(start + at).to(tl.uint64), own], tl.int32, False, 1)
