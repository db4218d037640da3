"""The tile shape and pipeline of a grouped product: a table by the number of rows of a group.

Only the device knows how many rows each group has, so the table assumes that rows are spread over the groups at random.
With few rows, a product is mainly a read of the weights of the groups that have any, and what counts is enough programs
with enough loads in flight. With more rows, blocks are as high as groups, except in Hopper's kernel, which multiplies
half of a block of 128 rows where that is enough. docs/performance/experts.md says how close to the best config the
choice is.
"""

from collections.abc import Sequence

import torch

from qgemm.kernels.gemm.config import BLOCK_SCALED, GemmConfig, is_valid
from qgemm.kernels.launch.device import DeviceLimits, device_limits
from qgemm.numerics.formats import FP8, INT8
from qgemm.numerics.integers import cdiv

MAX_NARROW_PROGRAMS_PER_SM = 6  # a product with at most this many blocks of 32 columns per SM uses them
# The number of rows of a group up to which its product is a read of weights.
MAX_ROWS_BY_MEMORY, MAX_ROWS_BY_MEMORY_ON_HOPPER = 16, 6

HOPPER = GemmConfig(128, 128, 128, num_warps=4, num_stages=6, schedule="specialized")
# fp8's sums take twice the registers: the tensor cores' own, and those to which they are added.
HOPPER_FP8 = GemmConfig(64, 128, 128, num_warps=4, num_stages=8, schedule="specialized")
# In order of preference; the first that fits in shared memory is used.
NARROW = (
    GemmConfig(16, 32, 256, num_warps=2, num_stages=6, schedule="tiles"),
    GemmConfig(16, 32, 128, num_warps=2, num_stages=6, schedule="tiles"),
    GemmConfig(16, 32, 64, num_warps=2, num_stages=2, schedule="tiles"),
)
WIDE = (
    GemmConfig(16, 128, 256, num_warps=4, num_stages=4, schedule="tiles"),
    GemmConfig(16, 64, 128, num_warps=4, num_stages=4, schedule="tiles"),
    GemmConfig(16, 32, 64, num_warps=2, num_stages=2, schedule="tiles"),
)
BY_ROWS: tuple[tuple[float, tuple[GemmConfig, ...]], ...] = (
    # The maximum number of rows of a group; all configs of an entry have blocks of one height.
    (
        48,
        (
            GemmConfig(32, 128, 128, num_warps=4, num_stages=4, schedule="tiles"),
            GemmConfig(32, 64, 128, num_warps=4, num_stages=3, schedule="tiles"),
        ),
    ),
    (
        160,
        (
            GemmConfig(64, 128, 128, num_warps=4, num_stages=4),
            GemmConfig(64, 64, 64, num_warps=4, num_stages=2),
        ),
    ),
    (
        float("inf"),
        (
            GemmConfig(128, 128, 128, num_warps=4, num_stages=3, schedule="tiles"),
            GemmConfig(128, 128, 128, num_warps=8, num_stages=3, schedule="tiles"),
            GemmConfig(128, 64, 64, num_warps=4, num_stages=3, schedule="tiles"),
        ),
    ),
)


def filled_groups(T: int, G: int) -> float:
    """How many of ``G`` groups have any of ``T`` rows that are spread at random."""
    return G * (1 - (1 - 1 / G) ** T)


def rows_of_group(T: int, G: int) -> float:
    """How many rows a group has on average, if it has any."""
    return T / filled_groups(T, G)


def select_grouped_config(
    T: int,
    G: int,
    N: int,
    K: int,
    device: torch.device,
    hopper: bool = True,
    dtype: torch.dtype = INT8.storage,
    blocks: bool = False,
) -> GemmConfig:
    """The config for a product of ``[T, K]`` and ``[G, N, K]`` of ``dtype`` on ``device``.

    Its ``block_m`` depends only on ``T``, ``G``, ``dtype``, ``blocks`` and the device. ``hopper``: whether layout and
    output allow Hopper's kernel where the device has it (``launcher.py`` says when). ``blocks``: whether scales are of
    blocks; a block of K then has one of them.
    """
    limits = device_limits(device)
    hopper = hopper and limits.hopper
    rows = rows_of_group(T, G)
    itemsize = 2 if dtype == FP8.storage and not limits.multiplies_fp8 else 1
    if hopper and rows > MAX_ROWS_BY_MEMORY_ON_HOPPER:
        return HOPPER if dtype == INT8.storage else HOPPER_FP8
    if blocks:
        configs = [config for config in BLOCK_SCALED if is_valid(config, itemsize, limits)]
        return next(config for config in configs if config.block_m >= rows or config is configs[-1])
    if hopper or rows <= MAX_ROWS_BY_MEMORY:
        narrow = filled_groups(T, G) * cdiv(N, 32) <= MAX_NARROW_PROGRAMS_PER_SM * limits.num_sms
        # A pipeline with 256 values per stage fills only if K is long.
        return _first_valid((NARROW[K < 2048 :] if narrow else WIDE), itemsize, limits)
    return next(_first_valid(configs, itemsize, limits) for most, configs in BY_ROWS if rows <= most)


def _first_valid(configs: Sequence[GemmConfig], itemsize: int, limits: DeviceLimits) -> GemmConfig:
    return next(config for config in configs if is_valid(config, itemsize, limits))
