"""The tile shape and pipeline that a GEMM runs with.

``select_config`` picks the entry of ``CANDIDATES`` that is cheapest by a model of the device. For each block of K, a
program needs the longest of these: its loads' latency, shared by the stages in flight; its own chain of load and
multiply; and, together with the programs that share its SM, their multiply-adds at the tensor cores' rate, or their
operand bytes at the cache's. A problem takes as many waves as its tiles need, and at least the time of its bytes at the
memory's bandwidth. Nothing is timed at run time, so the answer is always the same. ``scaled_mm(..., config=...)`` and
the functions like it accept any other ``GemmConfig``.

The constants are cycles, and bytes per cycle of one SM, fitted on an H200 (docs/performance/int8.md). Only their ratios
matter, so other devices get a sensible, if less exact, answer.
"""

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch

from qgemm.kernels.launch.device import DeviceLimits, device_limits
from qgemm.numerics.formats import FP8
from qgemm.numerics.integers import cdiv

_OVERLAP_LOSS = 0.608  # of the shorter of the times for computing and for reading memory
_MEMORY_BYTES = 20.8
# A program's loop over K.
_MACS = 4096  # multiply-adds of 1-byte operands
_NARROW = 1.5  # how much slower the tensor cores are on blocks of fewer than 64 rows
_CACHE_BYTES = 62.3
_MEMORY_LATENCY = 2550.0
_BLOCK_LATENCY = 340.0
_BLOCK_LATENCY_BYTES = 72.1
_STREAMK_LATENCY = 9000.0  # zeroing the workspace, and the last arrival's wait
_STREAMK_ATOMICS = 0.87
# Hopper's kernel. All in units of the other kernel's constants, so these aren't figures of the chip.
_HOPPER_OVERLAP_LOSS = 0.71
_HOPPER_MACS = 6240
_HOPPER_SHARED_BYTES = 202.0
_HOPPER_LEAST = 0.326  # of an instruction, for one value of K: the minimum, even for pieces of few columns
_HOPPER_PIECES = 1.14  # how much longer tiles in two pieces take if an SM has several tiles
_HOPPER_TALL = 0.96  # the same of tiles of 256 rows: their fewer loads leave power to multiply
_PROMOTED_ALONE = 1.15  # of fp8, if no other group multiplies while one adds large sums
_PROMOTED_TALL = 1.04  # of fp8 in tiles of 256 rows: sums of half as many products are added to as many sums
_BLOCK_SCALED_PIECES = 0.94  # of fp8 with block scales: a tile in two pieces adds sums while it multiplies
_HOPPER_IDLE = 0.2  # how much of memory's rate a last wave's idle SMs lose, with many rows
_HOPPER_CACHE_BYTES_OF_ALL = 15_800.0
_HOPPER_PAIR_BYTES = 48.0  # from memory, to two SMs that share their path to it
_HOPPER_MEMORY_LATENCY = 1228.0
_HOPPER_START = 3150.0  # compared with it, Stream-K's is nothing
_HOPPER_START_BESIDE = 2400.0  # if the preceding kernel leaves SMs free
_HOPPER_EARLY_START = 1800.0  # if it leaves room on each SM
_STORE_VALUES = 350  # values of K that are multiplied in the time that scaling and storing a tile of 256 rows takes
_IN_TURN = 1.011  # how much longer the multiply-adds take in tiles of groups that take turns


MIN_LONG_PRODUCT_MACS = 32 << 30  # multiply-adds: with more, the largest tiles are limited by power
MIN_ROWS_IN_TURN = 2048  # the fewest rows, and the longest sums, that were measured
MAX_SUM_IN_TURN = 5120  # values of K

Schedule = Literal["tiles", "persistent", "streamk", "specialized"]
"""How tiles are distributed over programs.

- ``"tiles"``: one tile per program. ``"persistent"``: as many programs as fit on the device, each with several tiles in
  turn.
- ``"streamk"``: persistent, and programs also split the sums over K between them. int8 only.
- ``"specialized"``: persistent and warp-specialized: some warps load, others multiply (``hopper_kernels.py``). On
  Hopper only, for operands of 1 and 2 bytes.
"""


