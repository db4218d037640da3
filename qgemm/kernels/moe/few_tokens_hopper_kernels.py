"""Products of few tokens with their experts' stored weights on Hopper, in Gluon: mainly a read of the weights.

A program has some rows of one expert's weight. It finds the tokens that chose the expert among the ids by itself. Rows
of the weight are the rows of a tensor core's instruction, tokens its columns, eight at a time. The warps of a program
share K: each copies its own blocks to shared memory, and their sums are added at the end. Pairs of a token and an
expert stay in their order: row ``p`` of the output is that of pair ``p``. A program computes several tiles of rows one
after the other, since starting takes as long as a tile.

Scales that are powers of two multiply the values exactly as these become bfloat16. For that, each thread has the bytes
of one scale: within a block of K, the weight and x are read in the same permuted order. Other scales multiply sums, in
float32; zero points multiply sums of x.

Gates and ups, 8 rows each, are the rows of one instruction, so the activation is applied where the sums are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.activations import gate_value, up_value
from qgemm.kernels.stages.aggregate import OPTIONAL, aggregate
from qgemm.kernels.stages.ring import copy_to_shared
from qgemm.kernels.stages.unpack import scale_value, unpack, unpack_scaled, widen

BLOCK = gl.constexpr(128)  # bytes of a row
COLUMNS = gl.constexpr(8)  # tokens at a time


@aggregate
class Rows:
    """The rows of an expert's weight that a program has, in tiles.

    ``first``: the expert's first row among the rows of all experts. ``start``: the program's first output, of
    ``columns``. ``outputs``: how many outputs a tile has. ``gated``: whether the rows are gates and ups.
    """

    first: gl.tensor
    start: gl.tensor
    columns: gl.tensor
    outputs: gl.constexpr
    gated: gl.constexpr

    @gluon.jit
    def output(self, r, tile):
        """The outputs that rows ``r`` of a tile belong to; with gates and ups, 8 and 8 rows, two rows each."""
        return self.start + tile * self.outputs + (r // 16 * 8 + r % 8 if self.gated else r)

    @gluon.jit
    def row(self, r, tile):
        """The rows among those of all experts that are rows ``r`` of a tile."""
        n = self.output(r, tile)
        return self.first + (n + r // 8 % 2 * self.columns if self.gated else n)


@aggregate
class Blocks:
    """The blocks of a program's rows, which warps copy to shared memory, one block per warp in each step.

    ``weight``: pointers to the first step's bytes. ``row``: each row's output minus the number of outputs, so negative
    where there is one. ``column``: the number of each byte in a step's part of a row of ``row_bytes``. ``tiles``: the
    ``FewTokens``.
    """

    slots: gl.shared_memory_descriptor
    weight: gl.tensor
    row: gl.tensor
    column: gl.tensor
    stride: gl.tensor
    row_bytes: gl.tensor
    steps: gl.tensor
    outputs: gl.constexpr
    tiles: gl.constexpr

    @gluon.jit
    def copy(self, index, place):
        """Starts copying each warp's block at ``place``, a tile and a step, to slot ``index`` modulo the depth."""
        tile, step = place
        start = step * (self.tiles.splits * BLOCK)
        inside = (self.row + tile * self.outputs < 0) & (self.column + start < self.row_bytes)
        copy_to_shared(
            self.slots.index(index % self.tiles.depth),
            self.weight + (tile * self.outputs).to(gl.int64) * self.stride + start,
            mask=inside & (tile < self.tiles.count),
            cache_modifier=".cg",
        )
        async_copy.commit_group()

    @gluon.jit
    def following(self, place):
        """The tile and step after ``place``."""
        tile, step = place
        last = step + 1 == self.steps
        return gl.where(last, tile + 1, tile), gl.where(last, 0, step + 1)


