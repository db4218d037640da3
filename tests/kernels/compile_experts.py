"""What ``compile_kernels.py`` compiles of grouped products and experts."""

from collections.abc import Iterator
from typing import Any

import torch

from qgemm.kernels import GPT_OSS, GatedActivation, grouped, quantize
from qgemm.kernels.config import CANDIDATES, DeviceLimits, GemmConfig, is_valid
from qgemm.kernels.experts_kernels import (
    GATE_FUNCTIONS,
    _activate_kernel,
    _combine_kernel,
    _count_pairs_kernel,
    _place_pairs_kernel,
    _quantize_pairs_kernel,
)
from qgemm.kernels.experts_launch import PART_OF_A_ROW
from qgemm.kernels.gated_activation import GATE_FUNCTIONS as GATES
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
    for dtype in POINTERS:
        name = str(dtype).removeprefix("torch.")
        for route in (False, True):
            for K in (2048, LONGEST // dtype.itemsize + 1):  # kept in registers; read twice
                arguments, warps = pairs_arguments(dtype, K, route, limits)
                yield f"experts quantize {name} {K} {route}", _quantize_pairs_kernel, {**arguments, **early}, warps
        for activation in (GPT_OSS, *map(GatedActivation, GATES), GatedActivation("relu2", gated=False)):
            for K in (768, 14336, LONGEST // dtype.itemsize + 1):
                arguments, warps = activate_arguments(dtype, K, activation, limits)
                label = f"experts {activation.name} {activation.alpha} {activation.gated} {name} {K}"
                yield label, _activate_kernel, {**arguments, **early}, warps
        pointer = POINTERS[dtype]
        vectors = {"y": pointer, "out": pointer, "position": "*i32", "weights": "*fp32"}
        yield f"experts combine {name}", _combine_kernel, {**vectors, "N": "i32", "TOP_K": 8, "BLOCK": 1024, **early}, 4


def products(limits: DeviceLimits) -> Iterator[Kernel]:
    """The grouped products of every config."""
    for config in CANDIDATES:
        if not is_valid(config, 1, limits) or config.schedule == "streamk":
            continue
        label = f"{config.schedule} {config.block_m}x{config.block_n}x{config.block_k}"
        if config.schedule == "specialized":
            yield f"grouped hopper {label}", _grouped_hopper_kernel, hopper_arguments(config, "*bf16"), config
            yield f"grouped hopper {label} plain", _grouped_hopper_kernel, hopper_arguments(config, None), config
        else:
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


def hopper_arguments(config: GemmConfig, bias: str | None) -> dict[str, Any]:
    def tensor_map(element: str, rows: int, cols: int, dtype: torch.dtype) -> str:
        return f"tensordesc<{element}[{rows}, {cols}],{block_layout(rows, cols, dtype)!r}>"

    return {
        "A": tensor_map("i8", grouped.ROWS_AT_A_TIME, 128, torch.int8),
        "B": tensor_map("i8", config.block_n, 128, torch.int8),
        "out_map": tensor_map("bf16", config.block_m, config.block_n, torch.bfloat16),
        **{"out": "*bf16", "A_scale": "*fp32", "B_scale": "*fp32", "bias": bias, "tiles": "*i32"},
        **{"N": "i32", "K": "i32"},
        **{"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k},
        **{"GROUP_SIZE_M": config.group_size_m, "NUM_SMS": 132, "NUM_STAGES": config.num_stages},
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
    block, blocks, threads = quantize.row_blocks(K, dtype.itemsize, LONGEST, PART_OF_A_ROW)
    arguments = {
        **{"g": POINTERS[dtype], "q": "*i8", "q_scale": "*fp32", "tiles": "*i32", "K": "i32"},
        **{"FUNCTION": GATE_FUNCTIONS[activation.name], "GATED": activation.gated, "LIMIT": activation.limit},
        **{"ALPHA": activation.alpha, "UP_OFFSET": activation.up_offset, "MIN_SCALE": MIN_SCALE},
        **{"BLOCK": block, "BLOCKS": blocks},
    }
    return arguments, max(1, threads // limits.warp_size)