@dataclass(frozen=True)
class GemmConfig:
    """Tile shape, pipeline and schedule of one GEMM kernel variant.

    ``block_k`` counts elements, or bytes with ``"specialized"``. ``num_warps``: the warps that multiply;
    ``"specialized"`` has others that load. Blocks are powers of 2; with ``"specialized"``, ``block_n`` may be a sum of
    two. ``groups``: how many groups of ``num_warps`` warps take a program's tiles in turn: while one scales and stores
    its sums, the other multiplies. 2 is possible with ``"specialized"`` only. ``promotes``: whether ``"specialized"``
    is for fp8, and adds sums of few values in float32.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_size_m: int = 8
    schedule: Schedule = "persistent"
    groups: int = 1
    promotes: bool = False

    @property
    def sharing_groups(self) -> int:
        """How many groups of four warps share a tile: two for fp8 with eight warps; one adds while one multiplies."""
        return self.num_warps // 4 if self.promotes else 1

    @property
    def group_warps(self) -> int:
        """The warps of a group."""
        return self.num_warps // self.sharing_groups

    @property
    def stored_rows(self) -> int:
        """How many rows of a tile Hopper's kernel stores at a time."""
        return min(self.block_m, 64) if self.promotes else self.block_m

    @property
    def sums(self) -> int:
        """How many float32 or int32 sums a program of Hopper's kernel holds at a time.

        These are a tile's and, for fp8, in addition those of 64 rows for each group.
        """
        own = max(self.block_m, 64) * self.block_n if self.promotes else self.block_m * self.block_n
        return own + self.sharing_groups * 64 * self.block_n if self.promotes else own

    def shared_memory(self, itemsize: int) -> int:
        """Bytes of shared memory that the kernel holds for operands of ``itemsize`` bytes."""
        rows, cols = self.block_m, self.block_n
        if self.schedule != "specialized":
            return self.num_stages * (rows + cols) * self.block_k * itemsize
        # Instructions read 64 rows of A, so behind blocks of fewer there is more memory. Each group stages a tile of
        # 2-byte outputs, and there are barriers.
        loaded = self.num_stages * (rows + cols) * self.block_k + max(64 - rows, 0) * 128
        groups = self.groups * self.sharing_groups
        return loaded + groups * max(self.stored_rows, 64) * self.stored_columns * 2 + 1024

    def tiles(self, M: int, N: int) -> int:
        """How many tiles an output of ``[M, N]`` has."""
        return cdiv(M, self.block_m) * cdiv(N, self.block_n)

    @property
    def widths(self) -> tuple[int, ...]:
        """The pieces of ``block_n`` columns that Hopper's kernel multiplies: the largest power of 2, and the rest."""
        main = 1 << max(self.block_n.bit_length() - 1, 0)
        return (main, self.block_n - main) if main < self.block_n else (main,)

    @property
    def stored_columns(self) -> int:
        """How many columns of a tile Hopper's kernel stores at a time.

        Those of the narrower of two pieces; half of a large tile's, which leaves more shared memory.
        """
        if len(self.widths) > 1:
            return self.widths[-1]
        return self.block_n // 2 if self.block_m > 128 else self.block_n


