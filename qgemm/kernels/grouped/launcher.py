"""Launcher of ``grouped_mm`` on GPU tensors, CPU tensors in Triton's interpreter; experts use its launches, too."""

import torch
from torch import Tensor

from qgemm.kernels.gemm.config import GemmConfig, is_valid, programs_per_sm
from qgemm.kernels.gemm.launcher import has_hopper_kernel
from qgemm.kernels.grouped.config import select_grouped_config
from qgemm.kernels.grouped.kernels import ENTRY, _group_tiles_kernel, _grouped_gemm_kernel
from qgemm.kernels.launch.device import DeviceLimits, device_limits
from qgemm.kernels.launch.launch import ALIGNMENT, Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.launch.tensor_map import TensorMap
from qgemm.numerics.formats import FP8, INT8
from qgemm.numerics.integers import cdiv, next_power_of_2

ROWS_AT_A_TIME = 32  # of A, that TMA loads on Hopper


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: GemmConfig | None = None,
) -> Tensor:
    """``dispatch.grouped_mm`` on a GPU."""
    (T, K), (G, N, _) = a.shape, b.shape
    # Zeros, for rows beyond the last group.
    c = a.new_zeros((T, N), dtype=out_dtype)
    if not (c.numel() and G):
        return c
    a, offsets, a_scale, b_scale = (each.contiguous() for each in (a, offsets, a_scale, b_scale))
    bias = None if bias is None else bias.contiguous()
    aligned = (a.data_ptr() | b.data_ptr()) % ALIGNMENT == 0
    kind = (grouped_mm, T, G, N, K, out_dtype, None if bias is None else bias.dtype, a.device, aligned, config)
    plan: tuple[GemmConfig, Launch, Launch] | None = plans.get(kind)
    if plan is None:
        plan = plans.keep(kind, _make_plan(T, G, N, K, out_dtype, a.device, aligned, config))
    config, group_tiles, product = plan
    tiles = a.new_empty(table_size(T, G, config.block_m), dtype=torch.int32)
    group_tiles(offsets, tiles)
    product(a, b, *(c,) * outputs(config), a_scale, b_scale, bias, tiles)
    return c


def _make_plan(
    T: int, G: int, N: int, K: int, dtype: torch.dtype, device: torch.device, aligned: bool, config: GemmConfig | None
) -> tuple[GemmConfig, Launch, Launch]:
    hopper = aligned and takes_hopper_kernel(N, K, dtype, device)
    if config is None:
        config = select_grouped_config(T, G, N, K, device, hopper)
    elif not is_grouped(config, device_limits(device)):
        raise ValueError(f"config {config} can't run grouped products on {device}; omit it to have one chosen")
    elif config.schedule == "specialized" and not hopper:
        raise ValueError(
            f"config {config} takes addresses that are multiples of 16 bytes, K a multiple of 16, N of 8, and gives "
            "float16 or bfloat16; omit it to have one chosen"
        )
    group_tiles = group_tiles_launch(T, G, config.block_m, device)
    return config, group_tiles, product_launch(T, G, N, K, dtype, device, config)


def takes_hopper_kernel(N: int, K: int, out_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether Hopper's kernel can compute such grouped products if their operands are aligned."""
    limits = device_limits(device)
    return limits.hopper and out_dtype.itemsize == 2 and K % 16 == 0 and N % 8 == 0 and K > 0 and has_hopper_kernel()


def is_grouped(config: GemmConfig, limits: DeviceLimits) -> bool:
    """Whether ``config`` can run grouped products."""
    if config.schedule == "specialized" and (config.block_m < 64 or len(config.widths) > 1):
        return False
    return is_valid(config, 1, limits) and config.schedule != "streamk"


def max_tiles(rows: int, groups: int, block_m: int) -> int:
    """The maximum number of tiles of ``block_m`` rows, whatever the sizes of the groups are."""
    filled = min(rows, groups)
    return filled + (rows - filled) // block_m


def table_size(rows: int, groups: int, block_m: int) -> int:
    """The number of int32 values in the table for ``GroupTiles``."""
    entry: int = ENTRY.value
    return entry * (1 + max_tiles(rows, groups, block_m))


def outputs(config: GemmConfig) -> int:
    """How many times the output is passed to a product's launch: twice to Hopper's kernel, also as a tensor map."""
    return 2 if config.schedule == "specialized" else 1


def group_tiles_launch(T: int, G: int, block_m: int, device: torch.device) -> Launch:
    """The launch that writes the table of tiles. To be called with the offsets and the table."""
    pdl = device_limits(device).pdl
    return Launch(_group_tiles_kernel, 1, (T, G), (next_power_of_2(G), block_m, pdl), num_warps=4, pdl=pdl)


def product_launch(
    T: int,
    G: int,
    N: int,
    K: int,
    out_dtype: torch.dtype,
    device: torch.device,
    config: GemmConfig,
    dtype: torch.dtype = INT8.storage,
    blocks: bool = False,
) -> Launch:
    """The product of ``[T, K]`` and ``[G, N, K]`` of ``dtype``, for one dtype of the bias.

    ``blocks``: whether scales are of blocks. fp8 is passed as bytes, int8, where the device has no products of it. To
    be called with a, b, the output, ``outputs(config)`` times, ``a_scale``, ``b_scale``, the bias, and the tiles.
    """
    limits = device_limits(device)
    tiles = max_tiles(T, G, config.block_m) * cdiv(N, config.block_n)
    if config.schedule == "specialized":
        from qgemm.kernels.grouped.hopper_kernels import _grouped_hopper_kernel
        from qgemm.kernels.stages.ring import PANEL, block_layout

        rows, cols, part, panel = config.block_m, config.block_n, ROWS_AT_A_TIME, PANEL.value
        maps = {
            0: TensorMap((T, K), (K, 1), (part, panel), block_layout((part, panel), dtype)),
            1: TensorMap((G * N, K), (K, 1), (cols, panel), block_layout((cols, panel), dtype)),
            2: TensorMap((T, N), (N, 1), (rows, cols), block_layout((rows, cols), out_dtype)),
        }
        grid = min(tiles, limits.num_sms)  # a program takes all registers of an SM
        return Launch(
            _grouped_hopper_kernel, grid, (N, K), (config, grid, blocks), config.num_warps, pdl=True, maps=maps
        )
    persistent = config.schedule == "persistent"
    decodes = dtype == FP8.storage and not limits.multiplies_fp8
    constants = (
        config, K % config.block_k == 0, persistent, limits.pdl, dtype == INT8.storage, decodes, blocks,
    )  # fmt: skip
    slots = limits.num_sms * programs_per_sm(config, 1, limits)
    grid = min(tiles, slots) if persistent else tiles
    return Launch(_grouped_gemm_kernel, grid, (N, K), constants, config.num_warps, config.num_stages, limits.pdl)
