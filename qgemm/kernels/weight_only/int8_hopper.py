"""Launches of the Hopper kernels that multiply int4 weights by int8 rows.

To be imported only where Triton has Gluon, which the kernels are written in.
"""

from __future__ import annotations

from typing import Any

import torch

from qgemm.kernels.gemm.hopper import MAX_INPUT_VALUES, MAX_MACS, MAX_ROWS_PER_PROGRAM, MAX_WEIGHT_BYTES
from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.launch.tensor_map import TensorMap
from qgemm.kernels.stages.ring import block_layout
from qgemm.kernels.weight_only.int8_config import BLOCK, Int8Config, Sizes
from qgemm.kernels.weight_only.int8_few_rows_hopper_kernels import (
    _int4_int8_few_kernel,
    _int4_int8_layer_kernel,
    _int4_int8_row_kernel,
)
from qgemm.kernels.weight_only.int8_tiles_hopper_kernels import _int4_int8_many_kernel, _int4_int8_many_layer_kernel
from qgemm.numerics.integers import cdiv, next_power_of_2
from qgemm.numerics.packing import HALF

MAX_ROWS_TO_START_EARLY = 512  # of a product that starts before its rows are quantized
MAX_ROWS_TO_START_NEXT = 128
PATIENCE = 128  # see SharedRows
ROWS_AT_A_TIME = 1024  # of x, in tiles that are computed column by column
# Registers per thread: few where another kernel is to have room beside this one, and what is then left to the warps
# that multiply.
REGISTERS_BESIDE = {4: 128, 8: 144}
MULTIPLYING_REGISTERS, MULTIPLYING_REGISTERS_BESIDE = {2: 232, 4: 104}, 192  # two groups of warps, or four
QUANTIZING_REGISTERS = {2: 208, 4: 104}  # of the same warps where the producer may have to quantize
MIN_GROUP_TO_QUANTIZE = 64  # scaling the sums of smaller groups leaves too few registers for quantizing
MAX_VALUES_BESIDE = 64 * 64  # of a tile, in one of the two groups of warps


def starts_early(M: int) -> bool:
    """Whether a product may start before its rows are quantized, so that it loads weights meanwhile."""
    return M <= MAX_ROWS_TO_START_EARLY


def few_launch(config: Int8Config, sizes: Sizes, limits: DeviceLimits) -> Launch:
    """The product, called with q, weight, out, the rows' scale, the weight's, zero points, bias and a residual."""
    numbers = (sizes.M, sizes.N, sizes.K, sizes.G, sizes.N)
    return Launch(
        _int4_int8_few_kernel, _programs(config, sizes, limits), numbers, _few_constants(config, sizes), config.warps,
        pdl=True, maps={0: _rows_map(config, sizes), 1: _weight_map(config, sizes)},
        max_registers=REGISTERS_BESIDE[config.warps],
    )  # fmt: skip


