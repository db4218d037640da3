"""Which tile shape and pipeline a GEMM runs with.

``select_config`` takes the entry of ``CANDIDATES`` that a model of the device finds cheapest. Per block of K, a program
needs the longest of: its loads' latency, shared by the stages in flight; its own chain of load and multiply; and, with
the programs that share its multiprocessor, their multiply-adds at the tensor cores' rate or their operand bytes at the
cache's. A problem takes as many rounds as its tiles need, and no less than its bytes at the memory's rate. Nothing is
timed, so the answer is the same on every run. ``scaled_mm(..., config=...)`` and its siblings take any other
``GemmConfig``.

The constants are cycles and bytes per cycle of one multiprocessor, fitted to 154 timings on an H200 (45 shapes, M from
1 to 4,096, the configs that made sense for each). Only their ratios matter, so other devices get a sensible, if less
exact, answer.
"""

import functools
from dataclasses import dataclass

import torch

_MACS = 4096  # multiply-adds of 1-byte operands
_NARROW = 4.2  # how much slower the tensor cores are on blocks of fewer than 64 rows
_CACHE_BYTES = 57.6
_MEMORY_BYTES = 18.6
_MEMORY_LATENCY = 1710.0
_BLOCK_LATENCY = 200.0
_BLOCK_LATENCY_PER_MAC_CYCLE = 0.32
_BLOCK_LATENCY_BYTES = 87.3
_OVERLAP_LOSS = 0.34  # of the shorter of computing and reading memory
_STREAMK_LATENCY = 9300.0  # zeroing the workspace, and the last arrival's wait
_STREAMK_ATOMICS = 0.7


