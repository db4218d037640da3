"""Times products of fp8 and 16-bit operands beside PyTorch's own.

Operands are quantized before, so only products are timed, as ``benchmarks.weight_only`` times layers. ``fp8`` and
``fp8-block`` are compared with ``torch._scaled_mm`` with a scale for each row and column, ``matmul`` of fp8 with
``_scaled_mm`` with one scale, ``matmul`` of bfloat16 with ``F.linear``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measure import effort_for, random_operand
from benchmarks.results import command_line, environment, show
from benchmarks.shapes import SHAPES, SUMMARY_FAMILIES, WeightShape, parse_shape
from benchmarks.tables import Table, render
from benchmarks.timing import median_seconds
from qgemm.kernels import matmul, quantize_rows, scaled_mm
from qgemm.kernels.dispatch import quantize_groups
from qgemm.kernels.gemm import launcher
from qgemm.numerics.blocks import BLOCK, block_scales, dequantize_blocks, round_blocks
from qgemm.numerics.groups import spread
from qgemm_cli.check import largest_errors
from qgemm_cli.timing import QUICK, Effort, Pass, copy_count

ROWS = (1, 16, 64, 128, 256, 512, 1024, 4096)
E4M3 = torch.float8_e4m3fn
MAX_ERROR = 0.01
"""Relative, of ``COLUMNS`` columns of a row of an output beside the product of the same operands in float64."""
COLUMNS = 512


class Operand(NamedTuple):
    """Rows as they are multiplied, and scales: one, of each row ``[R]``, or of blocks ``[R or R / 128, K / 128]``."""

    values: Tensor
    scale: Tensor

    def to_float(self) -> Tensor:
        """The rows in float64, which they are exactly, but for the rounding of their product with the scales."""
        values = self.values.double()
        if self.scale.ndim < 2:
            return values * self.scale.double()[..., None]
        if self.scale.shape[0] == values.shape[0]:
            return values * spread(self.scale, BLOCK, values.shape[1]).double()
        return dequantize_blocks(self.values, self.scale, torch.float32).double()


@dataclass(frozen=True)
class Product:
    """What is timed: ``run`` on operands that ``rows`` and ``weight`` make of floats."""

    rows: Callable[[Tensor], Operand]
    weight: Callable[[Tensor], Operand]
    run: Callable[[Operand, Operand], Tensor]


@dataclass(frozen=True)
class Result:
    """One product of ``M`` rows. ``times``: the time of each of PyTorch's over its own."""

    product: str
    N: int
    K: int
    M: int
    us: float
    times: dict[str, float]


def _rows(x: Tensor) -> Operand:
    return Operand(*quantize_rows(x, dtype=E4M3))


def _blocks(weight: Tensor) -> Operand:
    scale = block_scales(weight)
    return Operand(round_blocks(weight, scale), scale)


def _plain(x: Tensor) -> Operand:
    return Operand(x.to(E4M3), torch.ones((), device=x.device))


def _float(x: Tensor) -> Operand:
    return Operand(x, torch.ones((), device=x.device))


def _scaled(a: Operand, b: Operand) -> Tensor:
    return scaled_mm(a.values, b.values.t(), a.scale, b.scale, constant_b=True)


def _block_scaled(a: Operand, b: Operand) -> Tensor:
    return launcher.scaled_mm(a.values, b.values.t(), a.scale, b.scale, constant_b=True)


