"""Which products of routers a kernel computes, and how many tokens its programs have."""

from torch import Tensor

MAX_FEW_TOKENS = 16  # more are left to PyTorch
MAX_ROW_BYTES = 32_768  # of an expert, which a program has in registers
TOKENS = 4
"""Of a program, at most: every program reads an expert's row once for all of its tokens."""


def is_for_few(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel for few tokens computes ``router_logits(x [T, K], weight [E, K])``."""
    (T, K), itemsize = x.shape, max(x.itemsize, weight.itemsize)
    return 0 < T <= MAX_FEW_TOKENS and 0 < K * itemsize <= MAX_ROW_BYTES and weight.shape[0] > 0
