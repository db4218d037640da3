"""Which tile shape and pipeline a GEMM runs with.

``select_config`` takes the cheapest entry of ``CANDIDATES`` by a model of one multiprocessor: a program needs, per
block of K, the longer of its multiply-adds at the tensor cores' rate and its operand bytes at the cache's rate;
programs that share a multiprocessor share both; a problem takes as many rounds as its tiles need. Nothing is timed, so
the answer is the same on every run. ``scaled_mm(..., config=...)`` and its siblings take any other ``GemmConfig``.

The rates are those of an H200 (int8: 4,096 multiply-adds a cycle; 64 bytes a cycle from L2). Only their ratio matters.
"""

import functools
from dataclasses import dataclass

import torch

MACS_PER_CYCLE = 4096  # of 1-byte operands; wider ones take proportionally longer
BYTES_PER_CYCLE = 64
ROUND_CYCLES = 2000  # filling the pipeline and storing a tile
STREAMK_CYCLES = 8000  # zeroing the workspace, the atomics, and reading it back


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
    GemmConfig(128, 64, 128, num_warps=4, num_stages=4),
    GemmConfig(64, 128, 128, num_warps=4, num_stages=4),
    GemmConfig(64, 64, 128, num_warps=4, num_stages=5),
    GemmConfig(64, 64, 128, num_warps=4, num_stages=5, streamk=True),
    GemmConfig(64, 32, 256, num_warps=4, num_stages=4),
    GemmConfig(32, 64, 256, num_warps=4, num_stages=4),
    GemmConfig(16, 128, 128, num_warps=4, num_stages=4),
    GemmConfig(16, 64, 256, num_warps=4, num_stages=4),
    GemmConfig(16, 32, 512, num_warps=2, num_stages=4),
    GemmConfig(16, 16, 512, num_warps=2, num_stages=6),
    GemmConfig(16, 64, 256, num_warps=4, num_stages=4, streamk=True),
    # The last resort of a device with little shared memory.
    GemmConfig(64, 64, 64, num_warps=4, num_stages=2),
    GemmConfig(16, 32, 64, num_warps=2, num_stages=2),
)


def is_valid(config: GemmConfig, itemsize: int, limits: DeviceLimits) -> bool:
    """Whether ``config`` can run on operands of ``itemsize`` bytes.

    Its blocks are powers of 2 that tensor cores take, its pipeline fits in shared memory, its accumulator in
    registers, and Stream-K has integers to add.
    """
    blocks = (config.block_m, config.block_n, config.block_k)
    return (
        all(block >= 16 and block & (block - 1) == 0 for block in blocks)
        and config.block_k * itemsize >= 32
        and config.shared_memory(itemsize) <= limits.shared_memory
        and config.block_m * config.block_n <= 128 * 32 * config.num_warps
        and (itemsize == 1 or not config.streamk)
    )


def programs_per_sm(config: GemmConfig, itemsize: int, limits: DeviceLimits) -> int:
    """How many programs fit on a multiprocessor at a time; at most 4, beyond which nothing is gained."""
    by_memory = limits.shared_memory // config.shared_memory(itemsize)
    by_threads = limits.max_threads // (config.num_warps * limits.warp_size)
    # Registers: the accumulator and about as much again, of 65,536.
    by_registers = 65_536 // (2 * config.block_m * config.block_n)
    return max(1, min(by_memory, by_threads, by_registers, 4))


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
    macs = config.block_m * config.block_n * config.block_k * itemsize
    # Below 64 rows the tensor cores' wide instructions don't apply.
    macs = macs if config.block_m >= 64 else macs * 2
    loads = (config.block_m + config.block_n) * config.block_k * itemsize
    block_cycles = max(macs / MACS_PER_CYCLE, loads / BYTES_PER_CYCLE)
    if config.streamk:
        per_sm = -(-tiles * blocks // limits.num_sms)
        return per_sm * block_cycles + ROUND_CYCLES + STREAMK_CYCLES
    per_sm = -(-tiles // limits.num_sms)
    rounds = -(-tiles // (limits.num_sms * resident))
    return per_sm * blocks * block_cycles + rounds * ROUND_CYCLES
