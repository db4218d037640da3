"""Grouped products of many rows with stored mxfp4 weights (fp4, a power of 2 per 32 values) on Hopper, in Gluon.

A tile has 128 rows of a group's weight and up to ``columns`` rows of A (``GroupTiles``). TMA fills two rings: one with
packed blocks of the weight, one with A. Two groups of four warps each unpack 64 rows of the weight into the registers
from which ``wgmma`` reads its first operand, so a weight is unpacked once for all rows of a tile. A tile with fewer
rows uses narrower instructions and loads fewer rows.

To TMA, all groups' weights are one matrix. What a tile loads beyond its rows, or beyond its group's weight, isn't
stored. TMA stores full blocks of 64 rows, threads store others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.grouped.kernels import GroupTiles
from qgemm.kernels.stages import GemmContext
from qgemm.kernels.stages.ring import barriers, initialize, load_block, store_block
from qgemm.kernels.stages.unpack import exponent_pairs, unpack_scaled_pairs

BLOCK = gl.constexpr(128)  # bytes of a row
PANEL = gl.constexpr(64)  # values of a row of A


@gluon.jit
def _produce(A, W, tiles, a_slots, w_slots, a_full, a_empty, w_full, w_empty, N, K, ctx, TILE: gl.constexpr):
    PANELS: gl.constexpr = 4
    PART: gl.constexpr = A.block_shape[0]
    PARTS: gl.constexpr = TILE.columns // PART
    gdc_wait()
    table = GroupTiles(tiles)
    sched = table.schedule(N, K, ctx)
    num_blocks = gl.cdiv(K, PANELS * PANEL)
    start, total, stride = sched.persistent_tile_range()
    w_step = 0
    a_step = 0
    for tile_id in range(start, total, stride):
        pid_m, pid_n = sched.get_tile(tile_id)
        group, first, end = table.get(pid_m)
        needed = gl.cdiv(end - first, PART)
        for block in range(num_blocks):
            slot = w_step % TILE.w_depth
            mbarrier.wait(w_empty.index(slot), (w_step // TILE.w_depth + 1) & 1)
            mbarrier.expect(w_full.index(slot), 2 * W.block_type.nbytes)
            for i in gl.static_range(2):
                at = group * N + pid_n * 128 + i * 64
                load_block(W, [at, block * (BLOCK // 2)], w_full.index(slot), w_slots.index(slot * 2 + i))
            w_step += 1
            for panel in gl.static_range(PANELS):
                slot = a_step % TILE.a_depth
                full = a_full.index(slot)
                mbarrier.wait(a_empty.index(slot), (a_step // TILE.a_depth + 1) & 1)
                for parts in gl.static_range(1, PARTS + 1):
                    mbarrier.expect(full, parts * A.block_type.nbytes, pred=needed == parts)
                for part in gl.static_range(PARTS):
                    to = a_slots.index(slot).slice(part * PART, PART)
                    k = (block * PANELS + panel) * PANEL
                    load_block(A, [first + part * PART, k], full, to, pred=part < needed)
                a_step += 1
    # If this came earlier, programs of the next kernel would crowd onto the SMs that happen to be free.
    gdc_launch_dependents()


@gluon.jit
def _load_exponents(pointers, block, last):
    """A block's exponents, two per value: those of the panels of its first half, then of its second."""
    exponents = ()
    for i in gl.static_range(4):
        exponents = exponents + (gl.load(pointers + gl.minimum(block * 4 + i, last)),)
    return exponents


@gluon.jit
def _spread(two, LAYOUT: gl.constexpr):
    """The two powers of 2 in each uint16 of ``two [64]``, each repeated for 16 words of a panel: ``[64, 32]``."""
    pieces: gl.constexpr = gl.zeros([64, 32], gl.uint16, LAYOUT).reshape([64, 2, 16]).type.layout
    a, b = exponent_pairs(two)
    pair = gl.convert_layout(gl.join(a, b), gl.SliceLayout(2, pieces), assert_trivial=True)
    return gl.convert_layout(
        pair.expand_dims(2).broadcast_to([64, 2, 16]).reshape([64, 32]), LAYOUT, assert_trivial=True
    )


