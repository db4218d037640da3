"""Which tiles a product of int4 weights by int8 rows has on Hopper: ``Int8Config``, chosen by ``select_config``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qgemm.kernels.launch.device import DeviceLimits
from qgemm.numerics.integers import cdiv

BLOCK = 256  # values along K in 128 bytes of a packed row
CONSUMERS = 2  # groups of warps that multiply, in the kernel for many rows
MAX_FEW_ROWS = 16  # of x, for the kernel with the smaller instructions
MAX_STAGES = 8
RESERVED_BYTES = 2048  # of shared memory, for barriers
# Of an H200, in microseconds and bytes; only their ratios matter.
_BYTES = 65_000.0  # that a multiprocessor loads in a microsecond
_MACS = 5_300_000.0  # that it multiplies: three quarters of what its tensor cores do
_SCALED = 45_000.0  # sums of groups that it scales
_BLOCK_LATENCY = 0.35  # of a block of K
_PARTS = 1.5  # to wait for the partial sums of others
_PARTIAL_BYTES = 35_000.0  # of partial sums, that it writes or reads in a microsecond


@dataclass(frozen=True)
class Int8Config:
    """A tile of ``rows`` of the weight by ``cols`` rows of x, in a pipeline of ``stages`` blocks of K.

    ``warps``: of a program of the kernel for few rows, each with a block of K of its own; 0 for the other kernel.
    ``parts``: in how many a tile is cut along K. ``pieces``: in how many its columns are multiplied, scaled and stored.
    ``split``: whether its two groups of warps have every second block of K each, and not half of the rows.
    ``resident``: whether all of x stays in shared memory.
    """

    rows: int
    cols: int
    stages: int
    warps: int = 0
    parts: int = 1
    pieces: int = 1
    split: bool = False
    resident: bool = False

    def shared_memory(self, K: int) -> int:
        """Bytes that it takes, of multiplying ``K`` values."""
        if self.warps:
            x_slots = cdiv(K, BLOCK * self.warps) if self.resident else self.stages
            loaded = self.warps * BLOCK * (self.stages * self.rows // 2 + x_slots * self.cols)
            return loaded + self.warps * self.rows * self.cols * 4 + RESERVED_BYTES
        loaded = self.stages * BLOCK * (self.rows // 2 + self.cols)
        handed = 4 * self.rows * self.cols if self.split else 0
        return loaded + handed + self.rows * self.cols // self.pieces * 2 + RESERVED_BYTES

    def tiles(self, M: int, N: int) -> int:
        """How many an output of ``[M, N]`` has."""
        return cdiv(M, self.cols) * cdiv(N, self.rows)

    def workspace(self, M: int, N: int) -> tuple[int, int]:
        """How many float32 partial sums and how many counts it needs."""
        if self.parts == 1:
            return 0, 0
        tiles = self.tiles(M, N)
        return tiles * self.parts * self.rows * self.cols, tiles * CONSUMERS


def select_config(M: int, N: int, K: int, group: int, limits: DeviceLimits) -> Int8Config:
    """The config for ``[M, K]`` by ``[N, K]``; ``group``: how many values share a scale, 0 for all of a row."""
    configs = _few(M, group) if M <= MAX_FEW_ROWS else _many(M, N, K, group, limits)
    found = (_deepest(config, K, limits) for config in configs)
    valid = [config for config in found if config is not None]
    return min(valid, key=lambda config: _microseconds(config, M, N, K, group, limits))


def _few(M: int, group: int) -> list[Int8Config]:
    if M == 1:
        return [Int8Config(32, 8, MAX_STAGES, warps=8)]
    cols = 8 if M <= 8 else 16
    heights = (32, 64) if group == 0 or group >= 64 else (32,)  # small groups need more registers
    return [
        Int8Config(rows, cols, MAX_STAGES, warps=4, resident=resident) for rows in heights for resident in (False, True)
    ]


def _many(M: int, N: int, K: int, group: int, limits: DeviceLimits) -> list[Int8Config]:
    # Rows, columns, pieces, and whether K is split. Sums of groups need twice the registers, small groups some more.
    cols = 32 if M <= 32 else 64
    shapes = [(64, cols, 1, True), (128, cols, 1, False)]
    if M > 64:
        if group == 0:
            shapes += [(128, 128, 1, False)]
        elif group == 128:
            shapes += [(128, 128, 2, False)]
    elif group == 0:
        shapes += [(256, cols, cols // 32, False)]
    blocks = cdiv(K, BLOCK)
    configs = []
    for rows, columns, pieces, split in shapes:
        one = Int8Config(rows, columns, MAX_STAGES, pieces=pieces, split=split)
        # Each group of warps that has blocks of its own has one at least.
        most = blocks // 2 if split else max(blocks // 2, 1)
        parts = range(1, min(most, 8) + 1) if one.tiles(M, N) <= 2 * limits.num_sms else range(1, min(most, 1) + 1)
        configs += [replace(one, parts=count) for count in parts]
    return configs


def _deepest(config: Int8Config, K: int, limits: DeviceLimits) -> Int8Config | None:
    """``config`` with as many stages as fit, at least 3; None if they don't."""
    for stages in range(config.stages, 2, -1):
        deep = replace(config, stages=stages)
        if deep.shared_memory(K) <= limits.shared_memory:
            return deep
    return None


def _microseconds(config: Int8Config, M: int, N: int, K: int, group: int, limits: DeviceLimits) -> float:
    """About how long it takes, but for what all take."""
    if config.warps:
        rounds = cdiv(cdiv(N, config.rows), limits.num_sms)
        x = config.cols * K * (1 if config.resident else rounds)
        # All of a resident x must be there before the first product.
        return (rounds * config.rows * K / 2 + x + (x if config.resident else 0) / 2) / _BYTES
    blocks = cdiv(cdiv(K, BLOCK), config.parts)
    rounds = cdiv(config.tiles(M, N) * config.parts, limits.num_sms)
    values = config.rows * config.cols
    block = max(
        (config.rows * BLOCK / 2 + config.cols * BLOCK) / _BYTES,
        values * BLOCK / _MACS,
        values * (BLOCK / group) / _SCALED if group else 0.0,
        _BLOCK_LATENCY / (CONSUMERS if config.split else 1),
    )
    time = rounds * (blocks * block + _BLOCK_LATENCY * (2 if config.split else 1))
    if config.parts > 1:
        time += _PARTS + (rounds + config.parts) * values * 4 / _PARTIAL_BYTES
    return time
