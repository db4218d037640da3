"""What ``compile_kernels.py`` compiles of grouped products and experts."""

from collections.abc import Iterator
from typing import Any

import torch

from qgemm.kernels import GPT_OSS, GatedActivation
from qgemm.kernels.gemm.config import GemmConfig, is_valid
from qgemm.kernels.gemm.hopper_kernels import block_layout
from qgemm.kernels.grouped import launcher as grouped
from qgemm.kernels.grouped.config import BY_ROWS, HOPPER, NARROW, WIDE
from qgemm.kernels.grouped.hopper_kernels import _grouped_hopper_kernel
from qgemm.kernels.grouped.kernels import _group_tiles_kernel, _grouped_gemm_kernel
from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.moe.kernels import (
    GATE_FUNCTIONS,
    _activate_kernel,
    _combine_kernel,
    _count_pairs_kernel,
    _place_pairs_kernel,
    _quantize_pairs_kernel,
    _quantize_tokens_kernel,
)
from qgemm.kernels.moe.launcher import LONGEST_WHOLE_ROW, row_blocks
from qgemm.kernels.quantize import launcher as quantize
from qgemm.numerics.formats import MIN_SCALE

Kernel = tuple[str, Any, dict[str, Any], GemmConfig | int]

POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
GROUPS = 256


def expert_kernels(limits: DeviceLimits) -> Iterator[Kernel]:
    """``(name, kernel, arguments, config or warps)`` of everything to compile for a device."""
    pdl = {"PDL": limits.pdl}
    early = {**pdl, "NEXT_EARLY": limits.pdl}
    yield from products(limits)
    tiles = {"offsets": "*i32", "tiles": "*i32", "T": "i32", "G": "i32", "GROUPS": GROUPS, "BLOCK_M": 64, **pdl}
    yield "experts group tiles", _group_tiles_kernel, tiles, 4
    chunks = {"ids": "*i64", "counts": "*i32", "P": "i32", "E": "i32", "CHUNK": 128, "GROUPS": GROUPS, **early}
    yield "experts count pairs", _count_pairs_kernel, chunks, 4
    places = {**chunks, "position": "*i32", "tiles": "*i32", "chunks": "i32", "BLOCK_M": 64}
    yield "experts place pairs", _place_pairs_kernel, places, 8
    vectors = {"y": "*bf16", "out": "*bf16", "position": "*i32", "weights": "*fp32"}
    yield "experts combine", _combine_kernel, {**vectors, "N": "i32", "TOP_K": 8, "BLOCK": 1024, **early}, 4
    bf16, fp32 = torch.bfloat16, torch.float32
    # A long row's code is there once for each of the top experts: two of them, since eight compile for seconds.
    for dtype, K, top_k in ((bf16, 7168, 8), (fp32, quantize.longest_whole_row(limits) // 4 + 1, 2)):
        arguments, warps = token_arguments(dtype, K, top_k, limits)
        yield f"experts quantize tokens {dtype} {K}", _quantize_tokens_kernel, {**arguments, **early}, warps
        routing = {"ids": "*i64", "tiles": "*i32", "P": "i32", "E": "i32"}
        routing |= {"PAIRS": 512, "GROUPS": GROUPS, "BLOCK_M": 16}
        arguments |= {**routing, **early}
        yield f"experts quantize pairs {dtype} {K}", _quantize_pairs_kernel, arguments, max(warps, 4)
    for dtype, K, activation in (
        (bf16, 768, GatedActivation("relu2", gated=False)),
        (bf16, 14_336, GPT_OSS),
        (torch.float16, LONGEST_WHOLE_ROW // 2, GatedActivation("gelu")),  # the longest that is kept in registers
        (fp32, LONGEST_WHOLE_ROW // 4 + 1, GatedActivation("gelu_tanh")),  # computed twice
    ):
        arguments, warps = activate_arguments(dtype, K, activation, limits)
        yield f"experts {activation.name} {dtype} {K}", _activate_kernel, {**arguments, **early}, warps


def products(limits: DeviceLimits) -> Iterator[Kernel]:
    """The grouped products of every config that is chosen."""
    if limits.hopper:
        yield "grouped hopper", _grouped_hopper_kernel, hopper_arguments(HOPPER), HOPPER
    lists = (NARROW, NARROW[1:], WIDE, *(configs for _, configs in BY_ROWS))
    chosen = [next(config for config in configs if is_valid(config, 1, limits)) for configs in lists]
    for config in dict.fromkeys(chosen):
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


def hopper_arguments(config: GemmConfig) -> dict[str, Any]:
    def tensor_map(element: str, rows: int, cols: int, dtype: torch.dtype) -> str:
        return f"tensordesc<{element}[{rows}, {cols}],{block_layout(rows, cols, dtype)!r}>"

    return {
        "A": tensor_map("i8", grouped.ROWS_AT_A_TIME, 128, torch.int8),
        "B": tensor_map("i8", config.block_n, 128, torch.int8),
        "out_map": tensor_map("bf16", config.block_m, config.block_n, torch.bfloat16),
        **{"out": "*bf16", "A_scale": "*fp32", "B_scale": "*fp32", "bias": "*bf16", "tiles": "*i32"},
        **{"N": "i32", "K": "i32"},
        **{"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k},
        **{"GROUP_SIZE_M": config.group_size_m, "NUM_SMS": 132, "NUM_STAGES": config.num_stages},
    }


def token_arguments(dtype: torch.dtype, K: int, top_k: int, limits: DeviceLimits) -> tuple[dict[str, Any], int]:
    longest = quantize.longest_whole_row(limits)
    block, blocks, threads = quantize.row_blocks(K, dtype.itemsize, longest, quantize.PART_OF_A_ROW)
    arguments = {
        **{"x": POINTERS[dtype], "q": "*i8", "q_scale": "*fp32", "position": "*i32"},
        **{"K": "i32", "stride_xm": "i32", "stride_xk": 1},
        **{"TOP_K": top_k, "MIN_SCALE": MIN_SCALE, "BLOCK": block, "BLOCKS": blocks},
    }
    return arguments, max(1, threads // limits.warp_size)


def activate_arguments(
    dtype: torch.dtype, K: int, activation: GatedActivation, limits: DeviceLimits
) -> tuple[dict[str, Any], int]:
    block, blocks, threads = row_blocks(K, dtype.itemsize)
    arguments = {
        **{"g": POINTERS[dtype], "q": "*i8", "q_scale": "*fp32", "tiles": "*i32", "K": "i32"},
        **{"FUNCTION": GATE_FUNCTIONS[activation.name], "GATED": activation.gated, "LIMIT": activation.limit},
        **{"ALPHA": activation.alpha, "UP_OFFSET": activation.up_offset, "MIN_SCALE": MIN_SCALE},
        **{"BLOCK": block, "BLOCKS": blocks},
    }
    return arguments, max(1, threads // limits.warp_size)
