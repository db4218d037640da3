"""What ``compile_kernels.py`` compiles of int4 weights by int8 rows."""

from collections.abc import Iterator

import torch
from assumed_devices import META, Case

from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.quantized_weight import QuantizedWeight
from qgemm.kernels.weight_only import int8_launcher
from qgemm.kernels.weight_only.int8_config import select_config

PRODUCTS = ("_int4_int8_kernel", "_int4_int8_few_kernel", "_int4_int8_many_kernel")
LAYERS = ("_int4_int8_layer_kernel", "_int4_int8_row_kernel", "_int4_int8_many_layer_kernel")


def int8_cases(limits: DeviceLimits) -> Iterator[Case]:
    """The kernel for every GPU; each kind of Hopper's, with and without zero points."""
    for M, K, size, asymmetric in (
        (1, 1024, 128, False),
        (64, 1008, 48, True),
        (64, 4096, 4096, True),
        (5, 1000, 10, True),
    ):
        kind = f"w4a8 tiles {M} {size}"
        yield Case(kind, lambda m=M, k=K, s=size, z=asymmetric: layer(m, 1020, k, s, z), only=PRODUCTS)
    if not limits.hopper:
        return
    # Few rows; partial sums; small groups, which take the most registers; whole rows.
    for M, N, size, asymmetric, rare in (
        (16, 4096, 128, False, True),
        (8, 28_672, 64, True, False),
        (32, 4096, 32, True, False),
        (64, 4096, 128, True, True),
        (64, 28_672, 4096, True, False),
        (4096, 4096, 128, False, True),
        (4096, 4096, 4096, False, True),
    ):
        config = select_config(M, N, 4096, size % 4096, limits)
        kind = f"w4a8 hopper {config.rows}x{config.cols} {M} {size} of {config.shared_memory()}"
        yield Case(kind, lambda m=M, n=N, s=size, z=asymmetric: layer(m, n, 4096, s, z), only=PRODUCTS, rare=rare)
    for M, size, rare in ((128, 128, True), (1024, 128, False), (4096, 128, True), (4096, 32, False)):
        config = select_config(M, 28_672, 4096, size, limits, has_steps=True)
        kind = f"w4a8 hopper steps {config.rows}x{config.cols} {M} {size} of {config.shared_memory()}"
        yield Case(kind, lambda m=M, s=size: layer(m, 28_672, 4096, s, False, steps=True), only=PRODUCTS, rare=rare)
    yield Case("w4a8 hopper layer", lambda: layer(16, 4096, 28_672, 128, False), only=LAYERS)
    for M, size, asymmetric, steps, rare in (
        (32, 64, True, False, True),
        (64, 128, True, False, False),
        (128, 64, False, True, True),
        (256, 32, False, True, True),
        (256, 1024, True, False, True),
        (256, 1024, False, False, False),
    ):
        label = f"w4a8 hopper many in one {M} {size} {asymmetric} {steps}"
        yield Case(
            label, lambda m=M, s=size, z=asymmetric, t=steps: layer(m, 1024, 1024, s, z, t), only=LAYERS, rare=rare
        )
    yield Case("w4a8 hopper row", lambda: layer(1, 4096, 14_336, 128, True), only=LAYERS)


def layer(M: int, N: int, K: int, size: int, asymmetric: bool, steps: bool = False) -> None:
    def meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    groups = -(-K // size)
    weight = meta((N, -(-K // 256) * 128), torch.uint8)
    zero_point = meta((N, groups), torch.int8) if asymmetric else None
    bias = meta((N,), torch.bfloat16) if asymmetric else None
    x, scale = meta((M, K), torch.bfloat16), meta((N, groups), torch.bfloat16)
    step = meta((N,), torch.float32) if steps else None
    stored = QuantizedWeight(weight, scale, zero_point, None, None, bias, K, "int4", size, True, step)
    plan = int8_launcher._make_plan(x, stored, has_residual=True)
    out = meta((M, N), torch.bfloat16)
    tensors = (x, weight, scale, bias, step if steps else zero_point, out, out)
    # Where tiles are shared, graphs without counts have the same kernel without that.
    for plans in (plan.usual, plan.counted or plan.captured)[: 1 + plan.shares_buffer]:
        for each in plans.steps:
            each.run((*tensors, *plans.parts_of(meta((plans.buffer,), torch.int8))))
