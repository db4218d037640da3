"""``float_dot``: products of float tiles, the same in Triton's interpreter."""

import triton
import triton.language as tl

from qgemm.kernels.stages.aggregate import INTERPRETING


@triton.jit
def float_dot(a, b, acc):
    """``acc + a @ b`` in float32, without TF32."""
    if INTERPRETING:
        # The interpreter's dot multiplies the integers that hold bfloat16 values instead of the values.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
