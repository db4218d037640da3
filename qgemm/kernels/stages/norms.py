"""The norm of a row on the device, of the kinds in ``kernels/norms.py``. The row's blocks are in registers.

The sums are float32. Their order depends on the blocks and the number of threads, and so only on the row's length and
type: a row's result has the same bits however many rows there are.
"""

import triton
import triton.language as tl

from qgemm.kernels.stages.epilogue import product, rounded


@triton.jit
def normalize_blocks(blocks, weights, biases, length, offsets, NORM: tl.constexpr, BLOCKS: tl.constexpr):
    """The norm of a row of ``length`` values in ``blocks``, as blocks of the same dtype.

    ``weights``, ``biases``: blocks, too, of that dtype or float32; ``biases`` may be None. ``offsets``: the offsets
    within a block. ``NORM``: a ``Norm``. Values beyond the row must be 0.
    """
    BLOCK: tl.constexpr = offsets.shape[0]
    # The cast is needed because Triton makes a length of 1 a constant.
    count = tl.cast(length, tl.float32)
    mean = count * 0.0
    if NORM.is_layer:
        total = blocks[0].to(tl.float32)
        for i in tl.static_range(1, BLOCKS):
            total += blocks[i].to(tl.float32)
        mean = tl.math.div_rn(tl.sum(total, axis=0), count)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(BLOCKS):
        x = blocks[i].to(tl.float32)
        if NORM.is_layer:
            x = tl.where(offsets < length - i * BLOCK, x - mean, 0.0)
        squares = tl.math.fma(x, x, squares)
    rstd = tl.math.rsqrt(tl.math.div_rn(tl.sum(squares, axis=0), count) + NORM.eps)
    out = ()
    for i in tl.static_range(BLOCKS):
        x = blocks[i].to(tl.float32)
        if NORM.is_layer:
            x = x - mean
            if NORM.adds_one:  # no weight of 0 makes it 0 beyond the row
                x = tl.where(offsets < length - i * BLOCK, x, 0.0)
        bias = None
        if biases is not None:
            bias = biases[i]
        out = out + (_weigh(x * rstd, weights[i], bias, NORM, blocks[i].dtype),)
    return out


@triton.jit
def _weigh(y, weight, bias, NORM: tl.constexpr, dtype: tl.constexpr):
    """Normalized float32 values ``y`` with their weight and bias, rounded to ``dtype`` where the kind of norm does."""
    if NORM.kind == "rms":
        return product(rounded(y, dtype), weight)
    if NORM.kind == "layer_by_steps" and weight.dtype == dtype:
        y = product(rounded(y, dtype), weight)
        if bias is not None:
            y = rounded(y.to(tl.float32) + bias.to(tl.float32), dtype)
        return y
    factor = weight.to(tl.float32)
    if NORM.adds_one:
        factor = 1.0 + factor
        if NORM.is_layer:
            factor = rounded(factor, weight.dtype).to(tl.float32)
    y = y * factor
    if bias is not None:
        y = y + bias.to(tl.float32)
    return rounded(y, dtype)


@triton.jit
def add_blocks(blocks, others, dtype: tl.constexpr, BLOCKS: tl.constexpr):
    """``blocks + others``, block by block, rounded to ``dtype``; ``others`` may be None."""
    out = ()
    for i in tl.static_range(BLOCKS):
        total = blocks[i].to(tl.float32)
        if others is not None:
            total += others[i].to(tl.float32)
        out = out + (rounded(total, dtype),)
    return out


@triton.jit
def multiply_blocks(blocks, others, BLOCKS: tl.constexpr):
    """``blocks * others``, block by block, rounded to the dtype of ``others``."""
    out = ()
    for i in tl.static_range(BLOCKS):
        out = out + (product(blocks[i].to(others[i].dtype), others[i]),)
    return out


@triton.jit
def scale_blocks(blocks, factor, BLOCKS: tl.constexpr):
    """``blocks * factor``, a number, rounded to their dtype."""
    out = ()
    for i in tl.static_range(BLOCKS):
        out = out + (rounded(blocks[i].to(tl.float32) * tl.cast(factor, tl.float32), blocks[i].dtype),)
    return out


@triton.jit
def store_blocks(row, blocks, length, offsets, BLOCKS: tl.constexpr):
    """Writes ``blocks`` one after the other to ``row``, up to ``length`` values."""
    BLOCK: tl.constexpr = offsets.shape[0]
    for i in tl.static_range(BLOCKS):
        k = i * BLOCK + offsets
        tl.store(row + k, blocks[i], mask=k < length)
