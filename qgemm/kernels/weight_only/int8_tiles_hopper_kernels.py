"""int4 weights by int8 rows for Hopper (sm_90), from 17 rows on, in Gluon.

The formula and the roles of the operands are those of ``int8_few_rows_hopper_kernels``, but the products are
``wgmma``'s with operand A in registers. Two or four groups of four warps each have different rows, so that one
multiplies while another unpacks and scales; or two groups have the same rows and take every second block of K each
(``int8_tiles_hopper_products``). Where the last tiles are few, programs share their K (``items``).

Sums of groups are scaled and added in float32. If scales are multiples of a step, values times their multiple are int8,
and the sums over whole rows are integers: so tiles can have 256 rows of x, and with 1,024 rows and more a layer is 1.7
times as fast as bfloat16, where scaled sums reach 1.3 times. docs/performance/w4a8.md says what this reaches and why.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.quantize.hopper_kernels import SharedRows
from qgemm.kernels.stages import GemmContext, ScheduleContext
from qgemm.kernels.stages.ring import PANEL, PRODUCER_REGISTERS, barriers, initialize, store_block
from qgemm.kernels.stages.rows import RowQuantization
from qgemm.kernels.stages.staged_residual import add_residual
from qgemm.kernels.weight_only import int8_config
from qgemm.kernels.weight_only.int8_hopper_weights import BLOCK, Weights
from qgemm.kernels.weight_only.int8_tiles_hopper_products import Halves, Share, hand_over, load_many, multiply, take
from qgemm.kernels.weight_only.items import Items
from qgemm.kernels.weight_only.partial_sums import add_parts, in_blocks

ROW_COUNTS = gl.constexpr(int8_config.ROW_COUNTS)
MORE_QUANTIZING_REGISTERS = gl.constexpr(96)  # per thread of a producer that may have to quantize, beside eight warps


@gluon.jit
def _produce_many(
    A, B, weights, rows, ring, items, ready, handed, READERS: gl.constexpr, NEXT_EARLY: gl.constexpr
):  # fmt: skip
    """``READERS``: how many consumers read each block. ``rows``: as in ``_consume_many``."""
    w, x, full, empty, halves = ring
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = w.shape[1]
    SUBS: gl.constexpr = PANEL // B.block_shape[1]
    HALF_SIZE: gl.constexpr = SUBS * A.block_type.nbytes
    SIZE: gl.constexpr = SUBS * B.block_type.nbytes + (0 if halves.apart else 2 * HALF_SIZE)
    if NEXT_EARLY:
        gdc_launch_dependents()
    initialize(full, STAGES)
    initialize(empty, STAGES, READERS)
    if halves.apart:
        initialize(halves.full, halves.full.shape[0])
        initialize(halves.empty, halves.empty.shape[0], READERS)
    _, given, taken = handed
    initialize(given, given.shape[0])
    initialize(taken, taken.shape[0])
    if rows is None:
        mbarrier.arrive(ready, count=1)
    own_rows = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0]))
    row, col, k, end, _ = items.place(gl.program_id(0) * 0)
    ahead = gl.minimum(end - k, STAGES)
    for step in range(ahead):
        mbarrier.expect(full.index(step), SIZE)
        load_many(B, full.index(step), w, step, col, (k + step) * PANEL, PANEL)
        weights.fetch_scales(col + own_rows, k + step, 2 * SUBS, step == 0)
    # Nothing else is read before the preceding kernel in the stream has ended; see Launch.
    gdc_wait()
    if rows is not None:
        rows.wait_for_all(ready)
    for step in range(ahead):
        if halves.apart:
            halves.load(A, x, step, row, (k + step) * BLOCK, HALF_SIZE)
        else:
            load_many(A, full.index(step), x, step, row, (k + step) * BLOCK, BLOCK)
    step = ahead
    k += ahead
    for turn in range(items.turns()):
        if turn > 0:
            row, col, k, end, _ = items.place(turn)
        for at in range(k, end):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), (step // STAGES + 1) & 1)
            mbarrier.expect(full.index(slot), SIZE)
            load_many(B, full.index(slot), w, slot, col, at * PANEL, PANEL)
            if halves.apart:
                halves.load(A, x, step, row, at * BLOCK, HALF_SIZE)
            else:
                load_many(A, full.index(slot), x, slot, row, at * BLOCK, BLOCK)
            weights.fetch_scales(col + own_rows, at, 2 * SUBS, at == k)
            step += 1
    if not NEXT_EARLY:
        gdc_launch_dependents()
    if rows is not None:
        rows.forget(ready)


@gluon.jit
def _store_sums(C, staging, sums, weights, of_rows, x_scale, residual, m, n, M):
    """Scales ``sums``, adds the bias and a residual, and stores them as ``C[m:, n:]``."""
    cols = m + gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
    scaled = weights.finish(sums, gl.load(x_scale + cols, mask=cols < M, other=0.0), of_rows)
    # Waits until the previous store has read the staging memory.
    tma.store_wait(0)
    staging.permute((1, 0)).store(scaled.to(C.dtype))
    if residual is not None:
        add_residual(staging, residual, weights.N, m, n, M, weights.N)
    fence_async_shared()
    store_block(C, [m, n], staging)


@gluon.jit
def _consume_many(
    out, x_scale, weights, rows, ring, items, M, ready,
    WHO: gl.constexpr, CONSUMERS: gl.constexpr, SPLITS: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """``rows``: None, or the ``SharedRows`` of an x that isn't quantized yet; the first consumer quantizes it.

    ``PIECES``: the number of pieces in which the columns are multiplied and scaled. ``SPLITS``: how many consumers
    share the blocks of K of the same rows. All but the first of them hand their sums over to the first, in ``handed``.
    """
    C, residual, staging, handed, partial, counts = out
    w, x, _, _, _ = ring
    OWNERS: gl.constexpr = CONSUMERS // SPLITS
    OWNER: gl.constexpr = WHO % OWNERS
    FIRST_BLOCK: gl.constexpr = WHO // OWNERS
    STORES: gl.constexpr = FIRST_BLOCK == 0
    ROWS: gl.constexpr = w.shape[1] // OWNERS
    PIECE: gl.constexpr = x.shape[1] // PIECES
    GROUPS: gl.constexpr = 2 * PANEL // w.shape[2] if weights.group > 0 else 0  # of a block of K
    SUMS: gl.constexpr = gl.int32 if weights.whole_sums else gl.float32
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, PIECE, 32])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 4)

    own_rows = OWNER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    share = Share(own_rows, OWNER, OWNERS, FIRST_BLOCK, SPLITS)
    partial = partial.cast(gl.pointer_type(SUMS), bitcast=True)
    turns = items.turns()
    _, col, start, _, _ = items.place(turns * 0)
    scales = weights.scales_of_block(col + own_rows, start + FIRST_BLOCK, GROUPS)
    gdc_wait()
    if rows is not None and WHO == 0:
        rows.quantize_own(ready)
    mbarrier.wait(ready, 0)
    step = 0
    for turn in range(turns):
        m, col, start, end, shared = items.place(turn)
        _, next_col, next_start, _, _ = items.place(gl.minimum(turn + 1, turns - 1))
        after = next_col, next_start
        first = col + OWNER * ROWS
        a_rows = (first + gl.arange(0, ROWS, gl.SliceLayout(1, a_layout)))[:, None]
        of_rows = weights.of_rows(col + own_rows)
        sums = ()
        for _piece in gl.static_range(PIECES):
            sums = sums + (gl.zeros([ROWS, PIECE], SUMS, layout),)
        sums, scales = multiply(sums, scales, weights, ring, share, a_rows, (col, start, end), after, step, GROUPS)
        step += end - start
        if SPLITS > 1:
            sums = hand_over(sums, handed, share, turn)
        if STORES:
            for i in gl.static_range(PIECES):
                own = sums[i]
                finishes = turn >= 0
                if items.shares:
                    if shared >= 0:
                        who: gl.constexpr = OWNER * PIECES + i
                        added, finishes = add_parts(
                            (own,), (in_blocks(own),), partial, counts, items, shared, who, OWNERS * PIECES
                        )
                        own = added[0]
                if finishes:
                    to, row = staging.index(OWNER), m + i * PIECE
                    _store_sums(C, to, own, weights, of_rows, x_scale, residual, row, first, M)
        if SPLITS > 1 and STORES:
            take(handed, share)
    tma.store_wait(0)


@gluon.jit
def _allocate(
    A, B, C, STAGES: gl.constexpr, X_SLOTS: gl.constexpr, PIECES: gl.constexpr, OWNERS: gl.constexpr,
    SPLITS: gl.constexpr,
):  # fmt: skip
    """Shared memory: the ring, staging for outputs, and space for sums that consumers hand over, with barriers.

    ``X_SLOTS``: the slots of ``Halves`` that are apart from the weight's blocks, or 0.
    """
    STEP: gl.constexpr = B.block_shape[1]
    SUBS: gl.constexpr = PANEL // STEP
    SLOTS: gl.constexpr = X_SLOTS if X_SLOTS > 0 else STAGES * 2
    w = gl.allocate_shared_memory(B.dtype, [STAGES * SUBS, B.block_shape[0], STEP], B.layout)
    x = gl.allocate_shared_memory(A.dtype, [SLOTS * SUBS, A.block_shape[0], STEP], A.layout)
    full, empty = barriers(STAGES), barriers(STAGES)
    halves = Halves(barriers(X_SLOTS), barriers(X_SLOTS), True) if X_SLOTS > 0 else Halves(full, empty, False)
    ring = (w, x, full, empty, halves)
    staging = gl.allocate_shared_memory(C.dtype, [OWNERS, C.block_shape[0], C.block_shape[1]], C.layout)
    HANDED: gl.constexpr = OWNERS * (SPLITS - 1)
    if SPLITS > 1:
        plain: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
        shape: gl.constexpr = [HANDED * PIECES, C.block_shape[1], C.block_shape[0]]
        handed = (gl.allocate_shared_memory(gl.float32, shape, plain), barriers(HANDED), barriers(HANDED))
    else:
        handed = (staging, barriers(1), barriers(1))
    return ring, staging, handed


@gluon.jit
def _many(
    A, B, C, residual, x_scale, weights, rows, counts, sched, alone, sharers, partial,
    STAGES: gl.constexpr, X_SLOTS: gl.constexpr, SHARES: gl.constexpr, PIECES: gl.constexpr,
    CONSUMERS: gl.constexpr, SPLITS: gl.constexpr, REGISTERS: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    OWNERS: gl.constexpr = CONSUMERS // SPLITS
    ring, staging, handed = _allocate(A, B, C, STAGES, X_SLOTS, PIECES, OWNERS, SPLITS)
    # Completes when the ring's barriers are initialized and all rows are quantized.
    ready = barriers(1)
    initialize(ready, 1, 2 if rows is not None else 1)
    items = Items(sched, alone, gl.cdiv(sched.K, BLOCK), sharers, SHARES)
    first, M = ready.index(0), sched.M
    out = (C, residual, staging, handed, partial, counts)
    if rows is None:
        LOADING: gl.constexpr = PRODUCER_REGISTERS
    else:
        LOADING: gl.constexpr = MORE_QUANTIZING_REGISTERS
    # Constants stay constants only in a tuple that is written out here.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume_many, (out, x_scale, weights, rows, ring, items, M, first, 0, 2, SPLITS, PIECES)),
                (_consume_many, (out, x_scale, weights, rows, ring, items, M, first, 1, 2, SPLITS, PIECES)),
                (_produce_many, (A, B, weights, rows, ring, items, first, handed, OWNERS, NEXT_EARLY)),
            ],
            [4, 1],
            [REGISTERS, LOADING],
        )
    else:
        gl.warp_specialize(
            [
                (_consume_many, (out, x_scale, weights, rows, ring, items, M, first, 0, 4, SPLITS, PIECES)),
                (_consume_many, (out, x_scale, weights, rows, ring, items, M, first, 1, 4, SPLITS, PIECES)),
                (_consume_many, (out, x_scale, weights, rows, ring, items, M, first, 2, 4, SPLITS, PIECES)),
                (_consume_many, (out, x_scale, weights, rows, ring, items, M, first, 3, 4, SPLITS, PIECES)),
                (_produce_many, (A, B, weights, rows, ring, items, first, handed, OWNERS, NEXT_EARLY)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, LOADING],
        )


@gluon.jit(do_not_specialize=["M", "alone", "sharers"])
def _int4_int8_many_kernel(
    A, B, C, x_scale, scale, zero_point, step, bias, residual, counts,
    M, N, K, G, alone, sharers, partial_at,
    GROUP: gl.constexpr, STAGES: gl.constexpr, X_SLOTS: gl.constexpr, SHARES: gl.constexpr, PIECES: gl.constexpr,
    CONSUMERS: gl.constexpr, SPLITS: gl.constexpr, GROUP_M: gl.constexpr, REGISTERS: gl.constexpr,
    NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    """``A``, ``B``, ``C``: tensor maps of x ``[M, K]``, the weight ``[N, K / 2]`` and the output ``[M, N]``.

    The blocks of ``A`` and ``B`` are a tile's rows of x or of the weight by the values of a group; those of ``C`` are a
    piece's rows of x by a consumer's rows of the weight. ``residual``: ``[M, N]``, contiguous, or None. ``alone``,
    ``sharers``: as in ``Items``. ``SHARES``: whether programs share tiles. ``partial_at``: where, counted in values
    from ``x_scale``, there are 32 bits for each sum of each part of a shared tile. ``counts``: ``COUNTS_BYTES`` of
    zeros; they are zeros again when the kernel ends. ``REGISTERS``: per thread that multiplies.
    """
    weights = _weights(scale, zero_point, step, bias, N, G, GROUP)
    sched = ScheduleContext(M, N, K, GemmContext(A.block_shape[0], B.block_shape[0], BLOCK, 1, 1, GROUP_M))
    _many(
        A, B, C, residual, x_scale, weights, None, counts, sched, alone, sharers, x_scale + partial_at,
        STAGES, X_SLOTS, SHARES, PIECES, CONSUMERS, SPLITS, REGISTERS, NEXT_EARLY,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "alone", "sharers"])
def _int4_int8_many_layer_kernel(
    x, q, q_scale, B, C, scale, zero_point, step, bias, residual, A, counts,
    M, N, K, G, alone, sharers, partial_at, stride_xm, stride_xk,
    ROW: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, X_SLOTS: gl.constexpr, SHARES: gl.constexpr,
    PIECES: gl.constexpr, CONSUMERS: gl.constexpr, SPLITS: gl.constexpr, GROUP_M: gl.constexpr,
    REGISTERS: gl.constexpr, NEXT_EARLY: gl.constexpr,
):  # fmt: skip
    """The layer in one launch: the programs quantize the rows of ``x`` together, as ``SharedRows`` describes.

    ``A``: the tensor map of ``q``. The last words of ``counts`` count the quantized rows.
    """
    weights = _weights(scale, zero_point, step, bias, N, G, GROUP)
    rows = SharedRows(x, q, q_scale, RowQuantization(None), counts + ROW_COUNTS, M, K, stride_xm, stride_xk, ROW)
    sched = ScheduleContext(M, N, K, GemmContext(A.block_shape[0], B.block_shape[0], BLOCK, 1, 1, GROUP_M))
    _many(
        A, B, C, residual, q_scale, weights, rows, counts, sched, alone, sharers, q_scale + partial_at,
        STAGES, X_SLOTS, SHARES, PIECES, CONSUMERS, SPLITS, REGISTERS, NEXT_EARLY,
    )  # fmt: skip


@gluon.jit
def _weights(scale, zero_point, step, bias, N, G, GROUP: gl.constexpr):
    WHOLE_SUMS: gl.constexpr = GROUP == 0 or step is not None
    EXCESS: gl.constexpr = 1.0 if zero_point is not None or step is not None else 1.0 / 16
    return Weights(scale, zero_point, step, bias, N, G, GROUP, EXCESS, WHOLE_SUMS)
