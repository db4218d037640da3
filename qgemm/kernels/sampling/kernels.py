"""The first of the largest scores of each row, and the record of a decoding step: two launches.

``_largest_kernel`` finds the largest score of a part of a row. ``_choose_kernel``, a single program, finds the largest
of all parts and records the tokens. A score and its place are combined into one integer: the upper half is ordered like
the scores, and the lower half is larger for earlier places. So the choice is a maximum, and doesn't depend on the
order.

``PDL``, ``NEXT_EARLY``: as in ``_norm_kernel``.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.order import ordered


@triton.jit(do_not_specialize=["minimum"])
def _largest_kernel(
    scores, ends, counters, largest,
    V, parts, COUNTERS, ENDS, stride, minimum,
    BLOCK: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """Each program has a part of ``BLOCK`` scores of a row: ``largest [B, parts]``. ``stride``: the stride of rows.

    ``ends [ENDS]``: tokens whose score counts as -inf before step ``minimum``. The step is the last of ``counters``.
    """
    if NEXT_EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    program = tl.program_id(0)
    row, part = (program // parts).to(tl.int64), program % parts
    place = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(scores + row * stride + place, mask=place < V, other=float("-inf")).to(tl.float32)
    if ends is not None:
        if tl.load(counters + COUNTERS - 1) < minimum:
            for i in range(ENDS):
                values = tl.where(place == tl.load(ends + i), float("-inf"), values)
    # Entries beyond a row's end must be less than -inf, which may be the only score that a row has.
    keys = (ordered(values).to(tl.int64) << 32) | (place ^ 0x7FFFFFFF).to(tl.int64)
    tl.store(largest + program, tl.max(tl.where(place < V, keys, -0x8000000000000000), axis=0))


@triton.jit(do_not_specialize=["B", "steps"])
def _choose_kernel(
    largest, token, rows, counters, finished, ends,
    B, parts, steps, COUNTERS, ENDS, padding,
    PADS: tl.constexpr, BLOCK_B: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """One program has all rows, ``BLOCK_B`` at a time. The arguments are those of a ``Choice``."""
    if NEXT_EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    step = tl.load(counters + COUNTERS - 1)
    noted = rows + step * (B + 1)
    has_row = (step >= 0) & (step < steps)
    # Triton 3.9's interpreter takes no mask that a single boolean went into.
    noted_rows = tl.where(has_row, B, 0)
    part = tl.arange(0, PARTS)[None, :]
    going = tl.zeros((), tl.int32)
    for first in range(0, B, BLOCK_B):
        row = first + tl.arange(0, BLOCK_B)
        inside = row < B
        keys = tl.load(
            largest + row[:, None] * parts + part, mask=inside[:, None] & (part < parts), other=-0x8000000000000000
        )
        chosen = (tl.max(keys, axis=1) & 0x7FFFFFFF) ^ 0x7FFFFFFF
        has_ended = tl.load(finished + row, mask=inside, other=1) != 0
        if PADS:
            chosen = tl.where(has_ended, padding, chosen)
        tl.store(token + row, chosen, mask=inside)
        tl.store(noted + row, chosen, mask=row < noted_rows)
        if ends is not None:
            for i in range(ENDS):
                has_ended = has_ended | (chosen == tl.load(ends + i))
            tl.store(finished + row, has_ended, mask=inside)
            going += tl.sum((inside & (has_ended == 0)).to(tl.int32), axis=0)
    if ends is not None:
        tl.store(noted + B, (going == 0).to(tl.int64), mask=has_row)
    # All threads must have read the step before it is counted up.
    tl.debug_barrier()
    for first in range(0, COUNTERS, PARTS):
        at = first + tl.arange(0, PARTS)
        counts = tl.load(counters + at, mask=at < COUNTERS, other=0)
        tl.store(counters + at, counts + 1, mask=at < COUNTERS)