@aggregate
class Scales:
    """Pointers to the scales and zero points of a program's rows; None if a row has only one.

    ``row``: as in ``Blocks``. ``group``: the number of the first step's group among the ``groups`` of a row.
    """

    scale: OPTIONAL
    zero_point: OPTIONAL
    row: gl.tensor
    group: gl.tensor
    groups: gl.tensor
    outputs: gl.constexpr
    tiles: gl.constexpr
    form: gl.constexpr

    @gluon.jit
    def load(self, place):
        """``(scales, zero points)`` of the blocks at ``place``, a tile and a step."""
        return self.load_halves(self.scale, place), self.load_halves(self.zero_point, place)

    @gluon.jit
    def load_halves(self, pointers, place):
        """Loads from ``pointers`` for each half of the blocks; () if there are none."""
        tile, step = place
        HALVES: gl.constexpr = 2 if self.form.bits == 4 else 1
        loaded = ()
        if pointers is not None:
            for half in gl.static_range(HALVES):
                if self.form.has_small_groups:
                    at = self.group + (step * self.tiles.splits * HALVES + half) * (BLOCK // self.form.group)
                else:
                    at = (self.group + (step * self.tiles.splits * HALVES + half)) * BLOCK // self.form.group
                inside = (self.row + tile * self.outputs < 0) & (at < self.groups) & (tile < self.tiles.count)
                own = pointers + (tile * (self.outputs * self.groups) + at)
                loaded = loaded + (gl.load(own, mask=inside, other=0),)
        return loaded


@aggregate
class Columns:
    """Rows of x, ``K`` long, that are multiplied together: pointers, and whether each row is ``there``.

    ``k``: the number of each value in a step's part of a row.
    """

    x: gl.tensor
    there: gl.tensor
    k: gl.tensor
    K: gl.tensor

    @gluon.jit
    def load(self, step, SPLITS: gl.constexpr, HALVES: gl.constexpr):
        """The values of x that each half of a step's blocks is multiplied by."""
        xs = ()
        for half in gl.static_range(HALVES):
            begin = step * (SPLITS * BLOCK * HALVES) + half * BLOCK
            inside = self.there[None, None, :] & (self.k + begin < self.K)
            xs = xs + (gl.load(self.x + begin, mask=inside, other=0.0),)
        return xs


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _expert_ids(ids, pairs, P, E):
    """Experts of ``pairs``, -1 for those outside ``[0, E)`` and beyond ``P``."""
    found = gl.load(ids + pairs, mask=pairs < P, other=-1)
    return gl.where((found >= 0) & (found < E), found, -1).to(gl.int32)


@gluon.jit
def _pairs_of(rank, pairs, first, LAYOUT: gl.constexpr):
    """The pairs with ranks from ``first`` on, -1 where there is none. ``rank``: of each pair, -1 for other experts'."""
    columns = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return gl.sum(gl.where(rank[:, None] == columns[None, :], pairs[:, None] + 1, 0), axis=0) - 1


@gluon.jit
def _find_pairs(ids, expert, known, item, P, E, BY_PAIR: gl.constexpr, PAIRS: gl.constexpr, LAYOUT: gl.constexpr):
    """``(pairs, rank, count)``: all pairs, each one's rank among the expert's or -1, and how many the expert has.

    ``BY_PAIR``: the expert has none unless it is ``known`` and pair ``item`` is its first.
    """
    pairs = gl.arange(0, PAIRS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    found = _expert_ids(ids, pairs, P, E)
    if BY_PAIR:
        earlier = gl.max(((found == expert) & (pairs < item)).to(gl.int32), axis=0)
        expert = gl.where(known & (earlier == 0), expert, -2)
    chosen = (found == expert).to(gl.int32)
    count = gl.sum(chosen, axis=0)
    rank = gl.where(chosen > 0, gl.associative_scan(chosen, 0, _add) - 1, -1)
    rank = gl.convert_layout(rank, gl.SliceLayout(1, LAYOUT))
    return gl.arange(0, PAIRS, gl.SliceLayout(1, LAYOUT)), rank, count


@gluon.jit
def _in_order(j, SCALED: gl.constexpr):
    """Which byte of a block is in place ``j``: pieces of 16 are permuted so that a thread's two share a scale."""
    return j // 16 % 4 * 32 + j // 64 * 16 + j % 16 if SCALED else j


@gluon.jit
def _blocks_of(rows, weight, K, FORM: gl.constexpr, TILE: gl.constexpr):
    """The ``Blocks`` of a program's rows."""
    SPLITS: gl.constexpr = TILE.splits
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    WIDTH: gl.constexpr = BLOCK * HALVES
    # Neighbouring threads copy 16 bytes each of a row.
    cl: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 4, 8], [SPLITS, gl.num_warps() // SPLITS, 1], [2, 1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(64, 1, 2, [2, 1, 0])
    slots = gl.allocate_shared_memory(weight.dtype.element_ty, [TILE.depth, SPLITS, TILE.rows, BLOCK], shared)
    r = gl.arange(0, TILE.rows, gl.SliceLayout(0, gl.SliceLayout(2, cl)))
    split = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, cl)))
    j = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, cl)))
    # The compiler can't tell by itself that 16 neighbours stay together.
    j = gl.max_contiguous(gl.multiple_of(_in_order(j, FORM.has_small_groups), 16), 16)
    column = split[:, None, None] * BLOCK + j[None, None, :]
    stride = K
    row_bytes = K
    if HALVES == 2:
        stride = gl.cdiv(K, WIDTH) * BLOCK
        row_bytes = (K // WIDTH * (BLOCK // 16) + gl.minimum(gl.cdiv(K % WIDTH, 16), BLOCK // 16)) * 16
    row = (rows.output(r, 0) - rows.columns)[None, :, None]
    weight += rows.row(r, 0)[None, :, None] * stride + column
    steps = gl.cdiv(gl.cdiv(K, WIDTH), SPLITS)
    return Blocks(slots, weight, row, column, stride, row_bytes, steps, rows.outputs, TILE)


@gluon.jit
def _scales_of(rows, scale, zero_point, K, FORM: gl.constexpr, TILE: gl.constexpr, mma: gl.constexpr):
    """The ``Scales`` of a program's rows."""
    SPLITS: gl.constexpr = TILE.splits
    ROWS: gl.constexpr = TILE.rows
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    groups = gl.cdiv(K, FORM.group) if FORM.group > 0 else 1
    if FORM.has_small_groups:
        # The places along K of a thread's two pieces of 16 bytes.
        wl: gl.constexpr = gl.DotOperandLayout(0, mma, 16)
        pieces: gl.constexpr = (
            gl.zeros([SPLITS, ROWS, BLOCK], gl.uint8, wl).reshape([SPLITS, ROWS, 2, 4, 16]).type.layout
        )
        sl: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, pieces))
        rl: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, sl))
        group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, sl)))[None, None, :]
        group = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, sl)))[:, None, None] * (4 * HALVES) + group
    else:
        sl: gl.constexpr = gl.SliceLayout(2, mma)
        rl: gl.constexpr = gl.SliceLayout(0, sl)
        group = gl.arange(0, SPLITS, gl.SliceLayout(1, sl))[:, None] * HALVES
    r = gl.arange(0, ROWS, rl)
    row = rows.output(r, 0) - rows.columns
    row = row[None, :, None] if FORM.has_small_groups else row[None, :]
    scales = None
    zeros = None
    if FORM.group > 0:
        at = rows.row(r, 0) * groups
        at = at[None, :, None] if FORM.has_small_groups else at[None, :]
        scales = scale + at
        if FORM.has_zeros:
            zeros = zero_point + at
    return Scales(scales, zeros, row, group, groups, rows.outputs, TILE, FORM)


