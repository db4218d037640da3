"""Times int8 products beside ``F.linear`` on whatever device is there, in milliseconds.

- fp32, bf16: ``F.linear``.
- int8 GEMM: ``qgemm.kernels.scaled_mm`` of values that are int8 already.
- int8 layer: ``quantize_rows`` and ``scaled_mm``, which is what ``QuantLinear`` does.

Each provider goes through several copies of its weight, more bytes than caches hold, as the layers of a model would. On
a GPU the calls are captured in a CUDA graph, so host time doesn't count. On the CPU providers take turns, and each
number is the median of the rounds.

Run it with ``python examples/benchmark_gemm.py``, and with ``--shape M,N,K`` for shapes of your own.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from qgemm.kernels import quantize_rows, scaled_mm

CPU_SHAPES = [(M, N, K) for N, K in ((1536, 384), (4096, 4096)) for M in (1, 32, 128)]
GPU_SHAPES = [(M, N, K) for N, K in ((4096, 4096), (28672, 4096), (4096, 14336)) for M in (1, 16, 64, 256, 1024, 4096)]
ROTATED_BYTES = {"cpu": 128 << 20, "cuda": 320 << 20}


def copies(weight: torch.Tensor) -> list[torch.Tensor]:
    # At most 256: many more calls than that take long, and a weight so small is in the cache in real models too.
    count = min(ROTATED_BYTES[weight.device.type] // weight.nbytes + 1, 256)
    return [weight.clone() for _ in range(count)]


def providers(M: int, N: int, K: int, device: str) -> dict[str, tuple[Callable[[], object], int]]:
    """By name: a function that goes once through the copies of the weight, and how many those are."""
    x = torch.randn(M, K, device=device)
    weight = torch.randn(N, K, device=device)
    # What models compute with there.
    x_int8 = x.bfloat16() if device == "cuda" else x
    a, a_scale = quantize_rows(x_int8)
    q, b_scale = quantize_rows(weight)
    fp32, bf16, int8 = copies(weight), copies(weight.bfloat16()), copies(q)
    x_bf16 = x.bfloat16()

    def gemm() -> None:
        for b in int8:
            scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=x_int8.dtype)

    def layer() -> None:
        for b in int8:
            row, row_scale = quantize_rows(x_int8)
            scaled_mm(row, b.t(), row_scale, b_scale, out_dtype=x_int8.dtype)

    return {
        "fp32": (lambda: [F.linear(x, w) for w in fp32], len(fp32)),
        "bf16": (lambda: [F.linear(x_bf16, w) for w in bf16], len(bf16)),
        "int8 GEMM": (gemm, len(int8)),
        "int8 layer": (layer, len(int8)),
    }


def median_times(M: int, N: int, K: int, device: str, rounds: int) -> dict[str, float]:
    """Milliseconds for one product, by provider."""
    runs = providers(M, N, K, device)
    if device == "cuda":
        from triton.testing import do_bench_cudagraph

        return {
            name: do_bench_cudagraph(run, rep=100, return_mode="median") / count for name, (run, count) in runs.items()
        }
    for run, _ in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (run, count) in runs.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3 / count)
    return {name: statistics.median(values) for name, values in times.items()}


def parse_shape(text: str) -> tuple[int, int, int]:
    M, N, K = map(int, text.split(","))
    return M, N, K


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--shape", type=parse_shape, action="append", metavar="M,N,K", help="may be given several times"
    )
    parser.add_argument("--rounds", type=int, default=7, help="on the CPU (default: 7)")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, milliseconds; ratios are to the int8 layer")
    print(
        f"{'N x K':>13} {'M':>5}{'fp32':>10}{'bf16':>10}{'int8 GEMM':>11}{'int8 layer':>12}{'fp32 /':>9}{'bf16 /':>8}"
    )
    for M, N, K in args.shape or (GPU_SHAPES if device == "cuda" else CPU_SHAPES):
        t = median_times(M, N, K, device, args.rounds)
        ours = t["int8 layer"]
        print(
            f"{f'{N} x {K}':>13} {M:>5}{t['fp32']:>10.3f}{t['bf16']:>10.3f}{t['int8 GEMM']:>11.3f}{ours:>12.3f}"
            f"{t['fp32'] / ours:>8.2f}x{t['bf16'] / ours:>7.2f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