def _torch_scaled(a: Operand, b: Operand, fast: bool = False) -> Tensor:
    scale_a, scale_b = (a.scale[:, None], b.scale[None]) if a.scale.ndim else (a.scale, b.scale)
    return torch._scaled_mm(
        a.values, b.values.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _matmul(a: Operand, b: Operand) -> Tensor:
    return matmul(a.values, b.values.t(), out_dtype=torch.bfloat16)


PRODUCTS = {
    "fp8": Product(_rows, _rows, _scaled),
    "fp8-block": Product(lambda x: Operand(*quantize_groups(x)), _blocks, _block_scaled),
    "matmul fp8": Product(_plain, _plain, _matmul),
    "matmul": Product(_float, _float, _matmul),
}
DEFAULT, FAST, PLAIN, PLAIN_FAST, LINEAR = "default", "fast accumulation", "default, one", "fast, one", "F.linear"
PEERS = {
    DEFAULT: Product(_rows, _rows, _torch_scaled),
    FAST: Product(_rows, _rows, partial(_torch_scaled, fast=True)),
    PLAIN: Product(_plain, _plain, _torch_scaled),
    PLAIN_FAST: Product(_plain, _plain, partial(_torch_scaled, fast=True)),
    LINEAR: Product(_float, _float, lambda a, b: F.linear(a.values, b.values)),
}
BESIDE = {
    "fp8": (DEFAULT, FAST),
    "fp8-block": (DEFAULT, FAST),
    "matmul fp8": (PLAIN, PLAIN_FAST),
    "matmul": (LINEAR,),
}


def measure(
    shape: WeightShape, rows: Sequence[int], products: Sequence[str], effort: Effort, device: torch.device
) -> list[Result]:
    """The results of one weight: for each M, the products in order."""
    weight = random_operand(shape.N, shape.K, device)
    all_products = {one: PRODUCTS[one] for one in products}
    all_products |= {peer: PEERS[peer] for one in products for peer in BESIDE[one]}
    made: dict[Any, list[Operand]] = {}
    for one in all_products.values():
        if one.weight not in made:
            first = one.weight(weight)
            copies = copy_count(first.values.nbytes, device)
            made[one.weight] = [first, *(Operand(first.values.clone(), first.scale) for _ in range(copies - 1))]
    found = []
    for M in rows:
        x = random_operand(M, shape.K, device)
        passes = {}
        for name, one in all_products.items():
            a, copies_of_b = one.rows(x), made[one.weight]
            passes[name] = Pass(partial(one.run, a), copies_of_b, device)
            if name in products:
                out = passes[name].checked_output()
                error = largest_errors(a.to_float(), copies_of_b[0].to_float(), {name: out}, COLUMNS)[name]
                if not error <= MAX_ERROR:
                    raise ValueError(f"{name} is wrong: relative error {error:.3g} at {shape.N} x {shape.K}, {M}")
        seconds = median_seconds(passes, effort_for(M, effort, device), device)
        for name in products:
            times = {peer: seconds[peer] / seconds[name] for peer in BESIDE[name]}
            found.append(Result(name, *shape[1:], M, seconds[name] * 1e6, times))
    return found


def table(results: Sequence[Result]) -> Table:
    """A row for each product, M and product of PyTorch's: geometric means over the weights, and the least."""
    rows = []
    for product, M in dict.fromkeys((one.product, one.M) for one in results):
        own = [one for one in results if (one.product, one.M) == (product, M)]
        for peer in own[0].times:
            times = [one.times[peer] for one in own]
            rows.append([product, str(M), peer, f"{geometric_mean(times):.2f}", f"{min(times):.2f}"])
    return ["product", "M", "beside", "times it", "least"], rows


def main() -> None:
    """The command."""
    parser = command_line("fp8", __doc__)
    parser.add_argument("--product", nargs="+", choices=PRODUCTS, default=list(PRODUCTS), help="default: all")
    parser.add_argument("--shape", nargs="+", type=parse_shape, help="NxK; default: those of Llama 3 8B and 70B")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="M")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch multiplies fp8 with scales of rows on a GPU only, and there is none")
    device = torch.device("cuda")
    shapes = options.shape or [shape for shape in SHAPES if shape.family in SUMMARY_FAMILIES]
    results: list[Result] = []
    with torch.no_grad():
        for shape in shapes:
            effort = QUICK if options.quick else Effort()
            results += measure(shape, options.rows, options.product, effort, device)
    show(render(table(results), markdown=False), results, environment(device, options.commit), options.json)


if __name__ == "__main__":
    main()
