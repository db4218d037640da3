"""Times quantized layers of any scheme beside float ones.

A measured pass is a run of calls over copies of the weight, so that each call reads its weight from memory. On a GPU
passes are CUDA graphs; the layers take turns. Before they are timed, whole outputs are compared with the product in
float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import HOST_SHAPE, effort_for, random_operand
from benchmarks.providers import linear_of
from benchmarks.results import command_line, environment, show
from benchmarks.shapes import CPU_SHAPES, SHAPES, SUMMARY_FAMILIES, WeightShape, parse_shape
from benchmarks.tables import Table, render
from benchmarks.timing import host_seconds, median_seconds
from qgemm.nn.kinds import linear_class
from qgemm.nn.linear_layer import LinearLayer
from qgemm.scheme import resolve_scheme
from qgemm_cli.check import largest_errors
from qgemm_cli.timing import QUICK, Effort, Pass, copy_count

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
HOST_ROWS = (1, 16, 256)
MAX_ERROR, MAX_ERROR_OF_QUANTIZED_ROWS, MAX_ERROR_OF_FP8_ROWS = 0.01, 0.03, 0.04
"""Relative, of a layer's output beside float64 products of its input with the weight that it stores. Rounding the
input to e4m3 makes 0.0265 on average, and 0.033 in ``COLUMNS`` outputs of one of thousands of rows."""
COLUMNS = 512
FLOAT = "float"


@dataclass(frozen=True)
class Result:
    """One scheme on ``M`` rows. ``times``: a float layer's time over its own; ``tb_per_s``: of the stored weight."""

    scheme: str
    N: int
    K: int
    M: int
    us: float
    times: float
    tb_per_s: float
    error: float


def measure(
    shape: WeightShape, rows: Sequence[int], schemes: Sequence[str], effort: Effort, device: torch.device
) -> list[Result]:
    """The results of one weight: for each M, the schemes in order."""
    weight = random_operand(shape.N, shape.K, device)
    linear = linear_of(weight)
    copies: dict[str, list[Any]] = {FLOAT: [weight.clone() for _ in range(copy_count(weight.nbytes, device))]}
    exact, bound = {}, {}
    for scheme in schemes:
        kind = linear_class(scheme)
        layer = kind.from_linear(linear, scheme)
        count = copy_count(layer.weight.nbytes, device)
        copies[scheme] = [layer, *(kind.from_linear(linear, scheme) for _ in range(count - 1))]
        bound[scheme] = _max_error(scheme)
        exact[scheme] = layer
    found = []
    for M in rows:
        x = random_operand(M, shape.K, device)
        passes = {FLOAT: Pass(partial(nn.functional.linear, x), copies[FLOAT], device)}
        errors = {}
        for scheme in schemes:
            one = passes[scheme] = Pass(partial(_run, x), copies[scheme], device)
            errors[scheme] = _error(one.checked_output(), x, exact[scheme])
            if not errors[scheme] <= bound[scheme]:
                raise ValueError(
                    f"{scheme} is wrong: relative error {errors[scheme]:.3g} at {shape.N} x {shape.K}, {M}"
                )
        seconds = median_seconds(passes, effort_for(M, effort, device), device)
        for scheme in schemes:
            time, stored = seconds[scheme], exact[scheme].weight.nbytes + exact[scheme].weight_scale.nbytes
            rate = stored / time / 1e12
            found.append(Result(scheme, *shape[1:], M, time * 1e6, seconds[FLOAT] / time, rate, errors[scheme]))
    return found


def measure_host(schemes: Sequence[str], device: torch.device) -> dict[str, dict[int, float]]:
    """Microseconds of the host for one eager call of each layer, by scheme, then by rows of ``HOST_ROWS``."""
    linear = linear_of(random_operand(HOST_SHAPE.N, HOST_SHAPE.K, device))
    layers: dict[str, nn.Module] = {FLOAT: linear} | {
        one: linear_class(one).from_linear(linear, one) for one in schemes
    }
    found: dict[str, dict[int, float]] = {name: {} for name in layers}
    for M in HOST_ROWS:
        x = random_operand(M, HOST_SHAPE.K, device)
        for name, seconds in host_seconds({name: partial(layer, x) for name, layer in layers.items()}).items():
            found[name][M] = seconds * 1e6
    return found


def _max_error(scheme: str) -> float:
    activation = resolve_scheme(scheme).activation
    if activation is None:
        return MAX_ERROR
    return MAX_ERROR_OF_FP8_ROWS if activation.format.storage.is_floating_point else MAX_ERROR_OF_QUANTIZED_ROWS


def _run(x: Tensor, layer: LinearLayer) -> Tensor:
    out: Tensor = layer(x)
    return out


def _error(out: Tensor, x: Tensor, layer: LinearLayer) -> float:
    """The largest relative error of a row of the output in ``COLUMNS`` columns: so no tile is overlooked."""
    return largest_errors(x, layer.dequantize().weight.detach(), {"layer": out}, COLUMNS)["layer"]


def table(results: Sequence[Result]) -> Table:
    """A row for each scheme and M: geometric means over the weights, and the least."""
    header = ["scheme", "M", "times float", "least", "TB/s of the weight, most"]
    rows = []
    for scheme, M in dict.fromkeys((one.scheme, one.M) for one in results):
        own = [one for one in results if (one.scheme, one.M) == (scheme, M)]
        times = [one.times for one in own]
        most = max(one.tb_per_s for one in own)
        rows.append([scheme, str(M), f"{geometric_mean(times):.2f}", f"{min(times):.2f}", f"{most:.2f}"])
    return header, rows


def host_table(found: dict[str, dict[int, float]]) -> Table:
    """A row for each layer: microseconds by M."""
    rows = [[name, *(f"{us:.1f}" for us in by_rows.values())] for name, by_rows in found.items()]
    return ["host, us a call", *(f"M = {M}" for M in HOST_ROWS)], rows


def main() -> None:
    """The command."""
    parser = command_line("weight_only", __doc__)
    parser.add_argument("--scheme", nargs="+", default=["int4", "int8-weight"], help="default: int4 int8-weight")
    parser.add_argument("--shape", nargs="+", type=parse_shape, help="NxK; default: those of Llama 3 8B and 70B")
    parser.add_argument("--rows", nargs="+", type=int, help="M")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    llama = [shape for shape in SHAPES if shape.family in SUMMARY_FAMILIES]
    shapes = options.shape or (llama if device.type == "cuda" else CPU_SHAPES)
    rows = options.rows or (ROWS if device.type == "cuda" else ROWS[:3])
    results: list[Result] = []
    with torch.no_grad():
        for shape in shapes:
            results += measure(shape, rows, options.scheme, QUICK if options.quick else Effort(), device)
    tables, host = [table(results)], {}
    if device.type == "cuda":
        host = measure_host(options.scheme, device)
        tables.append(host_table(host))
    text = "\n".join(render(each, markdown=False) for each in tables)
    show(text, results, environment(device, options.commit), options.json, host=host)


if __name__ == "__main__":
    main()
