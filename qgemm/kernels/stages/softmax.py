"""Online softmax, block by block (Milakov and Gimelshein 2018, arXiv:1805.02867), to the base 2.

Each row has the largest score so far, ``top``, and ``total = sum(2 ** (score - top))``. When a block brings a larger
score, sums that were made with the earlier weights are multiplied by ``decay``.
"""

import triton
import triton.language as tl


@triton.jit
def add_scores(top, total, scores, order=None):
    """``(top, total, decay, weights)`` after a block of ``scores [rows, block]``.

    ``top`` and ``total``: ``[rows]``, -Inf and 0 at first. Scores of -Inf have weight 0; all of a row's may be -Inf. A
    score of NaN makes ``total`` NaN.

    ``order``: ``[block]``, roughly ``log2`` of the factors that the caller multiplies the weights by. ``top`` is then
    the maximum of score plus order, so that a weight times its factor is at most about 1.
    """
    new_top = tl.maximum(top, tl.max(scores if order is None else scores + order[None, :], axis=1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(top - shift)
    return new_top, total * decay + tl.sum(weights, axis=1), decay, weights


@triton.jit
def normalize(top, total, sums):
    """``(lse, sums / total)`` with ``lse = log2(sum(2 ** score))``; -Inf and zeros for a row without scores."""
    total = tl.where(total == 0.0, 1.0, total)
    return top + tl.log2(total), sums / total[:, None]


@triton.jit
def add_up_parts(part_out, part_lse, first, stride, count, D: tl.constexpr, PARTS: tl.constexpr, BLOCK_D: tl.constexpr):
    """``(lse [1], out [1, BLOCK_D])`` of a row whose ``count`` parts are at ``first + part * stride``.

    Each part is the result of ``normalize`` for some of the scores. They are combined by another softmax, over the
    parts' ``lse``, with the parts' results as values, ``PARTS`` at a time.
    """
    d = tl.arange(0, BLOCK_D)
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    sums = tl.zeros((1, BLOCK_D), tl.float32)
    for start_of_block in tl.range(0, count, PARTS):
        part = start_of_block + tl.arange(0, PARTS)
        place = first + part * stride
        lse = tl.load(part_lse + place, mask=part < count, other=float("-inf"))
        results = tl.load(
            part_out + place[:, None] * D + d[None, :], mask=(part < count)[:, None] & (d < D)[None, :], other=0.0
        )
        top, total, decay, weights = add_scores(top, total, lse[None, :])
        sums = sums * decay[:, None] + tl.sum(tl.trans(weights) * results, axis=0)[None, :]
    return normalize(top, total, sums)
