"""Integers in the order of floats: the largest of them is an instruction on NVIDIA's GPUs from sm_80 on."""

import triton
import triton.language as tl


@triton.jit
def ordered(x):
    """int32 values in the order of float32 ``x``, in which -0 equals 0, and any NaN is the largest."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