@gluon.jit
def _sums(
    scale, group, col, a_slots, w_slots, a_full, a_empty, w_full, w_empty, w_step, a_step, num_blocks, N, K,
    TILE: gl.constexpr, WHO: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """A tile's sums ``[64, WIDTH]``, and the next steps: ``(sums, w_step, a_step)``."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    wl: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    pl: gl.constexpr = gl.DotOperandLayout(0, mma, 1)
    pieces: gl.constexpr = gl.zeros([64, 32], gl.uint16, pl).reshape([64, 2, 16]).type.layout
    rl: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, pieces))
    pairs = K // PANEL
    rows = group.to(gl.int64) * N + gl.minimum(col + gl.arange(0, 64, rl), N - 1)
    pointers = scale + rows * pairs
    acc = gl.zeros([64, WIDTH], gl.float32, mma)
    following = _load_exponents(pointers, 0, pairs - 1)
    for block in range(num_blocks):
        w_slot = w_step % TILE.w_depth
        exponents = following
        following = _load_exponents(pointers, block + 1, pairs - 1)
        mbarrier.wait(w_full.index(w_slot), w_step // TILE.w_depth & 1)
        packed = w_slots.index(w_slot * 2 + WHO)
        for half in gl.static_range(2):
            values = ()
            for panel in gl.static_range(2):
                codes = packed.slice(panel * 32, 32, 1).load(pl)
                scales = _spread(exponents[panel], pl), _spread(exponents[2 + panel], pl)
                w = unpack_scaled_pairs(codes, scales[0], scales[1])[half]
                values = values + (gl.convert_layout(w, wl, assert_trivial=True),)
            for panel in gl.static_range(2):
                slot = (a_step + panel) % TILE.a_depth
                mbarrier.wait(a_full.index(slot), (a_step + panel) // TILE.a_depth & 1)
                a = a_slots.index(slot).slice(0, WIDTH).permute((1, 0))
                acc = warpgroup_mma(values[panel], a, acc, is_async=True)
            # Registers of the weight are rewritten only when all products have read them. Assemblers before CUDA 13.3
            # may move the writes too early.
            for panel in gl.static_range(2):
                acc = warpgroup_mma_wait(1 - panel, deps=(acc,))
                mbarrier.arrive(a_empty.index((a_step + panel) % TILE.a_depth), count=1)
            a_step += 2
        mbarrier.arrive(w_empty.index(w_slot), count=1)
        w_step += 1
    return acc, w_step, a_step


@gluon.jit
def _store(C_map, C, staging, values, first, end, col, N):
    """Stores ``values [64, rows]`` to the columns of C from ``col`` on and its rows from ``first`` to ``end``."""
    ROWS: gl.constexpr = staging.shape[0]
    if values.shape[1] > ROWS:
        HALF: gl.constexpr = values.shape[1] // 2
        halves = values.reshape([64, 2, HALF]).permute(0, 2, 1).split()
        for i in gl.static_range(2):
            _store(C_map, C, staging, halves[i], first + i * HALF, end, col, N)
    else:
        if first < end:
            tma.store_wait(0)
            place = staging.slice(0, values.shape[1])
            place.store(values.permute((1, 0)))
            if end - first >= ROWS:
                fence_async_shared()
                store_block(C_map, [first, col], staging)
            else:
                # A thread has 8 columns, 16 bytes.
                by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
                rows = first + gl.arange(0, values.shape[1], gl.SliceLayout(1, by_row))
                cols = col + gl.arange(0, 64, gl.SliceLayout(0, by_row))
                pointers = C + rows.to(gl.int64)[:, None] * N + cols[None, :]
                gl.store(pointers, place.load(by_row), mask=(rows < end)[:, None] & (cols < N)[None, :])


@gluon.jit
def _consume_tile(
    C_map, C, scale, bias, group, first, end, col, a_slots, w_slots, a_full, a_empty, w_full, w_empty,
    staging, w_step, a_step, num_blocks, N, K, TILE: gl.constexpr, WHO: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """One tile with at most ``WIDTH`` rows of A; if it has few rows, with narrower instructions."""
    if TILE.narrowest < WIDTH and end - first <= WIDTH // 2:
        w_step, a_step = _consume_tile(
            C_map, C, scale, bias, group, first, end, col, a_slots, w_slots, a_full, a_empty, w_full,
            w_empty, staging, w_step, a_step, num_blocks, N, K, TILE, WHO, WIDTH // 2,
        )  # fmt: skip
    else:
        mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
        n = gl.minimum(col + gl.arange(0, 64, gl.SliceLayout(1, mma)), N - 1)
        rows = group.to(gl.int64) * N + n
        acc, w_step, a_step = _sums(
            scale, group, col, a_slots, w_slots, a_full, a_empty, w_full, w_empty, w_step, a_step,
            num_blocks, N, K, TILE, WHO, WIDTH,
        )  # fmt: skip
        if bias is not None:
            acc = acc + gl.load(bias + rows).to(gl.float32)[:, None]
        _store(C_map, C, staging, acc.to(C_map.dtype), first, end, col, N)
    return w_step, a_step


@gluon.jit
def _consume(
    C_map, C, scale, bias, tiles, a_slots, w_slots, a_full, a_empty, w_full, w_empty, staging, N, K, ctx,
    TILE: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    gdc_wait()
    table = GroupTiles(tiles)
    sched = table.schedule(N, K, ctx)
    num_blocks = gl.cdiv(K, 2 * BLOCK)
    start, total, stride = sched.persistent_tile_range()
    w_step = 0
    a_step = 0
    for tile_id in range(start, total, stride):
        pid_m, pid_n = sched.get_tile(tile_id)
        group, first, end = table.get(pid_m)
        w_step, a_step = _consume_tile(
            C_map, C, scale, bias, group, first, end, pid_n * 128 + WHO * 64, a_slots, w_slots, a_full,
            a_empty, w_full, w_empty, staging, w_step, a_step, num_blocks, N, K, TILE, WHO, TILE.columns,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _grouped_weight_hopper_kernel(
    A, W, C_map, C, scale, bias, tiles,
    N, K,
    TILE: gl.constexpr, NUM_SMS: gl.constexpr,
):  # fmt: skip
    """``A``, ``W``, ``C_map``: tensor maps of ``[T, K]``, the stored weights ``[G * N, words]`` and ``C [T, N]``.

    ``scale [G, N, K / 64]``: uint16, each with the exponents of two powers of 2. ``bias [G, N]`` or None. ``tiles``:
    the table from ``write_tiles`` for tiles of ``columns`` rows.
    """
    ctx = GemmContext(TILE.columns, 128, PANEL, NUM_SMS, 1, TILE.group_size_m)
    a_slots = gl.allocate_shared_memory(A.dtype, [TILE.a_depth, TILE.columns, PANEL], A.layout)
    w_slots = gl.allocate_shared_memory(W.dtype, [TILE.w_depth * 2, 64, BLOCK // 2], W.layout)
    a_full, a_empty = barriers(TILE.a_depth), barriers(TILE.a_depth)
    w_full, w_empty = barriers(TILE.w_depth), barriers(TILE.w_depth)
    initialize(a_full, TILE.a_depth)
    initialize(w_full, TILE.w_depth)
    initialize(a_empty, TILE.a_depth, 2)
    initialize(w_empty, TILE.w_depth, 2)
    staging = gl.allocate_shared_memory(C_map.dtype, [2, C_map.block_shape[0], 64], C_map.layout)
    # Constants stay constants only in tuples that are written out here.
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    C_map, C, scale, bias, tiles, a_slots, w_slots, a_full, a_empty, w_full, w_empty,
                    staging.index(0), N, K, ctx, TILE, 0,
                ),
            ),
            (
                _consume,
                (
                    C_map, C, scale, bias, tiles, a_slots, w_slots, a_full, a_empty, w_full, w_empty,
                    staging.index(1), N, K, ctx, TILE, 1,
                ),
            ),
            (
                _produce,
                (A, W, tiles, a_slots, w_slots, a_full, a_empty, w_full, w_empty, N, K, ctx, TILE),
            ),
        ],
        [4, 1],
        [TILE.registers, 40],
    )  # fmt: skip
