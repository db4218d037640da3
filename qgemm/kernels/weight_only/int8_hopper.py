"""Launches of Hopper's kernels of int4 weights by int8 rows.

To be imported where Triton has what those are written in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.launch.tensor_map import TensorMap
from qgemm.kernels.stages.ring import block_layout
from qgemm.kernels.weight_only.int8_config import BLOCK, Int8Config
from qgemm.kernels.weight_only.int8_few_rows_hopper_kernels import (
    _int4_int8_few_kernel,
    _int4_int8_layer_kernel,
    _int4_int8_row_kernel,
)
from qgemm.kernels.weight_only.int8_tiles_hopper_kernels import _int4_int8_many_kernel
from qgemm.numerics.integers import cdiv, next_power_of_2
from qgemm.numerics.packing import HALF

MAX_ROWS_TO_START_EARLY = 512  # a product before its rows are quantized
MAX_ROWS_TO_START_NEXT = 128
PATIENCE = 128  # see SharedRows
ROWS_AT_A_TIME = 1024  # of x, in tiles that are computed column by column
# Of a thread: few where another kernel is to have room beside, and what is then left to those that multiply.
REGISTERS_BESIDE = {4: 128, 8: 144}
MULTIPLYING_REGISTERS, MULTIPLYING_REGISTERS_BESIDE = {2: 232, 4: 104}, 192  # two groups of warps, or four
MAX_VALUES_BESIDE = 64 * 64  # of a tile of one of the two groups of warps


class Sizes(NamedTuple):
    """Of a product ``[M, K]`` by ``[N, K]``, with ``G`` groups of ``group`` values; ``group`` is 0 for a single one."""

    M: int
    N: int
    K: int
    G: int
    group: int

    @property
    def blocks(self) -> int:
        """Of K."""
        return cdiv(self.K, BLOCK)

    @property
    def step(self) -> int:
        """How many bytes of a row are a column of blocks."""
        return self.group or HALF


def starts_early(M: int) -> bool:
    """Whether a product may start before its rows are quantized, to load weights meanwhile."""
    return M <= MAX_ROWS_TO_START_EARLY


def few_launch(config: Int8Config, sizes: Sizes, limits: DeviceLimits) -> Launch:
    """The product of q, weight, out, the rows' scale, and the weight's scale, zero points and bias."""
    numbers = (sizes.M, sizes.N, sizes.K, sizes.G, sizes.N)
    return Launch(
        _int4_int8_few_kernel, _programs(config, sizes, limits), numbers, _few_constants(config, sizes), config.warps,
        pdl=True, maps={0: _rows_map(config, sizes), 1: _weight_map(config, sizes)},
        max_registers=REGISTERS_BESIDE[config.warps],
    )  # fmt: skip


def layer_launch(config: Int8Config, sizes: Sizes, x_strides: tuple[int, ...], limits: DeviceLimits) -> Launch:
    """The layer of x, q, its scale, weight, out, the weight's scale, zero points, bias, q again and counts."""
    block = 8 * 32 * config.warps
    blocks = next_power_of_2(cdiv(sizes.K, block))
    row = (block, blocks if blocks <= 128 // config.warps else 0, PATIENCE)
    numbers = (sizes.M, sizes.N, sizes.K, sizes.G, *x_strides, sizes.N)
    return Launch(
        _int4_int8_layer_kernel, _programs(config, sizes, limits), numbers, (row, *_few_constants(config, sizes)),
        config.warps, pdl=True, maps={8: _rows_map(config, sizes), 3: _weight_map(config, sizes)},
    )  # fmt: skip


def row_launch(config: Int8Config, sizes: Sizes, stride_xk: int, limits: DeviceLimits) -> Launch:
    """The layer of a single row: x, weight, out, the weight's scale, zero points and bias."""
    steps = cdiv(sizes.blocks, config.warps)
    return Launch(
        _int4_int8_row_kernel, _programs(config, sizes, limits), (sizes.N, sizes.K, sizes.G, stride_xk),
        (steps, sizes.group, config.stages, True), config.warps, pdl=True, maps={1: _weight_map(config, sizes)},
    )  # fmt: skip


def many_launch(config: Int8Config, sizes: Sizes, dtype: torch.dtype, partial_at: int, limits: DeviceLimits) -> Launch:
    """As ``few_launch``, and counts. ``partial_at``: where partial sums are, behind the rows' scale."""
    M, N, K, G, group = sizes
    rows, cols = config.rows, config.cols // config.pieces
    own = rows * config.splits // config.consumers
    # Products of small groups need more registers.
    beside = config.consumers == 2 and config.cols * own <= MAX_VALUES_BESIDE and (group == 0 or group >= HALF)
    maps = {
        0: _map((M, K), (config.cols, sizes.step), torch.int8),
        1: _map((N, sizes.blocks * HALF), (rows, sizes.step), torch.uint8),
        2: _map((M, N), (cols, own), dtype),
    }
    registers = MULTIPLYING_REGISTERS_BESIDE if beside else MULTIPLYING_REGISTERS[config.consumers]
    constants = (
        group, config.stages, config.x_slots, config.shared > 0, config.pieces, config.consumers, config.splits,
        max(ROWS_AT_A_TIME // config.cols, 1), registers, M <= MAX_ROWS_TO_START_NEXT,
    )  # fmt: skip
    tiles = config.tiles(M, N)
    return Launch(
        _int4_int8_many_kernel, config.grid(tiles, limits.num_sms),
        (M, N, K, G, tiles - config.shared, config.sharers, partial_at), constants, 4, pdl=True, maps=maps,
        max_registers=REGISTERS_BESIDE[8] if beside else None,
    )  # fmt: skip


def _programs(config: Int8Config, sizes: Sizes, limits: DeviceLimits) -> int:
    return min(cdiv(sizes.N, config.rows), limits.num_sms)


def _few_constants(config: Int8Config, sizes: Sizes) -> tuple[Any, ...]:
    return sizes.group, config.stages, True


def _rows_map(config: Int8Config, sizes: Sizes) -> TensorMap:
    block = (config.warps, config.cols, sizes.step)
    shape, strides = (sizes.blocks, sizes.M, BLOCK), (BLOCK, sizes.K, 1)
    return TensorMap(shape, strides, block, block_layout(block, torch.int8))


def _weight_map(config: Int8Config, sizes: Sizes) -> TensorMap:
    block = (config.warps, config.rows, sizes.step)
    shape, strides = (sizes.blocks, sizes.N, HALF), (HALF, sizes.blocks * HALF, 1)
    return TensorMap(shape, strides, block, block_layout(block, torch.uint8))


def _map(shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype) -> TensorMap:
    return TensorMap(shape, (shape[1], 1), block, block_layout(block, dtype))
