"""Launches of Hopper's kernels (``hopper_kernels.py``). To be imported where Triton has what those are written in."""

from __future__ import annotations

from typing import Any

import torch

from qgemm.kernels.config import DeviceLimits, GemmConfig, programs_per_sm
from qgemm.kernels.hopper_kernels import PANEL, _gemm_hopper_kernel, _quant_linear_hopper_kernel, block_layout
from qgemm.kernels.launch import Launch
from qgemm.kernels.reference import MIN_SCALE
from qgemm.kernels.tensor_map import TensorMap

REGISTERS = 65_536  # of a multiprocessor
THREADS = 256  # of a program: four warps that multiply, and four for the one that loads
PATIENCE = 64  # of programs that wait for the rows of others: how often they ask
# A layer is one launch up to what the device works off in the time that the host takes for two, 16 us on an H200's.
LARGEST_WEIGHT = 64 << 20  # bytes
LARGEST_INPUT = 3 << 20  # values
MOST_PRODUCTS = 4 << 30  # of two values
MOST_ROWS_OF_A_PROGRAM = 16  # to quantize


def gemm_launch(
    config: GemmConfig,
    M: int,
    N: int,
    K: int,
    strides: tuple[int, ...],
    out_dtype: torch.dtype,
    constant_b: bool,
    limits: DeviceLimits,
) -> Launch:
    """A product of A, B, C, their scales and the bias, which have these ``strides``."""
    stride_am, _, _, stride_bn, stride_cm, _, *epilogue_strides = strides
    # A kernel that starts early wants room beside this one.
    next_early = constant_b and programs_per_sm(config, 1, limits) > 1
    return _launch(
        _gemm_hopper_kernel, (0, 1, 2), config, M, N, K, (stride_am, stride_bn, stride_cm), out_dtype, limits,
        (M, N, K, *epilogue_strides), (*_constants(config, M, limits), constant_b, next_early),
    )  # fmt: skip


def in_one_launch(config: GemmConfig, M: int, N: int, K: int, limits: DeviceLimits) -> bool:
    """Whether a layer is one launch where the host's time counts, which is outside of CUDA graphs."""
    rows = -(-M // programs(config, M, N, limits))
    return (
        N * K <= LARGEST_WEIGHT
        and M * K <= LARGEST_INPUT
        and M * N * K <= MOST_PRODUCTS
        and rows <= MOST_ROWS_OF_A_PROGRAM
    )


def quant_linear_launch(
    config: GemmConfig,
    M: int,
    N: int,
    K: int,
    x_strides: tuple[int, ...],
    stride_bn: int,
    epilogue_strides: tuple[int, int],
    dtype: torch.dtype,
    limits: DeviceLimits,
) -> Launch:
    """A layer of rows ``[M, K]`` of ``dtype``. ``epilogue_strides``: of the weight's scale and the bias."""
    row = (MIN_SCALE, *row_blocks(config, K, limits), PATIENCE)
    return _launch(
        _quant_linear_hopper_kernel, (8, 4, 5), config, M, N, K, (K, stride_bn, N), dtype, limits,
        (M, N, K, *x_strides, *epilogue_strides),
        (row, *_constants(config, M, limits), programs_per_sm(config, 1, limits) > 1),
    )  # fmt: skip


def _launch(
    kernel: Any,
    positions: tuple[int, int, int],
    config: GemmConfig,
    M: int,
    N: int,
    K: int,
    strides: tuple[int, int, int],
    out_dtype: torch.dtype,
    limits: DeviceLimits,
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
) -> Launch:
    """``positions``, ``strides``: of A, B and C, among the kernel's tensors, and of their rows."""
    rows, panel, b_part = config.block_m, PANEL.value, config.widths[-1]
    part, _ = rows_at_a_time(M, rows)
    maps = (
        TensorMap((M, K), (strides[0], 1), (part, panel), block_layout(part, panel, torch.int8)),
        TensorMap((N, K), (strides[1], 1), (b_part, panel), block_layout(b_part, panel, torch.int8)),
        TensorMap(
            (M, N), (strides[2], 1), (rows, config.stored_columns), block_layout(rows, config.stored_columns, out_dtype)
        ),
    )
    return Launch(
        kernel, programs(config, M, N, limits), numbers, constants, config.num_warps, pdl=True,
        maps=dict(zip(positions, maps, strict=True)),
        max_registers=max_registers(programs_per_sm(config, 1, limits)),
    )  # fmt: skip


def _constants(config: GemmConfig, M: int, limits: DeviceLimits) -> tuple[Any, ...]:
    _, last_parts = rows_at_a_time(M, config.block_m)
    slots = limits.num_sms * programs_per_sm(config, 1, limits)
    return (
        config.block_m, config.block_n, config.block_k, config.widths, config.group_size_m, slots, config.num_stages,
        last_parts,
    )  # fmt: skip


def programs(config: GemmConfig, M: int, N: int, limits: DeviceLimits) -> int:
    """How many a product of ``[M, N]`` has: one for each tile, and no more than the device holds."""
    tiles = -(-M // config.block_m) * -(-N // config.block_n)
    return min(tiles, limits.num_sms * programs_per_sm(config, 1, limits))


def max_registers(resident: int) -> int | None:
    """Of a thread where ``resident`` programs share a multiprocessor; None for all."""
    return None if resident == 1 else REGISTERS // (resident * THREADS) // 8 * 8


def row_blocks(config: GemmConfig, K: int, limits: DeviceLimits) -> tuple[int, int]:
    """``(BLOCK, BLOCKS)`` of ``_quantize_row`` for a row of ``K`` 16-bit values, which a program's warps share.

    ``BLOCKS`` is a power of 2, so that there are few variants. It is 0, to read the row twice, where registers hold no
    more.
    """
    block = 8 * 32 * config.num_warps
    blocks = 1 << (max(1, -(-K // block)) - 1).bit_length()
    return block, blocks if blocks <= (32 if programs_per_sm(config, 1, limits) == 1 else 8) else 0


def rows_at_a_time(M: int, block_m: int) -> tuple[int, int]:
    """``(part, last_parts)``: how many rows of A the copy engine loads at a time, and how often in the last tile.

    Few numbers, since each pair is a kernel of its own.
    """
    last = M % block_m or block_m
    if block_m >= M or last == block_m:
        part = next((part for part in (block_m, 32, 16) if last % part == 0), 8)
    else:
        part = min(block_m, 32 if last % 32 == 0 or M > 1024 else 16)
    return part, -(-last // part)