# For 1-byte operands; wider ones have fewer elements along K in the same bytes.
CANDIDATES: tuple[GemmConfig, ...] = (
    # Hopper's kernel. Few rows: as many weights in flight as an SM has room for.
    GemmConfig(16, 64, 256, num_warps=4, num_stages=10, schedule="specialized"),
    GemmConfig(16, 80, 256, num_warps=4, num_stages=9, schedule="specialized"),
    GemmConfig(16, 32, 512, num_warps=4, num_stages=9, schedule="specialized"),
    GemmConfig(32, 64, 256, num_warps=4, num_stages=8, schedule="specialized"),
    GemmConfig(32, 80, 256, num_warps=4, num_stages=7, schedule="specialized"),
    GemmConfig(32, 32, 512, num_warps=4, num_stages=6, schedule="specialized"),
    GemmConfig(256, 128, 128, num_warps=8, num_stages=4, schedule="specialized"),
    GemmConfig(128, 128, 128, num_warps=4, num_stages=6, schedule="specialized"),
    GemmConfig(64, 128, 128, num_warps=4, num_stages=8, schedule="specialized"),
    GemmConfig(64, 64, 256, num_warps=4, num_stages=6, schedule="specialized"),
    GemmConfig(64, 32, 256, num_warps=4, num_stages=7, schedule="specialized"),
    GemmConfig(64, 32, 512, num_warps=4, num_stages=4, schedule="specialized"),
    # Other widths, for when those above leave many SMs idle in the last wave.
    GemmConfig(128, 192, 128, num_warps=8, num_stages=5, schedule="specialized"),
    GemmConfig(128, 160, 128, num_warps=8, num_stages=6, schedule="specialized"),
    GemmConfig(64, 160, 128, num_warps=4, num_stages=7, schedule="specialized"),
    GemmConfig(64, 80, 256, num_warps=4, num_stages=6, schedule="specialized"),
    # Two programs per SM.
    GemmConfig(64, 64, 128, num_warps=4, num_stages=6, schedule="specialized"),
    GemmConfig(64, 32, 256, num_warps=4, num_stages=4, schedule="specialized"),
    # Many rows and short sums. It is chosen by ``_takes_turns`` instead of the model.
    GemmConfig(128, 192, 128, num_warps=4, num_stages=4, group_size_m=16, schedule="specialized", groups=2),
    # The kernel for all devices, where Hopper's can't be used. Large tiles.
    GemmConfig(128, 128, 128, num_warps=4, num_stages=3, group_size_m=16),
    GemmConfig(128, 128, 128, num_warps=8, num_stages=3, group_size_m=16),
    GemmConfig(64, 128, 128, num_warps=4, num_stages=4),
    GemmConfig(128, 64, 128, num_warps=8, num_stages=4),
    GemmConfig(64, 64, 128, num_warps=4, num_stages=5),
    GemmConfig(64, 32, 256, num_warps=4, num_stages=4),
    # Few rows: weights at the memory's rate.
    GemmConfig(32, 128, 256, num_warps=4, num_stages=4, schedule="tiles"),
    GemmConfig(32, 128, 128, num_warps=4, num_stages=4, schedule="tiles"),
    GemmConfig(32, 64, 256, num_warps=4, num_stages=4, schedule="tiles"),
    GemmConfig(32, 32, 512, num_warps=4, num_stages=4, schedule="tiles"),
    GemmConfig(16, 128, 256, num_warps=4, num_stages=4, schedule="tiles"),
    GemmConfig(16, 64, 512, num_warps=4, num_stages=4, schedule="tiles"),
    GemmConfig(16, 32, 512, num_warps=4, num_stages=6, schedule="tiles"),
    GemmConfig(16, 32, 256, num_warps=2, num_stages=6, schedule="tiles"),
    GemmConfig(16, 16, 512, num_warps=2, num_stages=6, schedule="tiles"),
    # Few tiles with long sums.
    GemmConfig(64, 64, 128, num_warps=4, num_stages=5, schedule="streamk"),
    GemmConfig(16, 64, 256, num_warps=4, num_stages=4, schedule="streamk"),
    # For devices with little shared memory.
    GemmConfig(64, 64, 64, num_warps=4, num_stages=2),
    GemmConfig(16, 32, 64, num_warps=2, num_stages=2),
)


# Additional candidates for fp8.
PROMOTED = (GemmConfig(128, 64, 128, num_warps=8, num_stages=8, schedule="specialized", promotes=True),)
# The kernel for all devices with block scales, by rows.
BLOCK_SCALED = (
    GemmConfig(16, 64, 128, num_warps=4, num_stages=4),
    GemmConfig(64, 64, 128, num_warps=4, num_stages=3),
    GemmConfig(64, 128, 128, num_warps=8, num_stages=3),
)


