"""What ``compile_kernels.py`` compiles of norms and activations ahead of products."""

from collections.abc import Iterator

import torch
from assumed_devices import META, Case

from qgemm.kernels.activation import launcher as activate
from qgemm.kernels.activations import GPT_OSS, GatedActivation
from qgemm.kernels.gating.launcher import gate_heads
from qgemm.kernels.hadamard import launcher as rotation
from qgemm.kernels.norm import launcher as norms
from qgemm.kernels.norms import MODULATED, Norm, NormCall
from qgemm.kernels.reorder.launcher import reorder
from qgemm.kernels.sampling import launcher as sampling
from qgemm.kernels.sampling.choice import Choice
from qgemm.kernels.xielu.coefficients import Coefficients
from qgemm.kernels.xielu.launcher import xielu
from qgemm.numerics.formats import FP8, INT8


def row_cases() -> Iterator[Case]:
    """Every part of each kernel, and the longest rows that registers hold."""
    fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
    longest = norms.MAX_ROW_BYTES
    yield Case("rows norm bfloat16", lambda: norm(4096, bf16, Norm("rms")))
    yield Case("rows norm longest bfloat16", lambda: norm(longest // 2, bf16, Norm("rms")))
    yield Case("rows norm fp8 longest bfloat16", lambda: norm(longest // 2, bf16, Norm("rms"), form=FP8.storage))
    yield Case("rows norm static float16", lambda: norm(384, fp16, Norm("rms_once"), static=True))
    yield Case("rows norm longest float32", lambda: norm(longest // 4, fp32, Norm("layer"), static=True))
    yield Case("rows add longest bfloat16", lambda: add_norm_quantize(longest // 2, bf16, Norm("layer")))
    yield Case("rows add sandwich longest bfloat16", lambda: add_norm_quantize(longest // 2, bf16, Norm("rms"), True))
    yield Case("rows add sandwich longest float32", lambda: add_norm(longest // 4, fp32, Norm("rms_plus_one")))
    most = Norm("layer_plus_one")
    yield Case("rows add most longest bfloat16", lambda: add_norm_quantize(longest // 2, bf16, most, True))
    yield Case("rows add factors longest float32", lambda: with_factors(longest // 4, fp32))
    yield Case("rows post longest bfloat16", lambda: post_norm_quantize(longest // 2, bf16, Norm("layer")))
    yield Case("diffusion gate bfloat16", lambda: modulated(3072, bf16, bf16))
    yield Case("diffusion vectors float32", lambda: modulated(5120, bf16, fp32))
    yield Case("diffusion activation bfloat16", lambda: activation_behind(3072, 12_288, bf16, "gelu_tanh"))
    yield Case("diffusion gates bfloat16", lambda: activation_behind(6144, 36_864, bf16, "silu"))
    # Of one length, which the functions must add up in one order.
    for dtype, K in ((fp32, 4096), (bf16, 1026)):
        name = str(dtype).removeprefix("torch.")
        yield Case(f"rows sum {name} {K} norm", lambda d=dtype, k=K: norm(k, d, Norm("rms")))
        yield Case(f"rows sum {name} {K} add", lambda d=dtype, k=K: add_norm_quantize(k, d, Norm("rms"), True))
        yield Case(f"rows sum {name} {K} post", lambda d=dtype, k=K: post_norm_quantize(k, d, Norm("rms")))
        yield Case(f"rows sum {name} {K} floats", lambda d=dtype, k=K: add_norm(k, d, Norm("rms")))
        yield Case(f"rows sum {name} {K} factors", lambda d=dtype, k=K: with_factors(k, d))
    # Triton makes a constant of a length of 1.
    yield Case("one value norm", lambda: norm(1, bf16, Norm("layer")))
    yield Case("one value activation", lambda: activation(1, bf16, "silu", True))
    yield Case("rows quick_gelu", lambda: activation(3072, bf16, "quick_gelu", False))
    yield Case("rows activation bfloat16", lambda: activation(14_336, bf16, "silu", True))
    yield Case("rows activation fp8 bfloat16", lambda: activation(14_336, bf16, "silu", True, FP8.storage))
    yield Case("rows activation longest float16", lambda: activation(16_384, fp16, "gelu", True))
    yield Case(
        "rows activation ups first bfloat16",
        lambda: activate.activation_quantize(rows(10_240, bf16), "gelu", True, up_first=True),
    )
    yield Case("activation bfloat16", lambda: activate.activate(rows(28_672, bf16), "silu", True))
    yield Case("rows activation read twice float32", lambda: activation(16_400, fp32, "gelu_tanh", False))
    yield Case("activation gradients bfloat16", lambda: activation_backward(2880, bf16, GPT_OSS))

    def gated(width: int, function: str) -> None:
        x, product = rows(4096, bf16)[None].unflatten(-1, (32, 128)), rows(8192, bf16)[None]
        gate = product.unflatten(-1, (32, 256))[..., 128:][..., :width]
        gate_heads(x, gate, function)

    yield Case("rows gates", lambda: gated(128, "sigmoid"))
    yield Case("rows head_gates", lambda: gated(1, "softplus"))
    one = torch.empty(1, dtype=bf16, device=META)
    yield Case("rows xielu", lambda: xielu(rows(4096, bf16), Coefficients(*4 * [one])))
    yield Case("rows reorder bfloat16", lambda: reorder(rows(4096, bf16), rows(4096, torch.int32)[0]))
    yield Case("rows hadamard float16", lambda: rotation.hadamard(rows(4096, fp16)))
    yield Case("rows hadamard longest bfloat16", lambda: rotation.hadamard(rows(rotation.MAX_SIZE, bf16)))
    yield Case("rows hadamard short bfloat16", lambda: rotation.hadamard(rows(3 * 64, bf16)))
    # The choice of a step's tokens, for one sequence and for many.
    yield Case("rows choose", lambda: choose(1, bf16, ends=True))
    yield Case("rows choose of many", lambda: choose(64, fp32, ends=False))


def modulated(K: int, dtype: torch.dtype, of_vectors: torch.dtype) -> None:
    x, vectors = torch.empty(2, 256, K, dtype=dtype, device=META), torch.empty(2, K, dtype=of_vectors, device=META)
    norms.norm_rows(NormCall(x, x, None, vectors, vectors, vectors, Norm(MODULATED), None, INT8.storage), total=True)


def activation_behind(first: int, K: int, dtype: torch.dtype, name: str) -> None:
    activate.activation_quantize(rows(K, dtype), name, name == "silu", prefix=rows(first, dtype))


def activation_backward(K: int, dtype: torch.dtype, kind: GatedActivation) -> None:
    factors, end = vector(512, torch.float32), vector(1, torch.int32)
    activate.activation_backward(rows(kind.columns(K), dtype), rows(K, dtype), factors, end, kind, 512)


def choose(B: int, dtype: torch.dtype, ends: bool) -> None:
    scores, finished = torch.empty(B, 128_256, dtype=dtype, device=META), torch.empty(B, dtype=torch.bool, device=META)
    token, rows, counters, end = (
        torch.empty(shape, dtype=torch.int64, device=META) for shape in ((B, 1), (600, B + 1), (B + 1,), (2,))
    )
    sampling.choose_tokens(Choice(scores, token, rows, counters, finished, end if ends else None, 0 if ends else None))


def rows(K: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(512, K, dtype=dtype, device=META)


def vector(K: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(K, dtype=dtype, device=META)


def norm(K: int, dtype: torch.dtype, kind: Norm, static: bool = False, form: torch.dtype = INT8.storage) -> None:
    scale, bias = torch.empty((), device=META) if static else None, vector(K, dtype) if kind.is_layer else None
    norms.norm_rows(NormCall(rows(K, dtype), None, None, None, vector(K, dtype), bias, kind, scale, form))


def add_norm_quantize(K: int, dtype: torch.dtype, kind: Norm, sandwich: bool = False) -> None:
    norms.norm_rows(sum_of(K, dtype, kind, sandwich), total=True)


def post_norm_quantize(K: int, dtype: torch.dtype, kind: Norm) -> None:
    norms.norm_rows(sum_of(K, dtype, kind, False), normed=True)


def add_norm(K: int, dtype: torch.dtype, kind: Norm) -> None:
    norms.norm_rows(sum_of(K, dtype, kind, True)._replace(dtype=None), total=True, normed=True)


def with_factors(K: int, dtype: torch.dtype) -> None:
    call = sum_of(K, dtype, Norm("rms_once"), True)
    norms.norm_rows(call._replace(factor=0.22, total_factor=vector(1, dtype)), total=True)


def sum_of(K: int, dtype: torch.dtype, kind: Norm, sandwich: bool) -> NormCall:
    branch, bias = vector(K, dtype) if sandwich else None, vector(K, dtype) if kind.is_layer else None
    return NormCall(rows(K, dtype), rows(K, dtype), branch, None, vector(K, dtype), bias, kind, None, INT8.storage)


def activation(K: int, dtype: torch.dtype, name: str, gated: bool, form: torch.dtype = INT8.storage) -> None:
    activate.activation_quantize(rows(2 * K if gated else K, dtype), name, gated, None, form)