@gluon.jit
def _columns_and_k(FORM: gl.constexpr, SPLITS: gl.constexpr, LAYOUT: gl.constexpr):
    """The columns that threads have, and the values of a step's part of K."""
    WIDTH: gl.constexpr = BLOCK * (2 if FORM.bits == 4 else 1)
    c = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    j = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    k = _in_order(j, FORM.has_small_groups)[None, :, None]
    return c, gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None] * WIDTH + k


@gluon.jit
def _begin(blocks, scales, copies):
    """Starts loading for the first steps, one less than there are slots. Blocks are loaded only if ``copies``.

    Returns the place after these steps, a tile and a step, and what ``scales`` has loaded for each of them.
    """
    place = gl.to_tensor(0), gl.to_tensor(0)
    ahead = ()
    for i in gl.static_range(blocks.tiles.depth - 1):
        if copies:
            blocks.copy(i, place)
        if scales is not None:
            ahead = ahead + (scales.load(place),)
        place = blocks.following(place)
    return place, ahead


@gluon.jit
def _in_words(tile, mma: gl.constexpr, OPERAND: gl.constexpr):
    """An operand that has 16 neighbours along K per thread, in the layout of an instruction, which has two at a time.

    No value moves to another thread: K is permuted, in the same way for both operands.
    """
    layout: gl.constexpr = gl.DotOperandLayout(OPERAND, mma, 2)
    WORDS: gl.constexpr = tile.shape[2 - OPERAND] // 32
    if OPERAND == 0:
        split = tile.reshape([tile.shape[0], tile.shape[1], 2, 4, WORDS, 2, 2]).permute(0, 1, 2, 4, 5, 3, 6)
    else:
        split = tile.reshape([tile.shape[0], 2, 4, WORDS, 2, 2, tile.shape[2]]).permute(0, 1, 3, 4, 2, 5, 6)
    return gl.convert_layout(split.reshape(tile.shape), layout, assert_trivial=True)