def is_valid(config: GemmConfig, itemsize: int, limits: DeviceLimits) -> bool:
    """Whether ``config`` can run on operands of ``itemsize`` bytes.

    Blocks must be powers of 2 that tensor cores accept (in Hopper's kernel, the columns may be two such blocks), and a
    program must have an allowed number of warps in one group (in Hopper's kernel, one or two). The pipeline must fit in
    shared memory, and the accumulator in registers. Stream-K needs integers to add, and Hopper's kernel its
    instructions.
    """
    if config.schedule == "specialized":
        if not _hopper_runs(config, itemsize, limits):
            return False
        columns, bytes_of_k, sums = config.widths, config.block_k, config.sums
        groups = (1, 2) if config.block_m >= 64 else (1,)
    else:
        columns, bytes_of_k, sums = (config.block_n,), config.block_k * itemsize, config.block_m * config.block_n
        groups = (1,)
        if config.promotes or (config.schedule == "streamk" and itemsize > 1):
            return False
    blocks = (config.block_m, *columns, config.block_k)
    # Registers per thread for sums: 128 are too many if operands take registers, too, which ``wgmma``'s don't. Groups
    # that take turns load scales afterwards, a few at a time.
    registers = (192 if config.groups == 2 or config.promotes else 128) if limits.hopper else 64
    shared_memory = config.shared_memory(itemsize)
    if limits.warp_size == 64:
        shared_memory += shared_memory // 32  # from Triton 3.9 on, blocks are padded on AMD by up to this much
    return (
        all(block >= 16 and block & (block - 1) == 0 for block in blocks)
        and bytes_of_k >= 32
        and config.num_warps in (1, 2, 4, 8, 16)
        and config.groups in groups
        and min(config.num_stages, config.group_size_m) >= 1
        and shared_memory <= limits.shared_memory
        and sums <= registers * config.num_warps * limits.warp_size
    )


def _hopper_runs(config: GemmConfig, itemsize: int, limits: DeviceLimits) -> bool:
    """Whether Hopper's kernel is written for such a config, and the device has its instructions."""
    return (
        limits.hopper
        and itemsize <= 2
        and config.num_warps == _warps_of(config)
        and (not config.promotes or (itemsize == 1 and config.groups == 1))
        and limits.hopper_rows <= config.block_m <= 256
        and config.widths[0] <= 128 <= config.block_k
        and config.num_stages >= 2
    )


def _warps_of(config: GemmConfig) -> int:
    """How many warps multiply in Hopper's kernel. In fp8's, each group of warps has 64 or 128 rows of a tile."""
    if config.promotes:
        return 8 if config.block_m >= 128 else 4
    return 8 if config.groups == 1 and (config.block_m == 256 or config.block_m * config.block_n > 128 * 128) else 4


