"""What ``compile_kernels.py`` compiles of products with stored weights."""

from collections.abc import Iterator

import torch
from assumed_devices import META, Case

from qgemm.kernels.activations import Gates
from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.kernels.weight_only import float_launcher
from qgemm.numerics.formats import FORMATS
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import packed_width

BF16, HALF = torch.bfloat16, torch.float16


def weight_only_cases() -> Iterator[Case]:
    """On Hopper few rows, and tiles that are whole and shared; elsewhere few rows and a float weight."""
    # Where registers are few.
    yield Case(
        "weight_only few-floats wide", lambda: multiply(16, 4096, "int4", 16, torch.float32, BF16, torch.float32, 57344)
    )
    # Of a row: three programs on an SM, and small ones.
    for N in (6144, 28672):
        for group in (128, 32):
            label = f"weight_only one int4 groups of {group} {N}"
            yield Case(label, lambda n=N, g=group: multiply(1, 4096, "int4", g, BF16, BF16, False, n))
    # With the activation of gates.
    for label, M, N, format, group, gates in (
        ("one int4", 1, 28672, "int4", 128, Gates("silu")),
        ("one int4 short", 1, 2048, "int4", 128, Gates("gelu_tanh", up_first=True)),
        ("sixteen int8 odd", 16, 3000, "int8", 32, Gates("gelu")),
        ("eight mxfp4", 8, 28672, "fp4", 32, Gates("relu2")),
    ):
        yield Case(
            f"weight_only gates {label}",
            lambda m=M, n=N, f=format, g=group, a=gates: multiply(m, 4096, f, g, BF16, BF16, False, n, a),
        )
    for label, M, K, format, group, scale, dtype, zeros in (
        ("few int4", 8, 4096, "int4", 128, BF16, BF16, True),
        ("few int8", 16, 4096, "int8", 4096, BF16, BF16, False),
        ("shared few int4", 16, 16640, "int4", 128, BF16, BF16, False),
        ("few nf4", 1, 4096, "nf4", 64, torch.float32, HALF, False),
        ("few bnb-fp4", 1, 4096, "bnb-fp4", 64, torch.float32, BF16, False),
        # Rows are of 16 bytes, but not of 16 values.
        ("one odd", 1, 152, "int4", 32, BF16, BF16, False),
        ("few small groups", 16, 4096, "int4", 32, BF16, BF16, True),
        ("sixteen odd", 16, 4104, "int4", 128, BF16, HALF, True),
        ("tiles int4", 64, 4096, "int4", 128, BF16, BF16, True),
        ("tiles odd", 64, 4104, "int4", 128, BF16, BF16, False),
        ("tiles large", 2048, 4096, "int4", 128, BF16, BF16, False),
        # Of 160 and 192 rows, shared and whole.
        ("tiles split int4 narrower", 160, 4096, "int4", 128, BF16, BF16, False),
        ("tiles split int8 narrower", 320, 4096, "int8", 128, BF16, HALF, False),
        ("tiles split int4", 192, 4096, "int4", 128, BF16, BF16, False),
        ("tiles split int4 channel", 384, 4096, "int4", 4096, BF16, HALF, False),
        ("tiles split int8", 192, 4096, "int8", 4096, BF16, BF16, False),
        ("tiles split int8 whole", 700, 4096, "int8", 128, BF16, BF16, False),
        ("tiles mxfp4", 64, 4096, "fp4", 32, torch.uint8, BF16, False),
        ("tiles nvfp4", 128, 4096, "fp4", 16, torch.float8_e4m3fn, BF16, False),
        ("tiles int4 groups of 32", 256, 4096, "int4", 32, BF16, BF16, True),
        ("tiles wide mxfp4", 1024, 4096, "fp4", 32, torch.uint8, BF16, False),
        ("tiles wide int4 zeros", 1024, 4096, "int4", 128, BF16, BF16, True),
        ("tiles wide int4 zeros in parts", 1024, 4096, "int4", 32, HALF, BF16, True),
        ("tiles wide nf4", 1024, 4096, "nf4", 64, torch.float32, BF16, False),
        ("tiles-floats wide int4", 1024, 4096, "int4", 64, HALF, BF16, HALF),
        ("made int4", 2304, 4096, "int4", 128, torch.float32, HALF, False),
        ("few-floats int4", 16, 4096, "int4", 64, torch.float32, BF16, torch.float32),
        ("few-floats int4 whole groups", 8, 4096, "int4", 128, BF16, BF16, BF16),
        ("few-floats int8 channel", 1, 4096, "int8", 4096, HALF, HALF, HALF),
        ("tiles-floats int4", 128, 4096, "int4", 32, torch.float32, BF16, torch.float32),
        ("tiles-floats int4 whole groups", 64, 4096, "int4", 128, BF16, BF16, BF16),
        ("tiles-floats int4 of 16", 192, 4096, "int4", 16, torch.float32, BF16, torch.float32),
        ("tiles-floats int8", 200, 4096, "int8", 16, torch.float32, HALF, torch.float32),
        ("tiles-floats int8 channel", 64, 4096, "int8", 4096, BF16, BF16, BF16),
    ):
        yield Case(
            f"weight_only {label}",
            lambda m=M, k=K, f=format, g=group, s=scale, d=dtype, z=zeros: multiply(m, k, f, g, s, d, z),
        )


def multiply(
    M: int,
    K: int,
    format: str,
    group: int,
    scale: torch.dtype,
    dtype: torch.dtype,
    zeros: bool | torch.dtype,
    N: int = 4096,
    gates: Gates | None = None,
) -> None:
    zero = zeros if isinstance(zeros, torch.dtype) else torch.int8
    form = FORMATS[format]
    empty = lambda *shape, dtype: torch.empty(*shape, dtype=dtype, device=META)  # noqa: E731
    width, storage = (packed_width(K), torch.uint8) if form.bits == 4 else (K, form.storage)
    groups = cdiv(K, group)
    weight = ScaledWeight(
        empty(N, width, dtype=storage),
        empty(N, groups, dtype=scale),
        empty(N, groups, dtype=zero) if zeros else None,
        empty(2, dtype=torch.float32) if scale == torch.float8_e4m3fn else None,
        None,
        empty(N, dtype=dtype),
        K,
        format,
        group,
    )
    x = empty(M, K, dtype=dtype)
    if gates is None or float_launcher.weight_only_activated(x, weight, gates) is None:
        float_launcher.weight_only_linear(x, weight, empty(M, N, dtype=dtype))