@gluon.jit
def _of_pieces(scale, SHAPE: gl.constexpr):
    """Powers of two, given by their exponents ``[splits, rows, groups]``, for each value of a block of ``SHAPE``."""
    bits = gl.where(scale == 0, 1 << 6, scale.to(gl.int16) << 7).to(gl.int16)
    value = bits.to(gl.bfloat16, bitcast=True).expand_dims(2).expand_dims(4)
    return value.broadcast_to([SHAPE[0], SHAPE[1], 2, 4, 16]).reshape(SHAPE)


@gluon.jit
def _swapped(x):
    """``x [splits, k, columns]`` with the inner two of each four along k swapped, the order of ``unpack_scaled``."""
    fours = x.reshape([x.shape[0], x.shape[1] // 4, 2, 2, x.shape[2]]).permute(0, 1, 3, 2, 4)
    return gl.convert_layout(fours.reshape(x.shape), x.type.layout, assert_trivial=True)


@gluon.jit
def _add_block(acc, total_x, packed, xs, scales, zeros, FORM: gl.constexpr):
    """Adds a block's products to ``acc``, and x to ``total_x`` if rows have one zero point, subtracted in the end."""
    SUMS: gl.constexpr = acc.type.layout
    DTYPE: gl.constexpr = xs[0].dtype
    FORMAT: gl.constexpr = FORM.name
    if FORM.has_small_groups:
        low = gl.convert_layout(_of_pieces(scales[0], packed.shape), packed.type.layout, assert_trivial=True)
        high = gl.convert_layout(_of_pieces(scales[1], packed.shape), packed.type.layout, assert_trivial=True)
        values = unpack_scaled(packed, low, high)
    elif FORM.bits == 4:
        values = unpack(packed, FORMAT, DTYPE)
    else:
        values = (widen(packed, FORMAT, DTYPE),)
    for half in gl.static_range(len(xs)):
        w = _in_words(values[half], SUMS, 0)
        b = _in_words(_swapped(xs[half]) if FORM.has_small_groups else xs[half], SUMS, 1)
        if FORM.has_small_groups or FORM.group == 0:
            acc = mma_v2(w, b, acc)
        else:
            sums = mma_v2(w, b, gl.zeros(acc.shape, gl.float32, SUMS))
        if FORM.has_zeros:
            ones = gl.full(w.shape, 1.0, DTYPE, w.type.layout)
            if FORM.group == 0:
                total_x = mma_v2(ones, b, total_x)
            else:
                of_x = mma_v2(ones, b, gl.zeros(acc.shape, gl.float32, SUMS))
                zero = zeros[half].to(gl.float32)[:, :, None]
                if FORM.float_zeros:
                    acc = gl.fma(of_x, gl.broadcast(zero, sums)[0], acc)
                else:
                    sums = gl.fma(of_x, gl.broadcast(-zero, sums)[0], sums)
        if not FORM.has_small_groups and FORM.group > 0:
            factor = scale_value(scales[half])[:, :, None]
            acc = gl.fma(sums, gl.broadcast(factor, sums)[0], acc)
    return acc, total_x


@gluon.jit
def _multiply(columns, blocks, scales, place, ahead, index, mma: gl.constexpr):
    """``(sums, sums of x, place, ahead, index)`` of a tile: sums over each warp's part of K, and the next tile's begin.

    ``place``, ``ahead``: as returned by ``_begin``. ``index``: the number of the first step's slot.
    """
    SPLITS: gl.constexpr = blocks.tiles.splits
    ROWS: gl.constexpr = blocks.tiles.rows
    DEPTH: gl.constexpr = blocks.tiles.depth
    FORM: gl.constexpr = scales.form
    HALVES: gl.constexpr = 2 if FORM.bits == 4 else 1
    acc = gl.zeros([SPLITS, ROWS, COLUMNS], gl.float32, mma)
    total_x = gl.zeros([SPLITS, ROWS, COLUMNS], gl.float32, mma)
    for step in range(blocks.steps):
        xs = columns.load(step, SPLITS, HALVES)
        own_scales, own_zeros = ahead[0]
        ahead = ahead[1:] + (scales.load(place),)
        async_copy.wait_group(DEPTH - 2)
        blocks.copy(index + DEPTH - 1, place)
        place = blocks.following(place)
        packed = blocks.slots.index(index % DEPTH).load(gl.DotOperandLayout(0, mma, 16))
        acc, total_x = _add_block(acc, total_x, packed, xs, own_scales, own_zeros, FORM)
        index += 1
    return acc, total_x, place, ahead, index


@gluon.jit
def _sum_splits(acc, total_x, scale, zero_point, row, n, columns, FORM: gl.constexpr):
    """A tile's sums over all of K, with the scale and zero point of rows that have only one. ``n``: its outputs."""
    total = gl.sum(acc, 0)
    if FORM.group == 0:
        if FORM.has_zeros:
            zero = gl.load(zero_point + row, mask=n < columns, other=0).to(gl.float32)
            total = total - gl.sum(total_x, 0) * zero[:, None]
        total = total * scale_value(gl.load(scale + row, mask=n < columns, other=0))[:, None]
    return total


@gluon.jit
def _activated(total, DTYPE: gl.constexpr, FUNCTION: gl.constexpr, ACTIVATION: gl.constexpr):
    """A tile's outputs: ``ACTIVATION`` of the sums of gates and ups, which are rounded to ``DTYPE`` first."""
    if ACTIVATION is None:
        return total
    elif ACTIVATION.gated:
        ROWS: gl.constexpr = total.shape[0]
        halves = total.reshape([ROWS // 16, 2, 8, COLUMNS]).permute(0, 2, 3, 1).split()
        gate = halves[0].reshape([ROWS // 2, COLUMNS]).to(DTYPE).to(gl.float32)
        up = halves[1].reshape([ROWS // 2, COLUMNS]).to(DTYPE).to(gl.float32)
        return gate_value(gate, FUNCTION, ACTIVATION) * up_value(up, ACTIVATION)
    else:
        return gate_value(total.to(DTYPE).to(gl.float32), FUNCTION, ACTIVATION)


@gluon.jit
def _store(out, total, pair, start, columns):
    """Stores a tile's outputs, from column ``start`` on, to the rows of its pairs."""
    ol: gl.constexpr = total.type.layout
    column = start + gl.arange(0, total.shape[0], gl.SliceLayout(1, ol))
    row = gl.convert_layout(pair, gl.SliceLayout(0, ol))
    to = out + gl.maximum(row, 0).to(gl.int64)[None, :] * columns + column[:, None]
    gl.store(to, total.to(out.dtype.element_ty), mask=(row >= 0)[None, :] & (column < columns)[:, None])


@gluon.jit(do_not_specialize=["P"])
def _few_tokens_kernel(
    x, ids, weight, scale, zero_point, bias, out,
    P, E, N, K,
    FORM: gl.constexpr, TILE: gl.constexpr, FUNCTION: gl.constexpr, ACTIVATION: gl.constexpr,
    PAIRS_OF_ROW: gl.constexpr, BY_PAIR: gl.constexpr, EAGER: gl.constexpr, PAIRS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """``x [P / PAIRS_OF_ROW, K]``, ``ids [P]``, ``weight [E, N, bytes]``, ``scale``, ``zero_point [E, N, groups]``,
    ``bias [E, N]``, ``out [P, N]``. With a gated ``ACTIVATION``, ``N`` is gates before ups, and ``out`` has half as
    many columns.

    ``BY_PAIR``: programs belong to pairs, and only the first pair of an expert has work; otherwise each expert has
    programs. ``EAGER``: weights are loaded before it is known whether they are needed. ``PAIRS``: a power of 2, at
    least ``P`` and 32 for each warp.
    """
    SPLITS: gl.constexpr = TILE.splits
    FIRST: gl.constexpr = ACTIVATION is not None
    GATED: gl.constexpr = FIRST and ACTIVATION.gated
    OUTPUTS: gl.constexpr = TILE.rows // 2 if GATED else TILE.rows  # of a tile
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SPLITS, TILE.warps // SPLITS, 1], [1, 16, 8])
    pl: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [TILE.warps, 1], [1, 0])
    columns = N // 2 if GATED else N
    programs = gl.cdiv(columns, OUTPUTS * TILE.count)
    item = gl.program_id(0) // programs
    start = gl.program_id(0) % programs * (OUTPUTS * TILE.count)
    # For the product after the first, the ids are there when this kernel may begin: the kernel that wrote them has
    # ended.
    if PDL and FIRST and BY_PAIR:
        gdc_wait()
    expert = item
    known = True
    if BY_PAIR:
        expert = gl.load(ids + item).to(gl.int32)
        known = (expert >= 0) & (expert < E)
    rows = Rows(gl.where(known, expert, 0).to(gl.int64) * N, start, columns, OUTPUTS, GATED)
    blocks = _blocks_of(rows, weight, K, FORM, TILE)
    if EAGER:
        # The loop below begins at the same place, which isn't computed again.
        place, _ = _begin(blocks, None, True)
    if PDL and FIRST and not BY_PAIR:
        gdc_wait()

    pairs, rank, count = _find_pairs(ids, expert, known, item, P, E, BY_PAIR, PAIRS, pl)
    if PDL:
        if not FIRST:
            gdc_wait()
        # Not earlier: the kernel after the next relies on what this one has waited for.
        gdc_launch_dependents()

    scales = _scales_of(rows, scale, zero_point, K, FORM, TILE, mma)
    c, k = _columns_and_k(FORM, SPLITS, gl.DotOperandLayout(1, mma, 16))
    r = gl.arange(0, TILE.rows, gl.SliceLayout(1, gl.SliceLayout(0, mma)))
    for first in range(0, count, COLUMNS):
        place, ahead = _begin(blocks, scales, not EAGER or first > 0)
        pair = _pairs_of(rank, pairs, first, pl)
        token = gl.convert_layout(pair, c.type.layout) // PAIRS_OF_ROW
        there = first + c < count
        tokens = Columns(x + gl.where(there, token, 0).to(gl.int64)[None, None, :] * K + k, there, k, K)
        index = 0
        for tile in range(TILE.count):
            n = rows.output(r, tile)
            row = rows.row(r, tile)
            if bias is not None:
                added = gl.load(bias + row, mask=n < columns, other=0.0)
            acc, total_x, place, ahead, index = _multiply(tokens, blocks, scales, place, ahead, index, mma)
            total = _sum_splits(acc, total_x, scale, zero_point, row, n, columns, FORM)
            if bias is not None:
                total += added.to(gl.float32)[:, None]
            total = _activated(total, out.dtype.element_ty, FUNCTION, ACTIVATION)
            _store(out, total, pair, start + tile * OUTPUTS, columns)
    if EAGER:
        async_copy.wait_group(0)