def programs_per_sm(config: GemmConfig, itemsize: int, limits: DeviceLimits) -> int:
    """How many programs are resident on an SM at a time; at most 8."""
    if config.schedule == "specialized":
        # Larger sums take all registers of an SM.
        most = 3 if config.sums <= 64 * 128 and config.groups == 1 else 1
        return min(most, (limits.shared_memory + 1024) // (config.shared_memory(itemsize) + 1024))
    threads = config.num_warps * limits.warp_size
    by_memory = limits.shared_memory // (config.shared_memory(itemsize) + 1024)
    # The accumulator, half as much for the epilogue, and 40 registers per thread for the rest.
    by_registers = 65_536 // (3 * config.block_m * config.block_n // 2 + threads * 40)
    return max(1, min(by_memory, by_registers, limits.max_threads // threads, 8))


def select_config(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    device: torch.device,
    hopper: bool = True,
    residual: bool = False,
    blocks: bool = False,
    activation: bool = False,
) -> GemmConfig:
    """The config for ``[M, K] @ [K, N]`` of ``dtype`` operands on ``device``.

    ``hopper``: whether layout and output allow Hopper's kernel where the device has it (``launcher.py`` says when).
    ``residual``: whether one is added, which needs registers that two groups don't have. ``activation``: whether there
    is one, which also needs more registers than tiles of 256 rows leave. ``blocks``: whether scales are of blocks.
    """
    limits = device_limits(device)
    if blocks and not (hopper and limits.hopper):
        found = [config for config in BLOCK_SCALED if is_valid(config, 1 if limits.multiplies_fp8 else 2, limits)]
        return next(config for config in found if config.block_m >= M or config is found[-1])
    if dtype == FP8.storage and not limits.multiplies_fp8:
        dtype = torch.float16  # which its bytes are decoded to
    itemsize = dtype.itemsize
    configs = _valid_candidates(itemsize, limits, dtype == FP8.storage)
    if not hopper:
        configs = [config for config in configs if config.schedule != "specialized"]
    if blocks:
        configs = [
            config
            for config in configs
            # With several groups, one doesn't load scales while another multiplies, and narrow tiles load as many
            # scales for fewer products. All columns of a tile, or of each 64 of them, must be in one block.
            if config.schedule == "specialized"
            and (128 % config.block_n == 0 or config.widths == (128, 64))
            and (config.block_m == 128 if M > 64 else config.block_m <= 64 and (config.block_n > 32 or M <= 32))
        ]
    if dtype != torch.int8:
        configs = [config for config in configs if config.schedule != "streamk"]
    if activation:
        configs = [config for config in configs if config.block_m < 256 and config.groups == 1]
    in_turn: list[GemmConfig] = []
    if any(config.schedule == "specialized" for config in configs):
        in_turn = [config for config in configs if config.groups > 1]
        configs = [config for config in configs if _suits(config, M, N, limits)]
    chosen = min(configs, key=lambda config: _cycles(config, M, N, K, itemsize, limits, blocks))
    if chosen.schedule == "specialized" and chosen.block_m == 256 and not residual:
        return next((config for config in in_turn if _takes_turns(config, chosen, M, N, K * itemsize, limits)), chosen)
    return chosen


def _takes_turns(config: GemmConfig, tall: GemmConfig, M: int, N: int, K: int, limits: DeviceLimits) -> bool:
    """Whether ``config``, whose groups take turns, is faster than ``tall``, whose tiles of 256 rows the model chose.

    While ``tall`` scales and stores a tile's sums, nothing is multiplied, which matters if sums are short. If they are
    long, larger tiles need fewer bytes and so less power.
    """
    if M < MIN_ROWS_IN_TURN or K > MAX_SUM_IN_TURN or M * N * K < MIN_LONG_PRODUCT_MACS:
        return False
    rounds, tall_rounds = (cdiv(each.tiles(M, N), limits.num_sms) for each in (config, tall))
    in_turn = rounds * config.block_m * config.block_n * K * _IN_TURN
    return in_turn < tall_rounds * tall.block_m * tall.block_n * (K + _STORE_VALUES)


def _suits(config: GemmConfig, M: int, N: int, limits: DeviceLimits) -> bool:
    """Whether ``config`` is considered for such a product where Hopper's kernel is available.

    That kernel multiplies fewer than 64 rows as if they were 64. Up to 32 rows memory decides, and the kernel reads
    long pieces of weights faster than the model says. Only Stream-K is ever much faster than it, on few tiles with long
    sums.
    """
    if config.schedule == "streamk":
        return 2 * config.tiles(M, N) <= limits.num_sms
    return (
        config.schedule == "specialized"
        and config.groups == 1
        and config.block_m >= min(M, 64)
        and (M > 32 or config.block_k > 128)
    )


@functools.cache
def _valid_candidates(itemsize: int, limits: DeviceLimits, promotes: bool) -> list[GemmConfig]:
    configs = [for_operands(config, itemsize, promotes) for config in CANDIDATES + PROMOTED * promotes]
    return [config for config in configs if is_valid(config, itemsize, limits)]


def for_operands(config: GemmConfig, itemsize: int, promotes: bool) -> GemmConfig:
    """A candidate for operands of ``itemsize`` bytes. ``promotes``: whether it is for fp8 in Hopper's kernel."""
    if config.schedule != "specialized":
        return replace(config, block_k=max(config.block_k // itemsize, 16))
    if promotes:
        config = replace(config, promotes=True)
        return replace(config, num_warps=_warps_of(config))
    return config


def _cycles(
    config: GemmConfig, M: int, N: int, K: int, itemsize: int, limits: DeviceLimits, block_scaled: bool
) -> float:
    tiles = config.tiles(M, N)
    blocks = max(1, cdiv(K * itemsize if config.schedule == "specialized" else K, config.block_k))
    memory = ((M + N) * K * itemsize + 2 * M * N) / (_MEMORY_BYTES * limits.num_sms)
    if config.schedule == "specialized":
        compute = _hopper_cycles(config, M, tiles, blocks, limits, block_scaled)
        start, loss = _HOPPER_START, _HOPPER_OVERLAP_LOSS
        if programs_per_sm(config, itemsize, limits) > 1:
            start = _HOPPER_EARLY_START
        elif 2 * tiles <= limits.num_sms:
            start = _HOPPER_START_BESIDE
        rounds = tiles / limits.num_sms
        if rounds > 1 and M > 64:
            memory *= 1 + _HOPPER_IDLE * (cdiv(tiles, limits.num_sms) / rounds - 1)
        if config.block_m >= M:
            memory = _weight_cycles(config, memory, tiles, blocks, limits)
    else:
        compute = _loop_cycles(config, M, tiles, blocks, itemsize, limits)
        start, loss = 0.0, _OVERLAP_LOSS
    return start + max(compute, memory) + loss * min(compute, memory)


def _weight_cycles(config: GemmConfig, memory: float, tiles: int, blocks: int, limits: DeviceLimits) -> float:
    """``memory``, or more if the last wave's few tiles take longer: each reads weights that no other tile reads.

    The two SMs of a pair share their path to memory if both have a tile.
    """
    rounds, rest = divmod(tiles, limits.num_sms)
    # In the first wave, as much as the ring holds is loaded before the preceding kernel has ended.
    steps = blocks if rounds else blocks - config.num_stages
    last = steps * config.block_n * config.block_k * (2 if 2 * rest > limits.num_sms else 1) / _HOPPER_PAIR_BYTES
    return memory + max(0, last - memory * rest / tiles) if rest else memory


def _hopper_cycles(
    config: GemmConfig, M: int, tiles: int, blocks: int, limits: DeviceLimits, block_scaled: bool
) -> float:
    rows, depth = max(config.block_m, 64), config.block_k
    # An instruction multiplies 64 rows by the columns of a piece, and reads both from shared memory.
    macs = depth * sum(
        rows / 64 * max(64 * cols / _HOPPER_MACS, (64 + cols) / _HOPPER_SHARED_BYTES, _HOPPER_LEAST)
        for cols in config.widths
    )
    loads = (min(config.block_m, M) + config.block_n) * depth
    shared = max(macs, loads * min(tiles, limits.num_sms) / _HOPPER_CACHE_BYTES_OF_ALL)
    if config.promotes and config.sharing_groups == 1 and config.sums > 64 * 128:
        macs *= _PROMOTED_ALONE
    alone = _HOPPER_MEMORY_LATENCY / config.num_stages
    cycles = blocks * _rounds(alone, shared, tiles, programs_per_sm(config, 1, limits), limits)
    if block_scaled:
        return cycles * (_BLOCK_SCALED_PIECES if len(config.widths) > 1 else 1.0)
    if tiles > limits.num_sms and len(config.widths) > 1:
        return cycles * _HOPPER_PIECES
    if tiles > limits.num_sms and config.block_m == 256:
        return cycles * (_PROMOTED_TALL if config.promotes else _HOPPER_TALL)
    return cycles


def _loop_cycles(config: GemmConfig, M: int, tiles: int, blocks: int, itemsize: int, limits: DeviceLimits) -> float:
    resident = programs_per_sm(config, itemsize, limits)
    loads = (min(config.block_m, M) + config.block_n) * config.block_k * itemsize
    macs = config.block_m * config.block_n * config.block_k * itemsize / _MACS
    if config.block_m < 64:
        macs *= _NARROW
    shared = max(macs, loads / _CACHE_BYTES)
    alone = max(_MEMORY_LATENCY / max(config.num_stages - 1, 1), _BLOCK_LATENCY + loads / _BLOCK_LATENCY_BYTES)
    if config.schedule == "streamk":
        rounds = cdiv(tiles * blocks, limits.num_sms * resident)
        atomics = resident * config.block_m * config.block_n / _STREAMK_ATOMICS
        return rounds * max(alone, resident * shared) + _STREAMK_LATENCY + atomics
    return blocks * _rounds(alone, shared, tiles, resident, limits)


def _rounds(alone: float, shared: float, tiles: int, resident: int, limits: DeviceLimits) -> float:
    """The cycles of one block of every tile.

    A program takes ``alone`` for it, or ``shared`` for each of the ``resident`` programs on its SM.
    """
    rounds, rest = divmod(cdiv(tiles, limits.num_sms), resident)
    return rounds * max(alone, resident * shared) + (max(alone, rest * shared) if rest else 0)
