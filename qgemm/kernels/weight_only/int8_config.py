"""The tile of a product of int4 weights by int8 rows on Hopper: ``Int8Config``, chosen by ``select_config``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.launch.memory import CACHE_LINE_BYTES, COUNTS_BYTES
from qgemm.kernels.weight_only.config import COUNTS_IN_A_WORD, Shareable
from qgemm.numerics.integers import cdiv, round_up
from qgemm.numerics.packing import HALF

BLOCK = 256  # values along K in 128 bytes of a packed row
MAX_FEW_ROWS = 16  # of x, for the kernel with the smaller tensor-core instructions
MIN_ROWS_FOR_STEPS = 65  # with fewer rows, scaling sums takes less time than multiplying values
MAX_STAGES = 8
ROW_COUNTS = COUNTS_BYTES // 4 - 2  # behind the counts of shared tiles: counts of the rows that are quantized
RESERVED_BYTES = 2048  # of shared memory, for barriers
# For an H200, in microseconds and bytes, fitted so that the best of the timed configs are chosen.
# A block is a tile's values along BLOCK of K.
_BLOCK_LATENCY = 0.15
_LATENCY_OF_SPLITS, _LATENCY_OF_FOUR = 0.08, 0.12  # groups of warps with other blocks of K; four with other rows
_GROUPS_LATENCY = 0.035  # what scaling adds
_PRODUCTS = 3.8e-5  # a value of a tile, per block
_SCALED = 0.66e-5  # a sum of a group
_MULTIPLIED = 1.6e-3  # a row whose values are multiplied by the scale of their group,
_HIDDEN = 100.0  # except for the part that products of more columns hide
_BYTES = 35_000.0  # of the weight that an SM loads from memory in a microsecond
_TILE_LATENCY = 0.35
_HANDOVER = 1.8
_PARTIAL_SUM = 9e-5  # of each part but the last
_SECOND_PART = 1.0  # where programs have parts of two tiles


class Sizes(NamedTuple):
    """A product ``[M, K]`` by ``[N, K]`` with ``G`` groups of ``group`` values; ``group`` is 0 for a single group."""

    M: int
    N: int
    K: int
    G: int
    group: int

    @property
    def blocks(self) -> int:
        """The number of blocks of K."""
        return cdiv(self.K, BLOCK)

    @property
    def step(self) -> int:
        """The number of bytes of a row in a column of blocks."""
        return self.group or HALF

    @property
    def partial_at(self) -> int:
        """Where partial sums begin, behind the scales of rows, counted in floats."""
        return round_up(self.M, CACHE_LINE_BYTES // 4)


@dataclass(frozen=True)
class Int8Config(Shareable):
    """A tile of ``rows`` of the weight by ``cols`` rows of x, in a pipeline of ``stages`` blocks of K.

    ``warps``: the warps of a program of the kernel for few rows, each with its own block of K; 0 for the other kernel.
    ``pieces``: the number of pieces in which a tile's columns are multiplied, scaled and stored. ``consumers``: how
    many groups of warps multiply in the other kernel; ``splits`` of them have the same rows, with blocks of K in turn.
    ``multiplies``: whether values are multiplied by their group's scale, an integer number of steps, so that sums are
    integers.
    ``x_slots``: the number of slots for halves of blocks of x, where these have separate slots.
    """

    rows: int
    cols: int
    stages: int
    warps: int = 0
    pieces: int = 1
    consumers: int = 2
    splits: int = 1
    multiplies: bool = False
    x_slots: int = 0

    def shared_memory(self) -> int:
        """Bytes of shared memory that the config takes."""
        if self.warps:
            loaded = self.stages * self.warps * BLOCK * (self.rows // 2 + self.cols)
            return loaded + self.warps * self.rows * self.cols * 4 + RESERVED_BYTES
        loaded = BLOCK // 2 * (self.stages * self.rows + (self.x_slots or 2 * self.stages) * self.cols)
        handed = 4 * self.rows * self.cols * (self.splits - 1)
        return loaded + handed + self.rows * self.cols // self.pieces * 2 + RESERVED_BYTES

    def tiles(self, M: int, N: int) -> int:
        """How many tiles an output of ``[M, N]`` has."""
        return cdiv(M, self.cols) * cdiv(N, self.rows)

    @property
    def leaves_row_counts(self) -> bool:
        """Whether the counts of shared tiles leave memory to count rows."""
        return self.shared * self.counts <= ROW_COUNTS * COUNTS_IN_A_WORD

    @property
    def counts(self) -> int:
        """One count for each piece of the rows that a group of warps stores."""
        return self.consumers // self.splits * self.pieces


def select_config(
    M: int, N: int, K: int, group: int, limits: DeviceLimits, has_steps: bool = False, may_share: bool = True
) -> Int8Config:
    """The config for ``[M, K]`` by ``[N, K]``. ``group``: how many values share a scale; 0 if all of a row do.

    ``has_steps``: whether a group's scale is a multiple of its row's step. ``may_share``: whether programs may share
    tiles.
    """
    if M <= MAX_FEW_ROWS:
        configs = _few(M, group)
    elif has_steps and M >= MIN_ROWS_FOR_STEPS:
        configs = [replace(config, multiplies=True) for config in _many(M, N, K, 0, limits, may_share)]
        if group < HALF:  # whose multiples leave fewer registers
            configs = [config for config in configs if config.consumers == 2 and config.cols < 256]
    else:
        configs = _many(M, N, K, group, limits, may_share)
    found = (_deepest(config, limits) for config in configs)
    valid = [config for config in found if config is not None]
    return min(valid, key=lambda config: _microseconds(config, M, N, K, group, limits))


def _few(M: int, group: int) -> list[Int8Config]:
    cols = 8 if M <= 8 else 16
    if M == 1 or group:
        # Scaling takes instructions, hence more warps.
        return [Int8Config(32, cols, MAX_STAGES, warps=8)]
    return [Int8Config(rows, cols, MAX_STAGES, warps=4) for rows in (32, 64)]


def _many(M: int, N: int, K: int, group: int, limits: DeviceLimits, may_share: bool) -> list[Int8Config]:
    cols = 32 if M <= 32 else 64
    shapes = [Int8Config(64, cols, MAX_STAGES, splits=2), Int8Config(128, cols, MAX_STAGES)]
    if M > 64 and group in (0, HALF):  # smaller groups need more registers
        shapes.append(Int8Config(128, 128, MAX_STAGES, pieces=2 if group else 1))
    if M > 128 and group == 0:
        shapes.append(Int8Config(128, 256, 2, pieces=2, x_slots=5))
    if M > 32 and group == 0:  # with groups, four consumers don't have the registers to scale sums
        shapes.append(Int8Config(256, 64, MAX_STAGES, consumers=4))
    if not may_share:
        return shapes
    blocks, configs = cdiv(K, BLOCK), []
    for one in shapes:
        last = one.tiles(M, N) % limits.num_sms
        ways = one.shared_by(last, limits.num_sms, blocks) if one.consumers == 2 else []
        if one.splits > 1:  # each group of warps has a block of its own
            ways = [way for way in ways if way.sharers % way.shared == 0 and one.splits * way.parts <= blocks]
        configs += [one, *ways]
    return configs


def _deepest(config: Int8Config, limits: DeviceLimits) -> Int8Config | None:
    """``config`` with as many stages as fit: at least 3, or 2 with slots for x; None if those don't fit."""
    for stages in range(config.stages, 1 if config.x_slots else 2, -1):
        deep = replace(config, stages=stages)
        if deep.shared_memory() <= limits.shared_memory:
            return deep
    return None


