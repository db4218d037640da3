"""Compiles what the launchers launch, for every target and without a GPU, and prints what came out as JSON.

A script of its own: ``test_compile.py`` runs it in a process without ``TRITON_INTERPRET``, since Triton reads that when
a kernel is defined. One JSON object per line: the case, target, kernel, and counts of what the assembly holds.
"""

import ast
import functools
import gc
import importlib
import itertools
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from assumed_devices import CONSUMER, DEVICES, META, Case, Launched, assume, launches_of
from compile_attention import attention_cases
from compile_experts import expert_cases
from compile_rotary import rotary_cases
from compile_rows import row_cases
from compile_weight_only import weight_only_cases
from compile_weight_only_int8 import int8_cases
from machine_code import TOOLS, disassembled, overwritten_operands, unfinished_loads
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.language.semantic import TritonSemantic
from triton.runtime.jit import JITFunction

from qgemm.kernels.gemm import launcher as gemm
from qgemm.kernels.gemm.config import CANDIDATES, GemmConfig, for_operands, is_valid
from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.linear import launcher as linear
from qgemm.kernels.quantize import launcher as quantize

PROCESSES = 2  # that compile for a target each
# They get the kernels of sm_90, or what it gets that isn't Hopper's own: one case of each kernel and kind of call, and
# all that are compared.
ALIKE = ("sm_80", "sm_100", "gfx942", "gfx950")
COMPARED = ("rows sum", "matmul")
# All of these there, where the least shared memory is: their tiles depend on it.
BY_SHARED_MEMORY = {"gfx942": ("scaled", "grouped", "attention")}
INT8, HALF, BF16, FLOAT = torch.int8, torch.float16, torch.bfloat16, torch.float32
FP8 = torch.float8_e4m3fn
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
    "triggers_next": r"griddepcontrol\.launch_dependents",
    "wgmma_fence": r"wgmma\.fence",
}
# Of Hopper's own kernel: few rows, and the largest tiles. Others are rare.
USUAL_TILES = ((16, 64), (64, 80), (128, 192), (256, 128))
# Rows, columns and warps: few values of a thread, which it loads early, and as many as there are.
WITH_RESIDUAL = ((16, 80, 4), (64, 128, 4), (128, 128, 4), (128, 192, 8), (256, 128, 8))
FLOATS = (HALF, BF16, FLOAT, torch.float8_e4m3fn, torch.float8_e5m2)


def cases(target: str, limits: DeviceLimits) -> Iterator[Case]:
    """What to compile for a target: cases of every kernel, of Hopper's own most; with ``--complete`` all."""
    found = itertools.chain(
        scaled_products(limits),
        other_products(target),
        fp8_products(limits),
        quantizations(limits),
        layers(limits),
        expert_cases(limits),
        int8_cases(limits),
        attention_cases(),
        row_cases(),
        rotary_cases(),
        weight_only_cases(),
    )
    yield from found if "--complete" in sys.argv else chosen(found)


def chosen(found: Iterator[Case]) -> Iterator[Case]:
    """Of Hopper's own kernels all that aren't rare, and the first case of those whose labels begin with the same two
    words.
    """
    kinds = set()
    for case in found:
        if case.rare:
            continue
        words = case.label.split()
        kind = " ".join(words[:2])
        if kind == "rows sum":  # which are compared
            kind += words[-1]
        if kind == "fp8 blocks":  # whose machine code is read
            kind = case.label
        if kind not in kinds or "hopper" in words:
            kinds.add(kind)
            yield case


