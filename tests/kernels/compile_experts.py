"""What ``compile_kernels.py`` compiles of grouped products and experts."""

from collections.abc import Iterator
from typing import Any

import torch

from qgemm.kernels import GPT_OSS, GatedActivation, grouped, quantize
from qgemm.kernels.config import CANDIDATES, DeviceLimits, GemmConfig, is_valid
from qgemm.kernels.experts_kernels import (
    _activate_kernel,
    _combine_kernel,
    _count_pairs_kernel,
    _place_pairs_kernel,
    _quantize_pairs_kernel,
)
from qgemm.kernels.experts_launch import LONGEST_WHOLE_ROW, PART_OF_A_ROW
from qgemm.kernels.gated_activation_kernels import GATE_FUNCTIONS
from qgemm.kernels.grouped_hopper_kernels import _grouped_hopper_kernel
from qgemm.kernels.grouped_kernels import _group_tiles_kernel, _grouped_gemm_kernel
from qgemm.kernels.hopper_kernels import block_layout
from qgemm.kernels.reference import MIN_SCALE

Kernel = tuple[str, Any, dict[str, Any], GemmConfig | int]

POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
GROUPS = 256
LONGEST = quantize.LONGEST_WHOLE_ROW


def expert_kernels(limits: DeviceLimits) -> Iterator[Kernel]:
    """``(name, kernel, arguments, config or warps)`` of everything to compile for a device."""
    pdl = {"PDL": limits.pdl}
    early = {**pdl, "NEXT_EARLY": limits.pdl}
    yield from products(limits)
    tiles = {"offsets": "*i32", "tiles": "*i32", "T": "i32", "G": "i32", "GROUPS": GROUPS, "BLOCK_M": 64, **pdl}
    yield "experts group tiles", _group_tiles_kernel, tiles, 4
    chunks = {"ids": "*i64", "counts": "*i32", "P": "i32", "E": "i32", "CHUNK": 256, "GROUPS": GROUPS, **early}
    yield "experts count pairs", _count_pairs_kernel, chunks, 4
    places = {**chunks, "position": "*i32", "tiles": "*i32", "BLOCK_M": 64}
    yield "experts place pairs", _place_pairs_kernel, places, 8
    vectors = {"y": "*bf16", "out": "*bf16", "position": "*i32", "weights": "*fp32"}
    yield "experts combine", _combine_kernel, {**vectors, "N": "i32", "TOP_K": 8, "BLOCK": 1024, **early}, 4
    bf16, fp32 = torch.bfloat16, torch.float32
    for dtype, K, route in ((bf16, 2048, True), (bf16, 7168, False), (fp32, LONGEST // 4 + 1, True)):
        arguments, warps = pairs_arguments(dtype, K, route, limits)
        yield f"experts quantize {dtype} {K}", _quantize_pairs_kernel, {**arguments, **early}, warps
    for dtype, K, activation in (
        (bf16, 768, GatedActivation()),
        (bf16, 14_336, GPT_OSS),
        (torch.float16, LONGEST_WHOLE_ROW // 2, GatedActivation("gelu")),  # the longest that is kept in registers
        (fp32, LONGEST_WHOLE_ROW // 4 + 1, GatedActivation("gelu_tanh")),  # computed twice
        (bf16, 4096, GatedActivation("relu2", gated=False)),
    ):
        arguments, warps = activate_arguments(dtype, K, activation, limits)
        yield f"experts {activation.name} {dtype} {K}", _activate_kernel, {**arguments, **early}, warps


def products(limits: DeviceLimits) -> Iterator[Kernel]:
    """The grouped products: every config of Hopper's kernel, some of the one that ``_gemm_kernel`` is like."""
    for config in CANDIDATES:
        label = f"{config.block_m}x{config.block_n}x{config.block_k}"
        if config.schedule == "specialized" and is_valid(config, 1, limits):
            for activation in (None, GPT_OSS):
                arguments = hopper_arguments(config, activation)
                yield f"grouped hopper {label} {activation}", _grouped_hopper_kernel, arguments, config
    for config in (
        GemmConfig(128, 128, 128, num_warps=4, num_stages=3),
        GemmConfig(64, 64, 128, num_warps=4, num_stages=5),
        GemmConfig(16, 32, 512, num_warps=4, num_stages=6, schedule="tiles"),
        GemmConfig(16, 32, 64, num_warps=2, num_stages=2, schedule="tiles"),
    ):
        if is_valid(config, 1, limits):
            label = f"{config.schedule} {config.block_m}x{config.block_n}x{config.block_k}"
            yield f"grouped {label}", _grouped_gemm_kernel, grouped_arguments(config, limits, True), config
    config = GemmConfig(64, 64, 64, num_warps=4, num_stages=2)
    yield "grouped ragged K", _grouped_gemm_kernel, grouped_arguments(config, limits, False), config


def grouped_arguments(config: GemmConfig, limits: DeviceLimits, even_k: bool) -> dict[str, Any]:
    return {
        **{"A": "*i8", "B": "*i8", "C": "*bf16", "A_scale": "*fp32", "B_scale": "*fp32", "bias": "*bf16"},
        **{"tiles": "*i32", "N": "i32", "K": "i32"},
        **{"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k},
        **{"GROUP_SIZE_M": config.group_size_m, "EVEN_K": even_k, "PERSISTENT": config.schedule == "persistent"},
        "PDL": limits.pdl,
    }


def hopper_arguments(config: GemmConfig, activation: GatedActivation | None) -> dict[str, Any]:
    def tensor_map(element: str, rows: int, cols: int, dtype: torch.dtype) -> str:
        return f"tensordesc<{element}[{rows}, {cols}],{block_layout(rows, cols, dtype)!r}>"

    halves = 2 if activation is not None and activation.gated else 1
    block_n = config.block_n // halves
    function, limit, alpha, up_offset = grouped.activation_constants(activation)
    return {
        "A": tensor_map("i8", grouped.ROWS_AT_A_TIME, 128, torch.int8),
        "B": tensor_map("i8", block_n, 128, torch.int8),
        "out_map": tensor_map("bf16", config.block_m, block_n, torch.bfloat16),
        **{"out": "*bf16", "A_scale": "*fp32", "B_scale": "*fp32", "bias": "*bf16", "tiles": "*i32"},
        **{"N": "i32", "K": "i32"},
        **{"BLOCK_M": config.block_m, "BLOCK_N": block_n, "BLOCK_K": config.block_k},
        **{"GROUP_SIZE_M": config.group_size_m, "NUM_SMS": 132, "NUM_STAGES": config.num_stages, "HALVES": halves},
        **{"FUNCTION": function, "LIMIT": limit, "ALPHA": alpha, "UP_OFFSET": up_offset},
    }


def pairs_arguments(dtype: torch.dtype, K: int, route: bool, limits: DeviceLimits) -> tuple[dict[str, Any], int]:
    block, blocks, threads = quantize.row_blocks(K, dtype.itemsize, LONGEST, quantize.PART_OF_A_ROW)
    warps = max(1, threads // limits.warp_size)
    arguments = {
        **{"x": POINTERS[dtype], "ids": "*i64", "q": "*i8", "q_scale": "*fp32", "position": "*i32", "tiles": "*i32"},
        **{"P": "i32", "E": "i32", "K": "i32", "stride_xm": "i32", "stride_xk": 1},
        **{"TOP_K": 8, "MIN_SCALE": MIN_SCALE, "BLOCK": block, "BLOCKS": blocks},
        **{"ROUTE": route, "PAIRS": 1024, "GROUPS": GROUPS, "BLOCK_M": 16},
    }
    return arguments, max(warps, 4) if route else warps


def activate_arguments(
    dtype: torch.dtype, K: int, activation: GatedActivation, limits: DeviceLimits
) -> tuple[dict[str, Any], int]:
    block, blocks, threads = quantize.row_blocks(K, dtype.itemsize, LONGEST_WHOLE_ROW, PART_OF_A_ROW)
    arguments = {
        **{"g": POINTERS[dtype], "q": "*i8", "q_scale": "*fp32", "tiles": "*i32", "K": "i32"},
        **{"FUNCTION": GATE_FUNCTIONS[activation.name], "GATED": activation.gated, "LIMIT": activation.limit},
        **{"ALPHA": activation.alpha, "UP_OFFSET": activation.up_offset, "MIN_SCALE": MIN_SCALE},
        **{"BLOCK": block, "BLOCKS": blocks},
    }
    return arguments, max(1, threads // limits.warp_size)
