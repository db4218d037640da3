"""Scales and zero points of small groups on Hopper: those of a block of each row, read together. In Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function


@constexpr_function
def rows_layout(rows, count, warps):
    """The layout of ``count`` factors of each row: a thread has all those of the rows whose sums it has.

    ``warps``: how many warps have rows of their own.
    """
    own = [[0, 1 << i] for i in range(count.bit_length() - 1)]
    again = [[16 * warps << i, 0] for i in range((rows // (16 * warps)).bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [*own, [8, 0], *again], lanes, [[16 << i, 0] for i in range(warps.bit_length() - 1)], [], [rows, count]
    )


@gluon.jit
def columns(factors):
    """The columns of ``factors``, two-dimensional."""
    ROWS: gl.constexpr = factors.shape[0]
    COUNT: gl.constexpr = factors.shape[1]
    if COUNT == 1:
        return (factors.reshape([ROWS]),)
    elif COUNT == 2:
        return factors.split()
    else:
        first, second = factors.reshape([ROWS, 2, COUNT // 2]).permute(0, 2, 1).split()
        return columns(first) + columns(second)
