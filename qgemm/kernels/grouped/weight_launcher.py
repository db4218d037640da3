"""Launches of grouped products with 4- and 8-bit weights, and the choice of their tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qgemm.kernels.grouped.config import rows_of_group
from qgemm.kernels.grouped.launcher import max_tiles
from qgemm.kernels.grouped.weight_kernels import _grouped_weight_kernel
from qgemm.kernels.launch.device import DeviceLimits, device_limits
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.stored_form import StoredForm
from qgemm.numerics.integers import cdiv


@dataclass(frozen=True)
class WeightConfig:
    """A tile of ``block_m`` rows of A by ``block_n`` rows of the weight, which are read ``piece`` bytes at a step."""

    block_m: int
    block_n: int
    piece: int
    num_warps: int
    num_stages: int
    group_size_m: int = 8

    def shared_memory(self, bits: int) -> int:
        """The bytes of shared memory that the pipeline's steps take."""
        return self.num_stages * self.piece * (self.block_n + self.block_m * 2 * (8 // bits))


# By the maximum number of rows of a group; the first config that fits is used.
BY_ROWS: tuple[tuple[float, tuple[WeightConfig, ...]], ...] = (
    (12, (WeightConfig(16, 64, 128, 4, 4), WeightConfig(16, 64, 64, 4, 2))),
    (40, (WeightConfig(32, 64, 128, 4, 3), WeightConfig(32, 64, 64, 4, 2))),
    (96, (WeightConfig(64, 128, 64, 4, 3), WeightConfig(64, 64, 64, 4, 2))),
    (float("inf"), (WeightConfig(128, 128, 32, 8, 4), WeightConfig(128, 64, 64, 4, 3), WeightConfig(64, 64, 64, 4, 2))),
)
# Two programs per SM: one unpacks while the other multiplies.
HOPPER = WeightConfig(128, 128, 32, 4, 4)


def select_weight_config(T: int, G: int, forms: Sequence[StoredForm], device: torch.device) -> WeightConfig:
    """The config for ``T`` rows that go to ``G`` groups at random, for weights of all these forms."""
    limits = device_limits(device)
    rows = rows_of_group(T, G)
    if limits.hopper and rows > BY_ROWS[-2][0]:
        return HOPPER
    configs = next(configs for most, configs in BY_ROWS if rows <= most)
    return next(config for config in configs if all(fits(config, form, limits) for form in forms))


def fits(config: WeightConfig, form: StoredForm, limits: DeviceLimits) -> bool:
    """Whether the device has enough shared memory for it, and threads enough registers for scales and zero points."""
    spills = form.float_zeros and form.bits == 4 and form.group == 16 and config.block_m > 16 and config.piece > 64
    return not spills and config.shared_memory(form.bits) <= limits.shared_memory


def weight_product_launch(
    T: int, G: int, N: int, K: int, form: StoredForm, config: WeightConfig, device: torch.device
) -> Launch:
    """The product of ``[T, K]`` and ``[G, N, K]``, for one dtype of each tensor.

    To be called with a, the weight, the output, scales, zero points, global scales, the bias, and the tiles.
    """
    pdl = device_limits(device).pdl
    grid = max_tiles(T, G, config.block_m) * cdiv(N, config.block_n)
    constants = (form, config, pdl)
    return Launch(_grouped_weight_kernel, grid, (N, K), constants, config.num_warps, config.num_stages, pdl)