def matrix(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(rows, cols, dtype=dtype, device=META)


def vector(length: int, dtype: torch.dtype = FLOAT) -> Tensor:
    return torch.empty(length, dtype=dtype, device=META)


def scaled_mm(
    M: int, N: int, K: int, config: GemmConfig, out_dtype: torch.dtype = BF16, residual: bool = False
) -> None:
    a, weight, bias = matrix(M, K, INT8), matrix(N, K, INT8), vector(N, BF16)
    added = matrix(M, N, out_dtype) if residual else None
    gemm.scaled_mm(a, weight.t(), vector(M), vector(N), bias, out_dtype, config, True, added)


def scaled_products(limits: DeviceLimits) -> Iterator[Case]:
    """Every candidate that there is for the device, in the fast layout: K contiguous in both operands."""
    for index, config in enumerate(CANDIDATES):
        if not is_valid(config, 1, limits):
            continue
        label = f"{config.schedule} {config.block_m}x{config.block_n}x{config.block_k}"
        if config.groups > 1:
            label += " in turn"
        if config.schedule != "specialized":
            yield Case(f"scaled {label} {config.num_warps}", lambda c=config: scaled_mm(4096, 4096, 4096, c), config)
            if (config.block_m, config.block_n, config.num_warps) in WITH_RESIDUAL:
                label = f"scaled {label} {config.num_warps} residual"
                yield Case(label, lambda c=config: scaled_mm(4096, 4096, 4096, c, residual=True), config)
            continue
        # A's blocks come whole or in parts: every other config has the one, those between the other.
        whole = 16 * config.block_m
        M = (whole, 8 if config.block_m <= 64 else whole + 8)[index % 2]
        out = (BF16, HALF)[index % 2]
        rare = (config.block_m, config.block_n) not in USUAL_TILES
        yield Case(
            f"hopper {label} {M}", lambda c=config, m=M, o=out: scaled_mm(m, 1024, 1024, c, o), config, rare=rare
        )
        if (config.block_m, config.block_n, config.num_warps) in WITH_RESIDUAL:
            added, rare = f"hopper residual {label}", config.block_m in (64, 128)
            yield Case(added, lambda c=config: scaled_mm(1024, 1024, 1024, c, residual=True), config, rare=rare)
        if config.block_m == 256:
            yield Case(f"hopper long {label}", lambda c=config: scaled_mm(8192, 8192, 8192, c), config)


def other_products(target: str) -> Iterator[Case]:
    """Raw integers, sums and strides that aren't the usual ones, and products of floats."""
    config = GemmConfig(64, 64, 64, num_warps=4, num_stages=2)
    streamk = GemmConfig(64, 64, 64, num_warps=4, num_stages=2, schedule="streamk")

    def int_mm(K: int, stride: int, config: GemmConfig) -> None:
        a = torch.empty_strided((1024, K), (stride, 1), dtype=INT8, device=META)
        b = torch.empty_strided((K, 1024), (1, stride), dtype=INT8, device=META)
        gemm.int_mm(a, b, config)

    yield Case("int32", lambda: int_mm(1024, 1024, config), config)
    yield Case("int32 ragged K", lambda: int_mm(1040, 1040, config), config)
    yield Case("int32 wide strides", lambda: int_mm(1024, 1 << 32, config), config)
    yield Case("int32 streamk ragged K", lambda: int_mm(1040, 1040, streamk), streamk)

    def matmul(dtype: torch.dtype, activation: str | None, config: GemmConfig) -> None:
        a, b, out_dtype = matrix(1024, 1024, dtype), matrix(1024, 1024, dtype), BF16 if dtype.itemsize == 1 else dtype
        gemm.matmul(a, b.t(), vector(1024, BF16), activation, out_dtype, config)

    for dtype, activation in zip(FLOATS, ("relu", "gelu", None, "silu", None), strict=True):
        if target not in ("sm_80", "sm_86") or dtype != FP8:  # NVIDIA has it from sm_89 on
            # Products of float32 that aren't rounded to TF32 run on no tensor core: a smaller tile.
            block = 32 if dtype == FLOAT else 64
            each = GemmConfig(block, block, 64 // dtype.itemsize, num_warps=4, num_stages=2)
            yield Case(f"matmul {name_of(dtype)}", lambda d=dtype, f=activation, c=each: matmul(d, f, c), each)


def fp8_products(limits: DeviceLimits) -> Iterator[Case]:
    """With scales, of rows and of blocks, and residuals; of 16 bits on Hopper, where most are as those of int8.

    Tiles of 256 rows, and the larger layer of one launch, keep a residual's address on the stack: 8
    bytes. They are compiled without.
    """

    def product(M: int, blocks: bool, config: GemmConfig | None = None) -> None:
        a, weight, bias = matrix(M, 1024, FP8), matrix(1024, 1024, FP8), vector(1024, BF16)
        scales = (matrix(M, 8, FLOAT), matrix(8, 8, FLOAT)) if blocks else (vector(M), vector(1024))
        residual = matrix(M, 1024, BF16) if blocks else None
        gemm.scaled_mm(a, weight.t(), *scales, bias, BF16, config, True, residual)

    def layer(M: int, blocks: bool, N: int = 1024, K: int = 4096) -> None:
        scale = matrix(N // 128, K // 128, FLOAT) if blocks else vector(N)
        residual = matrix(M, N, BF16) if N < 3072 else None
        linear.quant_linear(matrix(M, K, BF16), matrix(N, K, FP8), scale, residual=residual, blocks=blocks)

    def half(config: GemmConfig) -> None:
        a, b = matrix(4096, 1024, HALF), matrix(1024, 1024, HALF)
        gemm.matmul(a, b.t(), None, "gelu", HALF, config)

    for blocks in (False, True):
        label = "fp8 blocks" if blocks else "fp8"
        for M in (16, 1024):
            yield Case(f"{label} layer {M}", lambda m=M, b=blocks: layer(m, b))
    if limits.hopper:
        # Where a group has fewest registers.
        yield Case("fp8 blocks layer of one launch 1024", lambda: layer(1024, True, 1536, 2048))
        yield Case("fp8 blocks layer of one launch 3072", lambda: layer(1024, True, 3072, 1024))
        for config in CANDIDATES:
            size = config.block_m, config.block_n
            if config.schedule == "specialized" and config.groups == 1 and size in ((256, 128), (128, 192)):
                promoted = for_operands(config, 1, promotes=True)
                label = "fp8 {}x{}".format(*size)
                rare = config.block_m < 256  # whose sums take fewer registers
                yield Case(label, lambda c=promoted: product(1024, False, c), promoted, rare=rare)
                if config.block_m < 256:  # which no product with an activation or scales of blocks takes
                    yield Case("fp8 blocks {}x{}".format(*size), lambda c=promoted: product(1024, True, c), promoted)
                    yield Case("matmul hopper {}x{}".format(*size), lambda c=config: half(c), config)


def quantizations(limits: DeviceLimits) -> Iterator[Case]:
    longest = quantize.max_row_bytes(limits)

    def quantize_rows(dtype: torch.dtype, K: int, static: bool, asymmetric: bool = False) -> None:
        zero_point = torch.empty((), dtype=INT8, device=META) if asymmetric else None
        quantize.quantize_rows(matrix(512, K, dtype), vector(1).view(()) if static else None, zero_point)

    for dtype, K, static in (
        (BF16, 4096, False),
        (BF16, 28_672, False),
        *(
            (dtype, longest // dtype.itemsize + more, static)
            for dtype in (HALF, BF16, FLOAT)
            for more in (0, 16)  # the most that is kept in registers; read twice
            for static in (False, True)
            # Only bfloat16 with its own scale has steps of its own: of float16, each of the four is in one of two.
            if dtype != HALF or static == bool(more)
        ),
    ):
        label = f"quantize_rows {K} {name_of(dtype)}"
        kind = "static" if static else "dynamic"
        yield Case(f"{label} {kind}", lambda d=dtype, k=K, s=static: quantize_rows(d, k, s))
        if static and dtype == BF16:
            yield Case(f"{label} asymmetric", lambda d=dtype, k=K: quantize_rows(d, k, True, asymmetric=True))
    # With a product to follow, which may start early.
    yield Case(
        "quantize_rows of a layer", lambda: quant_linear(48, 16_384, 8192, BF16), only=("_quantize_rows_kernel",)
    )


def quant_linear(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    static: bool = False,
    config: GemmConfig | None = None,
    residual: bool = False,
) -> None:
    added = matrix(M, N, dtype) if residual else None
    input_scale = vector(1).view(()) if static else None
    chosen = gemm.select_config
    if config is not None:
        gemm.select_config = lambda *problem: config
    linear.quant_linear(matrix(M, K, dtype), matrix(N, K, INT8), vector(N), vector(N, BF16), input_scale, added)
    gemm.select_config = chosen


def layers(limits: DeviceLimits) -> Iterator[Case]:
    """Layers of one launch."""
    if limits.hopper:
        blocks = ((limits.hopper_rows, 32), (64, 80), (256, 128))
        few, mid, tall = (next(c for c in CANDIDATES if (c.block_m, c.block_n) == block) for block in blocks)
        # Rows that registers hold where programs share them, and the longest where not; longer ones are read twice.
        for config, M, dtype, K, static in (
            (few, 16, BF16, 8192, False),
            (few, 16, HALF, 8208, True),
            (mid, 16, HALF, 32_768, False),
            (mid, 16, BF16, 32_784, True),
            (tall, 48, BF16, 32_768, False),
        ):
            label = f"linear hopper {config.block_m}x{config.block_n} {name_of(dtype)} {K}"
            for residual in (False, True) if config is not tall and not static else (False,):
                yield Case(
                    f"{label} residual" if residual else label,
                    lambda c=config, m=M, d=dtype, k=K, s=static, r=residual: quant_linear(m, 1024, k, d, s, c, r),
                    config,
                    only=("_quant_linear_hopper_kernel",),
                    rare=residual if config is mid else config is few and not residual,
                )
    config = linear.FUSED_CONFIG
    if is_valid(config, 1, limits):
        # Hopper's own kernel stores 8 columns at a time.
        N = 1020 if limits.hopper else 1024
        # A static scale gives every dtype the same steps.
        for dtype, static in ((HALF, False), (BF16, False), (BF16, True), (FLOAT, False)):
            label = f"linear {config.block_n} {name_of(dtype)} {'static' if static else 'dynamic'}"
            K = linear.MAX_FUSED_ROW_BYTES // dtype.itemsize
            yield Case(
                label,
                lambda d=dtype, k=K, s=static: quant_linear(1, N, k, d, s),
                config,
                only=("_quant_linear_kernel",),
            )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def barriers_in_staging(ptx: str, config: GemmConfig) -> int:
    """How many barriers of Hopper's kernels lie where tiles wait to be stored.

    Triton reuses the memory of a barrier that nobody waits for, but the copy engine may then read the barrier's state.
    """
    offsets = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    barriers = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", ptx)
    stores = re.findall(r"cp\.async\.bulk\.tensor\.\w+\.global\.shared::cta\.bulk_group \[.*\], \[(%r\d+)\]", ptx)
    assert barriers
    assert stores
    size = max(config.stored_rows, 64) * config.stored_columns * 2
    return sum(
        int(offsets[store]) <= int(offsets[barrier]) < int(offsets[store]) + size
        for barrier in set(barriers)
        for store in set(stores)
    )


def layouts_of_sums(ttgir: str) -> list[str]:
    """How what is reduced to a float32 number is spread over threads."""
    layouts = dict(re.findall(r"(#\w+) = (#ttg\.\w+<.*>)", ttgir))
    found = re.findall(r"\}\) : \(tensor<\w+xf32, (#\w+)>\) -> f32", ttgir)
    return sorted({layouts[name] for name in found})


def spilled(compiled: Any, target: GPUTarget) -> int:
    """Bytes of stack (NVIDIA) or spilled registers (AMD) that the machine code uses."""
    if target.backend == "hip":
        return sum(int(count) for count in re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"]))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"STACK:(\d+)", usage)
    assert found, usage
    return sum(map(int, found))


def results(name: str) -> list[dict[str, Any]]:
    """What came out for a target. In a process of its own."""
    device = DEVICES[name]
    assume(device)
    found, seen = [], set()
    for case in cases(name, device.limits):
        result: dict[str, Any] = {"target": name, "case": case.label}
        try:
            launched = launches_of(case)
            if not launched:
                result["error"] = "launches nothing of what it should"
        except Exception as error:  # one failure must not hide the others
            launched = []
            result["error"] = f"{type(error).__name__}: {error}"
        if not launched:
            found.append(result)
        for each in launched:
            every = COMPARED + BY_SHARED_MEMORY.get(name, ())
            kind = case.label if case.label.startswith(every) else case.label.split()[0]
            if name not in ALIKE or "--complete" in sys.argv or (kind, each.kernel) not in seen:
                what = measured(each, case.config, device.target)
                found.append({**result, "kernel": each.kernel, **what})
            seen.add((kind, each.kernel))
    read_machine_code(found)
    return found


def measured(launched: Launched, config: GemmConfig | None, target: GPUTarget) -> dict[str, Any]:
    """Of the assembly of a launch; with its machine code, if that is to be read."""
    try:
        compiled = launched.compile()
        assembly = compiled.asm["amdgcn" if target.backend == "hip" else "ptx"]
        result = {key: len(re.findall(pattern, assembly)) for key, pattern in INSTRUCTIONS.items()}
        result |= {"spilled": spilled(compiled, target), "shared": compiled.metadata.shared}
        result["stages"] = compiled.metadata.num_stages
        result["sums"] = layouts_of_sums(compiled.asm["ttgir"])
        if target.arch == 90 and "mbarrier.arrive.shared" in assembly:
            result["cubin"] = compiled.asm["cubin"]
        if config is not None and "hopper" in launched.kernel:
            result["barriers_in_staging"] = barriers_in_staging(assembly, config)
        if config is not None:
            result["block_m"] = config.block_m
    except Exception as error:  # as above
        return {"error": f"{type(error).__name__}: {error}"}
    return result


def read_machine_code(found: list[dict[str, Any]]) -> None:
    """Puts in place of machine code what it says."""
    kept = [result for result in found if "cubin" in result]
    for result, sass in zip(kept, disassembled([result.pop("cubin") for result in kept]), strict=True):
        try:
            if result["case"].startswith("fp8") and "hopper" in result["kernel"]:
                # Whether the assembler has warps wait for products between those that are to be computed at once.
                result["waits_more"] = sass.count("WARPGROUP.ARRIVE") > result["wgmma_fence"]
            result["unfinished_loads"] = unfinished_loads(sass)
            if result["wgmma"]:
                result["overwritten_operands"] = overwritten_operands(sass)
        except Exception as error:  # as above
            result["error"] = f"{type(error).__name__}: {error}"


def make_fast() -> None:
    """Leaves out what Triton does for nothing, 5 to 10 % of the time for gfx950: the code that comes out is the same.

    It parses a device function at each of its calls, and at each sum or product it makes code that asks whether that
    overflows, which it then drops, since ``debug`` is off.
    """
    parsed = functools.cache(ast.parse)
    JITFunction.parse = lambda self: parsed(self.src)
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *operands: None


def main() -> None:
    make_fast()
    importlib.import_module("torch._dynamo")  # which tensors of META need: once, and not in each process
    gc.disable()  # each process ends soon, and to look for garbage takes a tenth of the time
    targets = [name for name in DEVICES if name not in CONSUMER or "--complete" in sys.argv]
    with multiprocessing.get_context("fork").Pool(PROCESSES, maxtasksperchild=1) as pool:
        for found in pool.imap(results, targets, chunksize=1):
            for result in found:
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.exit(main())