def layer_launch(config: Int8Config, sizes: Sizes, x_strides: tuple[int, ...], limits: DeviceLimits) -> Launch:
    """The layer, called with x, q, its scale, weight, out, scale, zero points, bias, residual, q again and counts."""
    row = _row(sizes.K, config.warps, 128 // config.warps)
    numbers = (sizes.M, sizes.N, sizes.K, sizes.G, *x_strides, sizes.N)
    return Launch(
        _int4_int8_layer_kernel, _programs(config, sizes, limits), numbers, (row, *_few_constants(config, sizes)),
        config.warps, pdl=True, maps={9: _rows_map(config, sizes), 3: _weight_map(config, sizes)},
    )  # fmt: skip


def row_launch(config: Int8Config, sizes: Sizes, stride_xk: int, limits: DeviceLimits) -> Launch:
    """The layer of a single row, called with x, weight, out, the weight's scale, zero points, bias and a residual."""
    steps = cdiv(sizes.blocks, config.warps)
    return Launch(
        _int4_int8_row_kernel, _programs(config, sizes, limits), (sizes.N, sizes.K, sizes.G, stride_xk),
        (steps, sizes.group, config.stages, True), config.warps, pdl=True, maps={1: _weight_map(config, sizes)},
    )  # fmt: skip


def many_in_one_launch(config: Int8Config, sizes: Sizes, limits: DeviceLimits) -> bool:
    """Whether a layer of more than a few rows is one launch, by the rules of int8 weights. Not in CUDA graphs."""
    M, N, K, _, group = sizes
    if 0 < group < MIN_GROUP_TO_QUANTIZE and not config.multiplies:
        return False
    rows = cdiv(M, config.grid(config.tiles(M, N), limits.num_sms))
    is_small = M * K <= MAX_INPUT_VALUES and N * K <= MAX_WEIGHT_BYTES and M * N * K <= MAX_MACS
    return is_small and rows <= MAX_ROWS_PER_PROGRAM and config.leaves_row_counts


def many_launch(config: Int8Config, sizes: Sizes, dtype: torch.dtype, limits: DeviceLimits) -> Launch:
    """As ``few_launch``, called with counts, too."""
    beside = _has_room_beside(config, sizes.group)
    registers = MULTIPLYING_REGISTERS_BESIDE if beside else MULTIPLYING_REGISTERS[config.consumers]
    return Launch(
        _int4_int8_many_kernel, config.grid(config.tiles(sizes.M, sizes.N), limits.num_sms),
        _many_numbers(config, sizes), _many_constants(config, sizes, registers), 4, pdl=True,
        maps=dict(enumerate(_maps(config, sizes, dtype))), max_registers=REGISTERS_BESIDE[8] if beside else None,
    )  # fmt: skip


def many_layer_launch(
    config: Int8Config, sizes: Sizes, x_strides: tuple[int, ...], dtype: torch.dtype, limits: DeviceLimits
) -> Launch:
    """As ``layer_launch``, with the steps of scales ahead of the bias."""
    rows, weight, out = _maps(config, sizes, dtype)
    constants = _many_constants(config, sizes, QUANTIZING_REGISTERS[config.consumers])
    return Launch(
        _int4_int8_many_layer_kernel, config.grid(config.tiles(sizes.M, sizes.N), limits.num_sms),
        (*_many_numbers(config, sizes), *x_strides), (_row(sizes.K, 4, 32), *constants), 4, pdl=True,
        maps={10: rows, 3: weight, 4: out},
    )  # fmt: skip


def _has_room_beside(config: Int8Config, group: int) -> bool:
    """Whether another kernel may run beside this one: large groups and small tiles need few registers."""
    own = config.rows * config.splits // config.consumers
    return config.consumers == 2 and config.cols * own <= MAX_VALUES_BESIDE and (group == 0 or group >= HALF)


def _maps(config: Int8Config, sizes: Sizes, dtype: torch.dtype) -> tuple[TensorMap, TensorMap, TensorMap]:
    M, N, K, *_ = sizes
    own = config.rows * config.splits // config.consumers
    return (
        _map((M, K), (config.cols, sizes.step), torch.int8),
        _map((N, sizes.blocks * HALF), (config.rows, sizes.step), torch.uint8),
        _map((M, N), (config.cols // config.pieces, own), dtype),
    )


def _many_numbers(config: Int8Config, sizes: Sizes) -> tuple[int, ...]:
    M, N, K, G, _ = sizes
    return M, N, K, G, config.tiles(M, N) - config.shared, config.sharers, sizes.partial_at


def _many_constants(config: Int8Config, sizes: Sizes, registers: int) -> tuple[Any, ...]:
    return (
        sizes.group, config.stages, config.x_slots, config.shared > 0, config.pieces, config.consumers, config.splits,
        max(ROWS_AT_A_TIME // config.cols, 1), registers, sizes.M <= MAX_ROWS_TO_START_NEXT,
    )  # fmt: skip


def _row(K: int, warps: int, most: int) -> tuple[int, int, int]:
    """``SharedRows.row`` for rows of ``K`` values that ``warps`` quantize, which hold at most ``most`` blocks."""
    block = 8 * 32 * warps
    blocks = next_power_of_2(cdiv(K, block))
    return block, blocks if blocks <= most else 0, PATIENCE


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