@dataclass(frozen=True)
class GemmConfig:
    """Tile shape and pipeline of one GEMM kernel variant.

    ``block_k`` counts elements. ``streamk`` cuts the sum over K between programs: int8 only.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_size_m: int = 8
    streamk: bool = False

    def shared_memory(self, itemsize: int) -> int:
        """Bytes of shared memory that the pipeline holds for operands of ``itemsize`` bytes."""
        return self.num_stages * (self.block_m + self.block_n) * self.block_k * itemsize


@dataclass(frozen=True)
class DeviceLimits:
    """What bounds a kernel on one device: counts and bytes, per multiprocessor (compute unit on AMD)."""

    num_sms: int
    shared_memory: int
    max_threads: int = 2048
    warp_size: int = 32
    num_xcds: int = 1


INTERPRETER = DeviceLimits(num_sms=4, shared_memory=232_448)
"""Stands for a device where kernels are interpreted on the CPU."""

_CUS_PER_XCD = {"gfx942": 38, "gfx950": 32}


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a CUDA or ROCm device, read from the driver once."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    num_sms = properties.multi_processor_count
    chip = getattr(properties, "gcnArchName", "").split(":")[0]
    return DeviceLimits(
        num_sms=num_sms,
        shared_memory=getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
        max_threads=properties.max_threads_per_multi_processor,
        warp_size=properties.warp_size,
        num_xcds=max(1, num_sms // _CUS_PER_XCD[chip]) if chip in _CUS_PER_XCD else 1,
    )


# For 1-byte operands; wider ones get fewer elements along K in the same bytes.
CANDIDATES: tuple[GemmConfig, ...] = (
    GemmConfig(128, 128, 128, num_warps=4, num_stages=3, group_size_m=16),
    GemmConfig(64, 128, 128, num_warps=4, num_stages=4),
    GemmConfig(128, 64, 128, num_warps=4, num_stages=4),
    GemmConfig(64, 64, 128, num_warps=4, num_stages=5),
    GemmConfig(64, 32, 256, num_warps=4, num_stages=4),
    GemmConfig(32, 128, 128, num_warps=4, num_stages=4),
    GemmConfig(32, 64, 256, num_warps=4, num_stages=4),
    GemmConfig(32, 32, 512, num_warps=4, num_stages=4),
    GemmConfig(16, 128, 128, num_warps=4, num_stages=4),
    GemmConfig(16, 64, 256, num_warps=4, num_stages=4),
    GemmConfig(16, 32, 512, num_warps=2, num_stages=4),
    GemmConfig(16, 16, 512, num_warps=2, num_stages=6),
    GemmConfig(64, 64, 128, num_warps=4, num_stages=5, streamk=True),
    GemmConfig(16, 64, 256, num_warps=4, num_stages=4, streamk=True),
    # For devices with little shared memory.
    GemmConfig(64, 64, 64, num_warps=4, num_stages=2),
    GemmConfig(16, 32, 64, num_warps=2, num_stages=2),
)


def is_valid(config: GemmConfig, itemsize: int, limits: DeviceLimits) -> bool:
    """Whether ``config`` can run on operands of ``itemsize`` bytes.

    Its blocks are powers of 2 that tensor cores take, as many warps as a program may have, its pipeline fits in shared
    memory, its accumulator in registers, and Stream-K has integers to add.
    """
    blocks = (config.block_m, config.block_n, config.block_k)
    return (
        all(block >= 16 and block & (block - 1) == 0 for block in blocks)
        and config.num_warps in (1, 2, 4, 8, 16)
        and config.num_stages >= 1
        and config.group_size_m >= 1
        and config.block_k * itemsize >= 32
        and config.shared_memory(itemsize) <= limits.shared_memory
        and config.block_m * config.block_n <= 128 * 32 * config.num_warps
        and (itemsize == 1 or not config.streamk)
    )


@functools.cache
def programs_per_sm(config: GemmConfig, itemsize: int, limits: DeviceLimits) -> int:
    """How many programs are resident on a multiprocessor at a time; at most 8."""
    threads = config.num_warps * limits.warp_size
    by_memory = limits.shared_memory // (config.shared_memory(itemsize) + 1024)
    # The accumulator, half as much for the epilogue, and 40 registers a thread for the rest.
    by_registers = 65_536 // (3 * config.block_m * config.block_n // 2 + threads * 40)
    return max(1, min(by_memory, by_registers, limits.max_threads // threads, 8))


@functools.lru_cache(maxsize=4096)
def select_config(M: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> GemmConfig:
    """The config for ``[M, K] @ [K, N]`` of ``dtype`` operands on ``device``."""
    limits = device_limits(device)
    configs = [_for_itemsize(config, dtype.itemsize) for config in CANDIDATES]
    return min(
        (
            config
            for config in configs
            if is_valid(config, dtype.itemsize, limits) and (dtype == torch.int8 or not config.streamk)
        ),
        key=lambda config: _cycles(config, M, N, K, dtype.itemsize, limits),
    )


def _for_itemsize(config: GemmConfig, itemsize: int) -> GemmConfig:
    fields = {**vars(config), "block_k": max(config.block_k // itemsize, 16)}
    return GemmConfig(**fields)


def _cycles(config: GemmConfig, M: int, N: int, K: int, itemsize: int, limits: DeviceLimits) -> float:
    tiles = -(-M // config.block_m) * -(-N // config.block_n)
    blocks = max(1, -(-K // config.block_k))
    resident = programs_per_sm(config, itemsize, limits)

    loads = (config.block_m + config.block_n) * config.block_k * itemsize
    macs = config.block_m * config.block_n * config.block_k * itemsize / _MACS
    if config.block_m < 64:
        macs *= _NARROW
    shared = max(macs, loads / _CACHE_BYTES)
    alone = max(
        _MEMORY_LATENCY / max(config.num_stages - 1, 1),
        _BLOCK_LATENCY + _BLOCK_LATENCY_PER_MAC_CYCLE * macs + loads / _BLOCK_LATENCY_BYTES,
    )

    if config.streamk:
        programs = limits.num_sms * resident
        compute = -(-tiles * blocks // programs) * max(alone, resident * shared)
        compute += _STREAMK_LATENCY + resident * config.block_m * config.block_n / _STREAMK_ATOMICS
    else:
        rounds, rest = divmod(-(-tiles // limits.num_sms), resident)
        compute = blocks * rounds * max(alone, resident * shared)
        compute += blocks * max(alone, rest * shared) if rest else 0
    memory = ((M + N) * K * itemsize + 2 * M * N) / (_MEMORY_BYTES * limits.num_sms)
    return max(compute, memory) + _OVERLAP_LOSS * min(compute, memory)
