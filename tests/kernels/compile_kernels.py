"""Compiles every kernel for every target, without a GPU, and prints what came out as JSON.

A script of its own: ``test_compile.py`` runs it in a process without ``TRITON_INTERPRET``, since Triton reads that when
a kernel is defined. One JSON object per line: kernel, target, and counts of what the assembly holds.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from compile_experts import expert_kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from qgemm.kernels.gemm import hopper
from qgemm.kernels.gemm import launcher as gemm
from qgemm.kernels.gemm.config import CANDIDATES, GemmConfig, is_valid, programs_per_sm
from qgemm.kernels.gemm.hopper_kernels import _gemm_hopper_kernel, _quant_linear_hopper_kernel, block_layout
from qgemm.kernels.gemm.kernels import ACTIVATION_FUNCTIONS, _gemm_kernel, _gemm_streamk_kernel
from qgemm.kernels.launch.device import DeviceLimits, hopper_rows
from qgemm.kernels.linear import launcher as linear
from qgemm.kernels.linear.kernels import _quant_linear_kernel
from qgemm.kernels.quantize import launcher as quantize
from qgemm.kernels.quantize.kernels import _quantize_rows_asymmetric_kernel, _quantize_rows_kernel
from qgemm.numerics.formats import MIN_SCALE

TARGETS: dict[str, tuple[GPUTarget, DeviceLimits]] = {
    "sm_80": (GPUTarget("cuda", 80, 32), DeviceLimits(num_sms=108, shared_memory=166_912)),
    "sm_90": (
        GPUTarget("cuda", 90, 32),
        DeviceLimits(132, shared_memory=232_448, hopper=True, hopper_rows=hopper_rows(), pdl=True),
    ),
    "sm_100": (GPUTarget("cuda", 100, 32), DeviceLimits(148, shared_memory=232_448, pdl=True)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), DeviceLimits(304, shared_memory=65_536, warp_size=64, num_xcds=8)),
    "gfx950": (GPUTarget("hip", "gfx950", 64), DeviceLimits(256, shared_memory=163_840, warp_size=64, num_xcds=8)),
}
POINTERS = {
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}
INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "mma_sync": r"mma\.sync",
    "tcgen05": r"tcgen05\.mma",
    "mfma": r"v_mfma_",
    "cp_async_16": r"cp\.async\.cg\.shared\.global \[.*0x10",
    "cp_async_narrow": r"cp\.async\.ca\.shared\.global",
    "load_16": r"ld\.global\.v4\.b32",
    "tma_load": r"cp\.async\.bulk\.tensor\.\w+\.shared",
    "tma_store": r"cp\.async\.bulk\.tensor\.\w+\.global",
    "waits_for_previous": r"griddepcontrol\.wait",
    "packed_max": r"max\.[su]16x2",
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)


def gemm_arguments(
    config: GemmConfig,
    limits: DeviceLimits,
    dtype: torch.dtype,
    out: torch.dtype,
    *,
    scaled: bool = False,
    bias: bool = False,
    activation: str | None = None,
    even_k: bool = True,
    wide_strides: bool = False,
) -> dict[str, Any]:
    """Arguments as the launcher passes them: a type for a run-time value, a value for a compile-time one.

    The fast layout: K contiguous in both operands. ``wide_strides``: strides beyond 2^31.
    """
    stride = "i64" if wide_strides else "i32"
    arguments = {
        "A": POINTERS[dtype],
        "B": POINTERS[dtype],
        "C": POINTERS[out],
        "A_scale": "*fp32" if scaled else None,
        "B_scale": "*fp32" if scaled else None,
        "bias": "*bf16" if bias else None,
        **{"M": "i32", "N": "i32", "K": "i32"},
        **{
            "stride_am": stride,
            "stride_ak": 1,
            "stride_bk": 1,
            "stride_bn": stride,
            "stride_cm": stride,
            "stride_cn": 1,
        },
        **{"stride_a_scale": 1 if scaled else 0, "stride_b_scale": 1 if scaled else 0, "stride_bias": 1 if bias else 0},
        **{"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k},
        "GROUP_SIZE_M": config.group_size_m,
        "NUM_SMS": limits.num_sms * programs_per_sm(config, dtype.itemsize, limits),
        "NUM_XCDS": limits.num_xcds,
        "EVEN_K": even_k,
    }
    if config.schedule == "streamk":
        return {**arguments, "workspace": "*i32", "arrivals": "*i32", "STREAMK_TILES": arguments["NUM_SMS"]}
    return {
        **arguments,
        "QUANTIZED": not dtype.is_floating_point,
        "ALLOW_TF32": False,
        "ACTIVATION": ACTIVATION_FUNCTIONS[activation] if activation else None,
        "PERSISTENT": config.schedule != "tiles",
        "PDL": limits.pdl,
    }


def hopper_arguments(
    config: GemmConfig, limits: DeviceLimits, out: torch.dtype, part: int, columns: int = 1
) -> dict[str, Any]:
    """As ``gemm_arguments``. ``part``: how many rows of A are loaded at a time. ``columns``: ``columns_at_a_time``."""
    return {
        "A": tensor_map("i8", part, 128, torch.int8),
        "B": tensor_map("i8", config.widths[-1], 128, torch.int8),
        "C": tensor_map(POINTERS[out][1:], config.block_m, config.stored_columns, out),
        **{"A_scale": "*fp32", "B_scale": "*fp32", "bias": "*bf16"},
        **{"M": "i32", "N": "i32", "K": "i32"},
        **{"stride_a_scale": 1, "stride_b_scale": 1, "stride_bias": 1},
        **{"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "WIDTHS": config.widths},
        **{"GROUP_SIZE_M": config.group_size_m, "GROUP_SIZE_N": columns, "NUM_SMS": limits.num_sms},
        **{"NUM_STAGES": config.num_stages, "LAST_PARTS": 1},
        **{"CONSTANT_B": True, "NEXT_EARLY": programs_per_sm(config, 1, limits) > 1},
    }


def hopper_linear_arguments(
    config: GemmConfig, limits: DeviceLimits, dtype: torch.dtype, K: int, static: bool
) -> dict[str, Any]:
    """As ``hopper_arguments``, for rows of ``K`` values in ``dtype``."""
    arguments = hopper_arguments(config, limits, dtype, min(config.block_m, 16))
    for name in ("A_scale", "B_scale", "stride_a_scale", "CONSTANT_B"):
        del arguments[name]
    return {
        **arguments,
        "B": tensor_map("i8", hopper.weight_rows_at_a_time(config, min(config.block_m, 64)), 128, torch.int8),
        **{"x": POINTERS[dtype], "q": "*i8", "q_scale": "*fp32", "x_scale": "*fp32" if static else None},
        **{"b_scale": "*fp32", "counts": "*i32", "stride_xm": "i32", "stride_xk": 1},
        "ROW": (*hopper.row_blocks(config, K, limits), hopper.PATIENCE),
    }


def tensor_map(element: str, rows: int, cols: int, dtype: torch.dtype) -> str:
    """The type of a tensor map as Triton writes it."""
    return f"tensordesc<{element}[{rows}, {cols}],{block_layout(rows, cols, dtype)!r}>"


def quantize_arguments(dtype: torch.dtype, block: int, blocks: int, static: bool, pdl: bool) -> dict[str, Any]:
    return {
        "x_ptr": POINTERS[dtype],
        "q_ptr": "*i8",
        "row_scale_ptr": "*fp32",
        "scale_ptr": "*fp32" if static else None,
        **{"M": "i32", "K": "i32", "stride_xm": "i32", "stride_xk": 1},
        "MIN_SCALE": MIN_SCALE,
        "BLOCK": block,
        "BLOCKS": blocks,
        **{"PDL": pdl, "NEXT_EARLY": pdl},
    }


def linear_arguments(
    config: GemmConfig, limits: DeviceLimits, dtype: torch.dtype, K: int, static: bool
) -> dict[str, Any]:
    """As ``gemm_arguments``, for a row of ``K`` values in ``dtype``."""
    block, blocks = linear.row_blocks(K, config.num_warps * limits.warp_size)
    return {
        **{"x": POINTERS[dtype], "q": "*i8", "q_scale": "*fp32", "x_scale": "*fp32" if static else None},
        **{"B": "*i8", "C": POINTERS[dtype], "b_scale": "*fp32", "bias": "*bf16"},
        **{"N": "i32", "K": "i32", "part": "i32"},
        **{"stride_xk": 1, "stride_bk": 1, "stride_bn": "i32", "stride_b_scale": 1, "stride_bias": 1},
        **{"MIN_SCALE": MIN_SCALE, "ROW_BLOCK": block, "ROW_BLOCKS": blocks},
        **{"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k},
        **{"EVEN_K": K % config.block_k == 0, "PDL": limits.pdl},
    }


def kernels(target: str, limits: DeviceLimits) -> Iterator[tuple[str, Any, dict[str, Any], GemmConfig | int]]:
    """``(name, kernel, arguments, config or warps)`` of everything to compile for a target."""
    int8, bf16 = torch.int8, torch.bfloat16
    for index, config in enumerate(CANDIDATES):
        if not is_valid(config, 1, limits):
            continue
        label = f"{config.schedule} {config.block_m}x{config.block_n}x{config.block_k}"
        if config.schedule == "specialized":
            # A's blocks come whole or in parts: every other config has the one, those between the other.
            out, part = ((bf16, config.block_m), (torch.float16, max(8, config.block_m // 16)))[index % 2]
            yield f"hopper {label} {part}", _gemm_hopper_kernel, hopper_arguments(config, limits, out, part), config
            if config.block_m == 256:
                arguments = hopper_arguments(config, limits, out, part, hopper.COLUMNS_OF_LONG_PRODUCTS)
                yield f"hopper long {label}", _gemm_hopper_kernel, arguments, config
        else:
            kernel = _gemm_streamk_kernel if config.schedule == "streamk" else _gemm_kernel
            yield (
                f"scaled {label} {config.num_warps}",
                kernel,
                gemm_arguments(config, limits, int8, bf16, scaled=True, bias=True),
                config,
            )

    if limits.hopper:
        blocks = ((limits.hopper_rows, 32), (64, 80), (256, 128))
        few, mid, tall = (next(c for c in CANDIDATES if (c.block_m, c.block_n) == block) for block in blocks)
        # Rows that registers hold where programs share them, and the longest where not; longer ones are read twice.
        for config, dtype, K, static in (
            (few, bf16, 8192, False),
            (few, torch.float16, 8193, True),
            (mid, torch.float16, 32_768, False),
            (mid, bf16, 32_769, True),
            (tall, bf16, 32_768, False),
        ):
            label = f"linear hopper {config.block_m}x{config.block_n} {dtype} {K}".replace("torch.", "")
            arguments = hopper_linear_arguments(config, limits, dtype, K, static)
            yield label, _quant_linear_hopper_kernel, arguments, config

    config = GemmConfig(64, 64, 64, num_warps=4, num_stages=2)
    streamk = GemmConfig(64, 64, 64, num_warps=4, num_stages=2, schedule="streamk")
    yield "int32", _gemm_kernel, gemm_arguments(config, limits, int8, torch.int32), config
    yield "int32 ragged K", _gemm_kernel, gemm_arguments(config, limits, int8, torch.int32, even_k=False), config
    yield (
        "int32 wide strides",
        _gemm_kernel,
        gemm_arguments(config, limits, int8, torch.int32, wide_strides=True),
        config,
    )
    arguments = gemm_arguments(streamk, limits, int8, torch.int32, even_k=False)
    yield "int32 streamk ragged K", _gemm_streamk_kernel, arguments, streamk
    for dtype, activation in zip(FLOATS, ("relu", "gelu", None, "silu", None), strict=True):
        if (target, dtype) != ("sm_80", torch.float8_e4m3fn):  # NVIDIA has it from sm_89 on
            # Products of float32 that aren't rounded to TF32 run on no tensor core: a smaller tile.
            block = 32 if dtype == torch.float32 else 64
            config = GemmConfig(block, block, 64 // dtype.itemsize, num_warps=4, num_stages=2)
            out = bf16 if dtype.itemsize == 1 else dtype
            arguments = gemm_arguments(config, limits, dtype, out, bias=True, activation=activation)
            yield f"matmul {dtype}".replace("torch.", ""), _gemm_kernel, arguments, config
    longest = quantize.longest_whole_row(limits)
    for dtype, K, static in (
        (bf16, 4096, False),
        (bf16, 28_672, False),
        *(
            (dtype, longest // dtype.itemsize + more, static)
            for dtype in (torch.float16, bf16, torch.float32)
            for more in (0, 1)  # the most that is kept in registers; read twice
            for static in (False, True)
            # Only bfloat16 with its own scale has steps of its own: of float16, each of the four is in one of two.
            if dtype != torch.float16 or static == bool(more)
        ),
    ):
        block, blocks, threads = quantize.row_blocks(K, dtype.itemsize, longest, quantize.PART_OF_A_ROW)
        name = f"quantize_rows {K} {dtype} {'static' if static else 'dynamic'}".replace("torch.", "")
        arguments = quantize_arguments(dtype, block, blocks, static, limits.pdl)
        yield name, _quantize_rows_kernel, arguments, threads // limits.warp_size
        if static and dtype == bf16:
            del arguments["NEXT_EARLY"]
            name, arguments = name.replace("static", "asymmetric"), {**arguments, "zero_ptr": "*i8"}
            yield name, _quantize_rows_asymmetric_kernel, arguments, threads // limits.warp_size

    config = linear.FUSED_CONFIG
    if is_valid(config, 1, limits):
        # A static scale gives every dtype the same steps.
        for dtype, static in ((torch.float16, False), (bf16, False), (bf16, True), (torch.float32, False)):
            name = f"linear {config.block_n} {dtype} {'static' if static else 'dynamic'}"
            K = linear.LONGEST_FUSED_ROW // dtype.itemsize
            arguments = linear_arguments(config, limits, dtype, K, static)
            yield name.replace("torch.", ""), _quant_linear_kernel, arguments, config
    yield from expert_kernels(limits)


def compile_kernel(kernel: Any, arguments: dict[str, Any], config: GemmConfig | int, target: GPUTarget) -> Any:
    names = kernel.arg_names
    assert set(names) == set(arguments), set(names) ^ set(arguments)
    runtime = {name for name, value in arguments.items() if isinstance(value, str)}
    signature = {name: arguments[name] if name in runtime else "constexpr" for name in names}
    constants = {(names.index(name),): value for name, value in arguments.items() if name not in runtime}
    # What Triton finds out at a launch: pointers and sizes are multiples of 16. M is left out, as in the kernel.
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in runtime - {"M"}}
    options: dict[str, Any] = {"enable_fp_fusion": False}  # as Launch has it
    if isinstance(config, GemmConfig):
        options |= {
            "num_warps": config.num_warps,
            "num_stages": 1 if config.schedule == "specialized" else config.num_stages,
        }
        limits = next(limits for known, limits in TARGETS.values() if known == target)
        if kernel in (_gemm_hopper_kernel, _quant_linear_hopper_kernel):
            options["maxnreg"] = hopper.max_registers(config, limits, beside=kernel is _gemm_hopper_kernel)
        elif kernel in (_gemm_kernel, _gemm_streamk_kernel) and (registers := gemm.max_registers(limits)):
            options["maxnreg"] = registers
    else:
        options |= {"num_warps": config, "num_stages": 1}
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return triton.compile(source(kernel, signature, constants, aligned), target=target, options=options)


def barriers_in_staging(ptx: str, config: GemmConfig) -> int:
    """How many barriers of Hopper's kernels lie where tiles wait to be stored.

    Triton reuses the memory of a barrier that nobody waits for, but the copy engine may then read the barrier's state.
    """
    offsets = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    barriers = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", ptx)
    stores = re.findall(r"cp\.async\.bulk\.tensor\.\w+\.global\.shared::cta\.bulk_group \[.*\], \[(%r\d+)\]", ptx)
    assert barriers
    assert stores
    size = max(config.block_m, 64) * config.stored_columns * 2
    return sum(
        int(offsets[store]) <= int(offsets[barrier]) < int(offsets[store]) + size
        for barrier in set(barriers)
        for store in set(stores)
    )


def spilled(compiled: Any, target: GPUTarget) -> int:
    """Bytes of stack (NVIDIA) or spilled registers (AMD) that the machine code uses."""
    if target.backend == "hip":
        return sum(int(count) for count in re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"]))
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"STACK:(\d+)", usage)
    assert found, usage
    return sum(map(int, found))


def main() -> None:
    for name, (target, limits) in TARGETS.items():
        for label, kernel, arguments, config in kernels(name, limits):
            result: dict[str, Any] = {"target": name, "kernel": label}
            try:
                compiled = compile_kernel(kernel, arguments, config, target)
                assembly = compiled.asm["amdgcn" if target.backend == "hip" else "ptx"]
                result |= {key: len(re.findall(pattern, assembly)) for key, pattern in INSTRUCTIONS.items()}
                result |= {"spilled": spilled(compiled, target), "shared": compiled.metadata.shared}
                if isinstance(config, GemmConfig) and "hopper" in label:
                    result["barriers_in_staging"] = barriers_in_staging(assembly, config)
                if isinstance(config, GemmConfig):
                    result |= {"block_m": config.block_m, "stages": config.num_stages}
            except Exception as error:  # one failure must not hide the others
                result["error"] = f"{type(error).__name__}: {error}"
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.exit(main())
