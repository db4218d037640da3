"""Launches of Hopper's kernels (``hopper_kernels.py``). To be imported only where Triton has the Gluon they need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qgemm.kernels.gemm.config import MIN_LONG_PRODUCT_MACS, GemmConfig, programs_per_sm
from qgemm.kernels.gemm.hopper_kernels import _gemm_hopper_kernel, _quant_linear_hopper_kernel
from qgemm.kernels.gemm.problem import Problem
from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.launch.tensor_map import TensorMap
from qgemm.kernels.stages.activations import DEVICE_ACTIVATIONS
from qgemm.kernels.stages.ring import PANEL, block_layout
from qgemm.numerics.integers import cdiv, next_power_of_2

REGISTERS = 65_536  # of an SM
REGISTERS_BESIDE = {4: 128, 8: 144}  # per thread, by multiplying warps: only the largest config needs more
MAX_PROMOTED_COLUMNS_BESIDE = 80  # of which fp8's warp groups can hold two sums in so many registers
THREADS = 256  # of a program: four warps that multiply, and four for the one that loads
MAX_VALUES_TO_OVERLAP = 5 << 20  # to be quantized while a product starts
MAX_ROWS_TO_START_NEXT = 128
COLUMNS_OF_LONG_PRODUCTS = 4  # of tiles that programs take at a time
MAX_MORE_ROUNDS = 1.03  # how many times the waves a long product may take, to compute whole blocks of columns
MAX_SHORT_LOOP_VALUES = 2048  # values of K that a program goes through, in all waves: too few to be slowed down much
PATIENCE = 128  # how often programs that wait for the rows of others ask for them
# A layer of few rows is one launch. In CUDA graphs, it is two if the weight is so small that launches, one after the
# other, take all of the time: two launches overlap.
MAX_SKINNY_ROWS = 16
MIN_WEIGHT_BYTES_IN_GRAPHS = 8 << 20
# A layer of more rows is one launch only outside of CUDA graphs, and only up to the work that the device does in the
# time that the host takes for two launches: 16 us on the host of an H200.
MAX_WEIGHT_BYTES = 64 << 20
MAX_INPUT_VALUES = 3 << 20
MAX_MACS = 4 << 30  # multiply-adds
MAX_ROWS_PER_PROGRAM = 16  # to quantize
# Of the programs that the device has room for: its parts have room for few clusters of 3 or 4.
MAX_SHARE_IN_CLUSTERS = 0.9


def gemm_launch(config: GemmConfig, problem: Problem, limits: DeviceLimits) -> Launch:
    """The launch of a product, called with A, B, C, their scales, the bias and the residual."""
    M, N, K, strides, dtype, out_dtype, *_ = problem
    stride_am, _, _, stride_bn, stride_cm, _, *epilogue_strides = strides
    columns = columns_at_a_time(config, M, N, K * dtype.itemsize, limits)
    if columns > 1:
        limits = replace(limits, num_sms=multiprocessors_of_long_product(config, M, N, limits))
    a, b, c = _maps(config, (M, N, K), (stride_am, stride_bn, stride_cm), config.widths[-1], (dtype, out_dtype))
    block_strides = problem.block_strides
    activation = DEVICE_ACTIVATIONS[problem.activation] if problem.activation else None
    return Launch(
        _gemm_hopper_kernel, programs(config, M, N, limits),
        (M, N, K, *epilogue_strides, *(block_strides or (1, 1))),
        (
            *_constants(config, M, limits, columns), problem.constant_b, starts_next_early(config, M, limits),
            block_strides is not None, activation,
        ),
        config.group_warps, pdl=columns == 1, maps={0: a, 1: b, 2: c},
        max_registers=max_registers(config, limits, beside=True), cluster=cluster(config, M, N, limits),
    )  # fmt: skip


def columns_at_a_time(config: GemmConfig, M: int, N: int, K: int, limits: DeviceLimits) -> int:
    """How many columns of tiles the programs of a product take at a time, row by row; 1: column by column.

    Consecutive programs start near one another, about 16 of them on SMs that share their path to the L2 cache, and the
    cache serves their requests for the same rows together. With 4 columns at a time those 16 have 4 x 4 tiles instead
    of 8 x 2, which leaves power to multiply (docs/performance/int8.md). That requires that all programs start in order,
    so they don't start before the preceding kernel in the stream has ended.
    """
    largest = (config.block_m == 256 or config.groups > 1) and cluster(config, M, N, limits) == 1
    return COLUMNS_OF_LONG_PRODUCTS if largest and M * N * K > MIN_LONG_PRODUCT_MACS else 1


def multiprocessors_of_long_product(config: GemmConfig, M: int, N: int, limits: DeviceLimits) -> int:
    """How many SMs a product uses that takes several columns of tiles at a time.

    As many as compute whole blocks of those columns at a time, if that takes hardly more waves. Otherwise the columns
    of a wave's last block are loaded for a few tiles, and once more for the others. Where groups take turns, it may not
    take even one more wave, as power is not their only limit.
    """
    tiles = config.tiles(M, N)
    block = config.group_size_m * COLUMNS_OF_LONG_PRODUCTS
    whole = limits.num_sms // block * block
    rounds = cdiv(tiles, limits.num_sms)
    most = rounds if config.groups > 1 else MAX_MORE_ROUNDS * rounds
    return whole if whole and cdiv(tiles, whole) <= most else limits.num_sms


def starts_next_early(config: GemmConfig, M: int, limits: DeviceLimits) -> bool:
    """Whether the next kernel may start as soon as all programs of this one have, to load weights beside them.

    The next kernel waits for this one to end before it does anything else. An early start saves time up to 128 rows and
    costs time at 256 (docs/performance/int8.md). Where programs share an SM, it is always allowed.
    """
    return M <= MAX_ROWS_TO_START_NEXT or programs_per_sm(config, 1, limits) > 1


def cluster(config: GemmConfig, M: int, N: int, limits: DeviceLimits) -> int:
    """How many programs of a product start together, beside one another; 1 if it doesn't matter.

    Tiles of the same columns are consecutive and load the same blocks of B. Two to four programs that do so at the same
    time, near one another, are faster (docs/performance/int8.md). Three or four are used only where each has a single
    tile, because fewer clusters of that size run at a time.
    """
    rows = cdiv(M, config.block_m)
    single = programs_per_sm(config, 1, limits) == 1 and config.tiles(M, N) <= MAX_SHARE_IN_CLUSTERS * limits.num_sms
    if rows == 2 or (rows in (3, 4) and single):
        return rows
    return 1


def starts_early(config: GemmConfig, M: int, N: int, K: int, limits: DeviceLimits) -> bool:
    """Whether a product may start before its rows are quantized, so that it loads weights meanwhile.

    That saves time up to 512 rows (docs/performance/int8.md). But its programs then go wherever there is room, one
    after the other, so programs that load the same blocks of B are far apart unless they are a cluster, and the product
    may take longer. This matters little in products with few steps, or with large tiles.
    """
    if M * K > MAX_VALUES_TO_OVERLAP:
        return False
    slots = limits.num_sms * programs_per_sm(config, 1, limits)
    rows = cdiv(M, config.block_m)
    rounds = cdiv(config.tiles(M, N), slots)
    return (
        rows == cluster(config, M, N, limits)
        or rounds * K <= MAX_SHORT_LOOP_VALUES
        or (config.block_m >= 128 and rows <= 4 and rounds == 1)
    )


def in_one_launch(config: GemmConfig, M: int, N: int, K: int, limits: DeviceLimits, in_graphs: bool = False) -> bool:
    """Whether a layer is one launch. ``in_graphs``: in CUDA graphs, too."""
    rows = cdiv(M, programs(config, M, N, limits))
    if M * K > MAX_INPUT_VALUES or rows > MAX_ROWS_PER_PROGRAM or config.groups > 1:
        return False
    if in_graphs:
        return M <= MAX_SKINNY_ROWS and N * K >= MIN_WEIGHT_BYTES_IN_GRAPHS
    return M <= MAX_SKINNY_ROWS or (N * K <= MAX_WEIGHT_BYTES and M * N * K <= MAX_MACS)


def quant_linear_launch(
    config: GemmConfig,
    x: Tensor,
    weight: Tensor,
    epilogue_strides: tuple[int, int, int],
    limits: DeviceLimits,
    block_strides: tuple[int, int] | None,
) -> Launch:
    """The launch of a layer of rows ``x [M, K]``. ``epilogue_strides``: of the weight's scale, bias and residual.

    ``block_strides``: as in ``Problem``.
    """
    (M, K), N = x.shape, weight.shape[0]
    columns = weight_rows_at_a_time(config, M)
    a, b, c = _maps(config, (M, N, K), (K, weight.stride(0), N), columns, (weight.dtype, x.dtype))
    row = (*shared_row_blocks(config, K, limits), PATIENCE)
    return Launch(
        _quant_linear_hopper_kernel, programs(config, M, N, limits),
        (M, N, K, *x.stride(), *epilogue_strides, block_strides[1] if block_strides else 1),
        (row, *_constants(config, M, limits), starts_next_early(config, M, limits), block_strides is not None),
        config.group_warps, pdl=True, maps={9: a, 4: b, 5: c}, max_registers=max_registers(config, limits),
    )  # fmt: skip


def _maps(
    config: GemmConfig,
    sizes: tuple[int, int, int],
    strides: tuple[int, int, int],
    b_part: int,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[TensorMap, TensorMap, TensorMap]:
    """The tensor maps of A, B and C, whose rows have these ``strides``.

    ``b_part``: how many rows of B TMA loads at a time. ``dtypes``: of A and B, and of C.
    """
    (M, N, K), (dtype, out_dtype) = sizes, dtypes
    rows, panel = config.stored_rows, PANEL.value // dtype.itemsize
    part, _ = rows_at_a_time(M, config.block_m)
    return (
        TensorMap((M, K), (strides[0], 1), (part, panel), block_layout((part, panel), dtype)),
        TensorMap((N, K), (strides[1], 1), (b_part, panel), block_layout((b_part, panel), dtype)),
        TensorMap(
            (M, N),
            (strides[2], 1),
            (rows, config.stored_columns),
            block_layout((rows, config.stored_columns), out_dtype),
        ),
    )


def _constants(config: GemmConfig, M: int, limits: DeviceLimits, columns: int = 1) -> tuple[Any, ...]:
    _, last_parts = rows_at_a_time(M, config.block_m)
    slots = limits.num_sms * programs_per_sm(config, 1, limits)
    return config, columns, slots, last_parts


def programs(config: GemmConfig, M: int, N: int, limits: DeviceLimits) -> int:
    """How many programs a product of ``[M, N]`` has: one for each tile, at most as many as fit on the device."""
    return min(config.tiles(M, N), limits.num_sms * programs_per_sm(config, 1, limits))


def max_registers(config: GemmConfig, limits: DeviceLimits, beside: bool = False) -> int | None:
    """The maximum number of registers per thread; None for all that an SM has.

    ``beside``: leave some to the preceding kernel in the stream. Otherwise no program starts on an SM before that
    kernel's programs there have ended. The configs with the largest sums need all registers.
    """
    resident = programs_per_sm(config, 1, limits)
    if resident > 1:
        return REGISTERS // (resident * THREADS) // 8 * 8
    few = config.block_m < 256 and config.groups == config.sharing_groups == 1
    if config.promotes:
        few &= config.block_n <= MAX_PROMOTED_COLUMNS_BESIDE
    return REGISTERS_BESIDE[config.num_warps] if beside and few else None


def shared_row_blocks(config: GemmConfig, K: int, limits: DeviceLimits) -> tuple[int, int]:
    """``(BLOCK, BLOCKS)`` of ``quantize_row`` for a row of ``K`` 16-bit values, which a program's warps share.

    ``BLOCKS`` is a power of 2, so that there are few variants. It is 0, which reads the row twice, where the registers
    can't hold the row: a block takes 4 per thread.
    """
    block = 8 * 32 * config.group_warps
    blocks = next_power_of_2(cdiv(K, block))
    most = 8 if programs_per_sm(config, 1, limits) > 1 else 32 if config.group_warps == 4 else 16
    return block, blocks if blocks <= most else 0


def weight_rows_at_a_time(config: GemmConfig, M: int) -> int:
    """How many rows of the weight TMA loads at a time, in a layer that is one launch.

    With many at a time, all programs request all of their first weights at once, and what the layer waits for, first
    its input and then the quantized rows, arrives after them (docs/performance/int8.md).
    """
    return 8 if M <= MAX_SKINNY_ROWS and len(config.widths) == 1 else config.widths[-1]


def rows_at_a_time(M: int, block_m: int) -> tuple[int, int]:
    """``(part, last_parts)``: how many rows of A TMA loads at a time, and how many such parts the last tile has.

    There are few different pairs, since each is a kernel of its own.
    """
    last = M % block_m or block_m
    if block_m >= M or last == block_m:
        part = next((part for part in (block_m, 32, 16) if last % part == 0), 8)
    else:
        part = min(block_m, 32 if last % 32 == 0 or M > 1024 else 16)
    return part, cdiv(last, part)
