"""Partial sums in memory: where programs share a tile along K, its last sharer adds up their parts. In Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from qgemm.kernels.stages.ring import load_acquire, thread_barrier
from qgemm.kernels.weight_only import config

COUNT_BITS = gl.constexpr(config.COUNT_BITS)
COUNTS_IN_A_WORD = gl.constexpr(config.COUNTS_IN_A_WORD)


@gluon.jit
def add_parts(sums, at, partial, counts, items, shared, WHO: gl.constexpr, GROUPS: gl.constexpr):
    """Leaves the sums of a shared tile's part to the tile's last sharer, which adds them up here.

    Returns ``(sums, finishes)``. ``sums``: a tuple, a tensor for each accumulator. Parts are always added in the same
    order, the last sharer's first, so results have the same bits every time. Earlier sharers have started before the
    last one and wait for nobody. ``at``: the place of each sum among those of a part. ``WHO``: which of ``GROUPS``
    groups of warps this is; each has its own sums.
    """
    SIZE: gl.constexpr = _size(sums)
    first, last = items.sharers_of(shared)
    count = shared * GROUPS + WHO
    word = counts + count // COUNTS_IN_A_WORD
    shift = count % COUNTS_IN_A_WORD * COUNT_BITS
    finishes = gl.program_id(0) == last
    if finishes:
        others = last - first
        while load_acquire(word) >> shift & ((1 << COUNT_BITS) - 1) < others:
            pass
        # All threads must have seen the count before it is reset for the next launch.
        thread_barrier()
        gl.atomic_add(word, -(others << shift), sem="relaxed", scope="gpu")
        for program in range(first, last):
            part = (program + shared) * GROUPS + WHO
            added = ()
            for i in gl.static_range(len(sums)):
                own = gl.load(partial + part.to(gl.int64) * SIZE + at[i], cache_modifier=".cg")
                added = added + (sums[i] + own,)
            sums = added
    else:
        own = (gl.program_id(0) + shared) * GROUPS + WHO
        for i in gl.static_range(len(sums)):
            gl.store(partial + own.to(gl.int64) * SIZE + at[i], sums[i])
        thread_barrier()
        gl.atomic_add(word, 1 << shift, sem="release", scope="gpu")
    return sums, finishes


@constexpr_function
def _size(sums):
    """The number of values in several tensors."""
    return sum(each.numel for each in sums)


@gluon.jit
def in_blocks(sums):
    """The place of a warp group's sums among those of a part: blocks of 8 x 8, which a warp writes at a time."""
    n = gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
    m = gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
    return (n // 8 * (sums.shape[1] // 8 * 64) + n % 8 * 8)[:, None] + (m // 8 * 64 + m % 8)[None, :]
