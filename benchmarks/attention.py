"""Times attention of one new token a sequence to a cache, beside PyTorch's.

A measured pass is a run of calls over several caches, so that each call reads its keys and values from memory. On a GPU
passes are CUDA graphs; providers take turns. Before anything is timed, outputs are compared with the specification in
float64. Bytes are those of the keys and values in use, with the scales of int8 ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import relative_error
from benchmarks.results import command_line, environment, write_results
from benchmarks.shapes import parse_pair
from benchmarks.tables import Table, render
from benchmarks.timing import copy_bandwidth, median_seconds
from qgemm.kernels import decode_attention, quantize_rows
from qgemm.kernels.reference import decode_attention_reference
from qgemm_cli.timing import QUICK, Effort, Pass, copy_count

SIZES = ((1, 512), (1, 4096), (1, 16_384), (16, 512), (16, 4096), (16, 16_384), (64, 512), (64, 4096), (64, 16_384))
CPU_SIZES = ((1, 512), (4, 4096))
MAX_ERRORS = {"sdpa": 0.01, "qgemm": 0.01, "qgemm int8 cache": 0.02}
"""Relative errors that count as right: about twice what rounding makes, of random values."""
CHECKED_SEQUENCES = 2


class Cache(NamedTuple):
    """Keys and values ``[B, Hkv, L, D]``, with scales if they are int8."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(each.nbytes for each in self if each is not None)


@dataclass(frozen=True)
class Result:
    """One provider on ``batch`` sequences with ``length`` keys. ``share``: of what a copy moves in the same memory."""

    provider: str
    batch: int
    length: int
    us: float
    tb_per_s: float
    share: float
    error: float


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Measures what the command line asks for, prints it, and writes the JSON file if one is named."""
    parser = command_line("attention", __doc__)
    parser.add_argument("--size", type=parse_pair, action="append", metavar="BxL", help="sequences and their keys")
    parser.add_argument("--heads", type=_heads, default=(32, 8), metavar="Q/K", help="of queries and of keys (32/8)")
    parser.add_argument("--head-size", type=int, default=128, help="(default: 128)")
    args = parser.parse_args(arguments)
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if is_gpu else "cpu")
    sizes, effort = args.size or (SIZES if is_gpu else CPU_SIZES), QUICK if args.quick else Effort()
    about, bandwidth = environment(device, args.commit), copy_bandwidth(device)
    results = []
    with torch.no_grad():
        for batch, length in sizes:
            results += measure(batch, length, args.heads, args.head_size, effort, bandwidth, device)
            write_results(args.json, results, about, bandwidth=bandwidth)
    print(f"{about['device']}, torch {torch.__version__}, commit {about['commit']}, {bandwidth / 1e12:.2f} TB/s copied")
    print(render(table(results), markdown=False))
    return results


def measure(
    batch: int,
    length: int,
    heads: tuple[int, int],
    head_size: int,
    effort: Effort,
    bandwidth: float,
    device: torch.device,
) -> list[Result]:
    """All providers on one size; raises ``ValueError`` for a wrong output."""
    torch.manual_seed(0)
    q = torch.randn(batch, 1, heads[0], head_size, device=device, dtype=torch.bfloat16)
    used = torch.tensor([length], dtype=torch.int32, device=device)
    passes, errors, sizes = {}, {}, {}
    for name, run in providers(q, used).items():
        int8 = name.endswith("int8 cache")
        one = make_cache(batch, heads[1], length, head_size, int8, device)
        count = copy_count(one.nbytes, device)
        caches = [one, *(make_cache(batch, heads[1], length, head_size, int8, device) for _ in range(count - 1))]
        passes[name], sizes[name] = Pass(run, caches, device), one.nbytes
        last = caches[(passes[name].calls - 1) % count]
        errors[name] = error_of(passes[name].checked_output(), q, last, used)
        if not errors[name] <= MAX_ERRORS[name]:
            raise ValueError(f"{name} is wrong: relative error {errors[name]:.3g}, at most {MAX_ERRORS[name]}")
    seconds = median_seconds(passes, effort, device)
    return [
        Result(
            name, batch, length, seconds[name] * 1e6,
            sizes[name] / seconds[name] / 1e12, sizes[name] / seconds[name] / bandwidth, errors[name],
        )
        for name in passes
    ]  # fmt: skip


def providers(q: Tensor, length: Tensor) -> dict[str, Callable[[Cache], Tensor]]:
    """Attention of ``q [B, 1, Hq, D]`` to a cache, ``[B, 1, Hq, D]``, by name."""

    def sdpa(cache: Cache) -> Tensor:
        out = F.scaled_dot_product_attention(q.transpose(1, 2), cache.k, cache.v, enable_gqa=True)
        return out.transpose(1, 2)

    def ours(cache: Cache) -> Tensor:
        return decode_attention(q, cache.k, cache.v, length, k_scale=cache.k_scale, v_scale=cache.v_scale)

    return {"sdpa": sdpa, "qgemm": ours, "qgemm int8 cache": ours}


def make_cache(batch: int, heads: int, length: int, head_size: int, int8: bool, device: torch.device) -> Cache:
    """Standard normal keys and values, in bfloat16 or int8."""
    make: Any = partial(torch.randn, batch, heads, length, head_size, device=device, dtype=torch.bfloat16)
    if not int8:
        return Cache(make(), make())
    (k, k_scale), (v, v_scale) = quantize_rows(make()), quantize_rows(make())
    return Cache(k, v, k_scale, v_scale)


def error_of(out: Tensor, q: Tensor, cache: Cache, length: Tensor) -> float:
    """Of the first sequences, against float64. Those of int8 caches have the values that are stored."""
    few = slice(CHECKED_SEQUENCES)
    k, v, k_scale, v_scale = (None if each is None else each[few] for each in cache)
    assert k is not None
    assert v is not None
    k, v = (each.double() if k_scale is None else each for each in (k, v))
    wanted = decode_attention_reference(q[few].double(), k, v, length, k_scale=k_scale, v_scale=v_scale)
    return relative_error(out[few], wanted)


def table(results: Sequence[Result]) -> Table:
    """A row a size and provider."""
    base = {(one.batch, one.length): one.us for one in results if one.provider == "sdpa"}
    rows = []
    for one in results:
        times = base[one.batch, one.length] / one.us
        cells = [f"{one.us:,.1f}", f"{times:.2f}", f"{one.tb_per_s:.3g}", f"{one.share:.0%}", f"{one.error:.4f}"]
        rows.append([f"{one.batch} x {one.length}", one.provider, *cells])
    return ["sequences x keys", "", "us", "times sdpa", "TB/s", "of a copy", "relative error"], rows


def _heads(text: str) -> tuple[int, int]:
    of_queries, of_keys = (int(part) for part in text.split("/"))
    return of_queries, of_keys


if __name__ == "__main__":
    main()