def _microseconds(config: Int8Config, M: int, N: int, K: int, group: int, limits: DeviceLimits) -> float:
    """Roughly how long a product takes, without what is the same for all configs."""
    blocks, tiles = cdiv(K, BLOCK), config.tiles(M, N)
    if config.warps:
        # Only the bytes that are loaded matter.
        return cdiv(tiles, limits.num_sms) * K * (config.rows / 2 + config.cols) / _BYTES
    values = config.rows * config.cols
    latency = _LATENCY_OF_FOUR if config.consumers > 2 else _BLOCK_LATENCY
    computed = (_LATENCY_OF_SPLITS if config.splits > 1 else latency) + values * _PRODUCTS
    if config.multiplies:
        computed += config.rows * _MULTIPLIED * min(1, _HIDDEN / config.cols)
    elif group:
        computed += _GROUPS_LATENCY + values * (BLOCK / group) * _SCALED

    def block(programs: int) -> float:
        # Tiles with other rows of x read the same weight from the cache.
        busy = min(programs, limits.num_sms) / limits.num_sms / cdiv(M, config.cols)
        loaded = config.rows * BLOCK / 2 / _BYTES * busy
        return math.pow(computed**3 + loaded**3, 1 / 3)  # they hide each other only in part

    alone = tiles - config.shared
    time = cdiv(alone, limits.num_sms) * (blocks * block(alone) + _TILE_LATENCY)
    if config.shared:
        time += cdiv(config.shared * blocks, config.sharers) * block(config.sharers) + _TILE_LATENCY
        time += _HANDOVER + (config.parts - 1) * values * _PARTIAL_SUM
        if config.sharers % config.shared:
            time += _SECOND_PART
    return time
