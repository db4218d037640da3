"""An int8 GEMM kernel of your own, made of the stages of ``qgemm.kernels.stages``.

Two ways to add to the epilogue:

1. ``gemm_squared_relu``: a function of the values, passed to ``OutputView.store`` as ``activation``.
2. ``gemm_residual``: a stage of your own, a class with ``@aggregate``, that reads a second matrix.

Run it with ``python examples/custom_kernel.py``. Without a GPU the kernels run in Triton's interpreter. That takes
``TRITON_INTERPRET=1`` in the environment before Triton is imported, and this script sets it.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

from qgemm.kernels import quantize_rows
from qgemm.kernels.stages import (
    GemmContext,
    InputView,
    ScheduleContext,
    Tile,
    aggregate,
    make_bias_view,
    make_input_view,
    make_output_view,
    make_scale_view,
)


@triton.jit
def squared_relu(x):
    x = tl.maximum(x, 0.0)
    return x * x


@triton.jit
def gemm_squared_relu(
    A, B, C, A_scale, B_scale, bias, M, N, K, stride_am, stride_bn, stride_cm, NUM_SMS: tl.constexpr
):  # fmt: skip
    """``C = squared_relu((A @ B) * a_scale * b_scale + bias)``."""
    tensorA = make_input_view(A, M, K, stride_am, 1)
    tensorB = make_input_view(B, K, N, 1, stride_bn)
    tensorC = make_output_view(C, M, N, stride_cm, 1)
    scale_view = make_scale_view(A_scale, B_scale, M, N)
    bias_view = make_bias_view(bias, N)

    ctx = GemmContext(64, 64, 64, NUM_SMS, even_k=False, quantized=True)
    sched = ScheduleContext(M, N, K, ctx)
    start, total, stride = sched.persistent_tile_range()
    for tile_id in range(start, total, stride):
        tile = sched.get_tile_from_idx(tile_id)
        acc = ctx.reduce_axis(tensorA, tensorB, tile)
        tensorC.store(acc, tile, scale=scale_view, bias=bias_view, activation=squared_relu)


@aggregate
class Residual:
    """A matrix that is scaled by ``alpha`` and added to the output."""

    view: InputView
    alpha: tl.tensor

    @triton.jit
    def apply(self, acc, tile: Tile):
        return acc + self.alpha * self.view.load(tile).to(tl.float32)


@triton.jit
def gemm_residual(
    A, B, C, A_scale, B_scale, R, alpha, M, N, K, stride_am, stride_bn, stride_cm, stride_rm, NUM_SMS: tl.constexpr
):  # fmt: skip
    """``C = (A @ B) * a_scale * b_scale + alpha * R``."""
    tensorA = make_input_view(A, M, K, stride_am, 1)
    tensorB = make_input_view(B, K, N, 1, stride_bn)
    tensorC = make_output_view(C, M, N, stride_cm, 1)
    scale_view = make_scale_view(A_scale, B_scale, M, N)
    residual = Residual(make_input_view(R, M, N, stride_rm, 1), alpha)

    ctx = GemmContext(64, 64, 64, NUM_SMS, even_k=False, quantized=True)
    sched = ScheduleContext(M, N, K, ctx)
    start, total, stride = sched.persistent_tile_range()
    for tile_id in range(start, total, stride):
        tile = sched.get_tile_from_idx(tile_id)
        acc = ctx.reduce_axis(tensorA, tensorB, tile)
        acc = scale_view.apply(acc, tile, M, N)
        acc = residual.apply(acc, tile)
        tensorC.store(acc, tile)


def check(name: str, out: torch.Tensor, expected: torch.Tensor) -> None:
    error = ((out.double() - expected).abs().max() / expected.abs().max()).item()
    print(f"{name:18} largest error against float64: {error:.1e} of the largest value")
    assert error < 1e-6, f"{name} is wrong"


def main() -> None:
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    # As many programs as the GPU has multiprocessors. Any number is right; the interpreter runs them one by one.
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count if on_gpu else 4
    print(f"running on {torch.cuda.get_device_name() if on_gpu else 'the CPU, in the interpreter of Triton'}")

    # None of the sizes is a multiple of a block.
    M, N, K = 100, 150, 200
    a, a_scale = quantize_rows(torch.randn(M, K, device=device))
    weight, b_scale = quantize_rows(torch.randn(N, K, device=device))
    bias = torch.randn(N, device=device)
    residual = torch.randn(M, N, device=device)
    product = (a.double() @ weight.double().t()) * a_scale.double()[:, None] * b_scale.double()
    out = torch.empty(M, N, device=device)

    gemm_squared_relu[(num_sms,)](
        a, weight, out, a_scale, b_scale, bias, M, N, K, K, K, N, NUM_SMS=num_sms
    )  # fmt: skip
    check("gemm_squared_relu", out, (product + bias.double()).relu() ** 2)

    gemm_residual[(num_sms,)](
        a, weight, out, a_scale, b_scale, residual, 0.5, M, N, K, K, K, N, N, NUM_SMS=num_sms
    )  # fmt: skip
    check("gemm_residual", out, product + 0.5 * residual.double())


if __name__ == "__main__":
    main()
