"""Who multiplies: qgemm, and what PyTorch itself has. ``peers.py`` has the other libraries.

Two levels are timed:

- ``gemm``: operands already in the dtype that is multiplied; the output scaled to bfloat16 (``int_mm``: raw int32).
- ``layer``: what a model calls, floats in and out, with the quantization of activations.

Activations are bfloat16 on a GPU. On a CPU they are float32, as models are there, and bf16 converts nothing either.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qgemm import QuantLinear
from qgemm.kernels import quantize_rows, scaled_mm

FP8 = torch.float8_e4m3fn
INT8_ERROR = 0.02
"""The largest relative error of a row that counts as right. Rounding to int8 makes 0.011 to 0.017 on Gaussian data."""
FP8_ERROR = 0.06  # rounding makes 0.037 to 0.042
BF16_ERROR = 0.005  # rounding of operands and output makes about 0.002


@dataclass(frozen=True)
class Provider:
    """One way to compute ``x @ weight.T``: ``run(prepare_input(x), prepare_weight(weight))``.

    ``prepare_weight`` gives new storage at each call, since each copy of a weight must come from memory. Dtypes are
    those that ``run`` reads and writes. ``finish`` turns what ``run`` gave into the product, for the check alone.
    """

    name: str
    levels: tuple[str, ...]
    input_dtype: torch.dtype
    weight_dtype: torch.dtype
    output_dtype: torch.dtype
    max_error: float
    prepare_input: Callable[[Tensor], Any]
    prepare_weight: Callable[[Tensor], Any]
    run: Callable[[Any, Any], Tensor]
    finish: Callable[[Tensor, Any, Any], Tensor] = lambda out, a, b: out


def gpu_providers() -> list[Provider]:
    """qgemm, cuBLAS in bf16 and fp8, cuBLASLt in int8."""
    bf16 = torch.bfloat16
    return [
        *qgemm_providers(bf16),
        float_provider("bf16", bf16),
        Provider("fp8", ("gemm",), FP8, FP8, bf16, FP8_ERROR, quantize_fp8, quantize_fp8, _fp8_mm),
        int_mm_provider(),
    ]


def cpu_providers() -> list[Provider]:
    """qgemm, fp32 and bf16 of the CPU's libraries, oneDNN's int8."""
    return [
        *qgemm_providers(torch.float32),
        float_provider("fp32", torch.float32),
        float_provider("bf16", torch.bfloat16),
        int_mm_provider(),
    ]


def qgemm_providers(dtype: torch.dtype) -> list[Provider]:
    """qgemm at both levels, with activations and outputs of ``dtype``."""
    int8 = torch.int8

    def run(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
        return scaled_mm(a[0], b[0].t(), a[1], b[1], out_dtype=dtype, constant_b=True)

    return [
        Provider("qgemm", ("gemm",), int8, int8, dtype, INT8_ERROR, quantize_rows, quantize_rows, run),
        Provider(
            "qgemm", ("layer",), dtype, int8, dtype, INT8_ERROR, _to(dtype),
            lambda weight: QuantLinear.from_linear(linear_of(weight)), lambda x, layer: layer(x),
        ),
    ]  # fmt: skip


def float_provider(name: str, dtype: torch.dtype) -> Provider:
    """``F.linear`` in ``dtype``: at both levels, since there is nothing to quantize."""
    return Provider(
        name,
        ("gemm", "layer"),
        dtype,
        dtype,
        dtype,
        BF16_ERROR,
        _to(dtype),
        lambda weight: weight.to(dtype, copy=True),
        F.linear,
    )


def int_mm_provider() -> Provider:
    """``torch._int_mm``, which gives raw int32 sums: less than the others do, and twice the bytes of output."""

    def finish(out: Tensor, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
        return out.float() * a[1][:, None] * b[1]

    int8 = torch.int8
    return Provider(
        "int_mm",
        ("gemm",),
        int8,
        int8,
        torch.int32,
        INT8_ERROR,
        quantize_rows,
        quantize_rows,
        lambda a, b: torch._int_mm(a[0], b[0].t()),
        finish,
    )


def linear_of(weight: Tensor) -> nn.Linear:
    """A float layer without bias that holds ``weight [N, K]``."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """``(q, scale)`` of ``x [R, K]``: e4m3 values, and one float32 scale per row, ``[R, 1]``."""
    scale = x.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / torch.finfo(FP8).max
    return (x.float() / scale).to(FP8), scale


def _fp8_mm(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    # Fast accumulation is the faster setting, and what fp8 inference uses.
    return torch._scaled_mm(
        a[0], b[0].t(), scale_a=a[1], scale_b=b[1].t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype)
