"""Integers that are ordered like floats: on NVIDIA GPUs from sm_80 on, their maximum is one instruction."""

import triton
import triton.language as tl


@triton.jit
def ordered(x):
    """int32 values that are ordered like float32 ``x``; -0 equals 0, and any NaN is the largest."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
