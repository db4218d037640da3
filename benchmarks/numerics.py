"""What rounding to int8 and int4 does to numbers, measured.

Everything is random from a fixed seed, runs on the CPU in float32, and compares with float64. ``docs/numerics.md`` has
the tables and says what follows from them.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qgemm
from benchmarks.measure import relative_error
from benchmarks.models.shapes import ModelShape
from benchmarks.providers import linear_of
from benchmarks.tables import Table, render
from qgemm.kernels import quantize_rows, scaled_mm

SCHEMES = ("int8", "int8-hadamard", "int8-outliers-16", "int4")
DEPTHS = (1, 2, 4, 8, 16, 32)
ROWS, N, K = 128, 512, 2048


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables that the command line asks for, in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.numerics", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, action="append", help="(default: all)")
    for name in parser.parse_args(arguments).part or PARTS:
        print(f"### {name}\n\n{render(PARTS[name](), markdown=True)}\n")


@torch.no_grad()
def sums() -> Table:
    """By the length of the sum: what adding up costs, and what rounding the operands did before."""
    rows = []
    for length in (256, 1024, 4096, 16384, 65536):
        x, weight = _random(16, length), _random(64, length, seed=1)
        q, scale = quantize_rows(x)
        b, b_scale = quantize_rows(weight)
        same = (q.double() @ b.double().T) * scale.double()[:, None] * b_scale.double()
        ours = scaled_mm(q, b.T, scale, b_scale, out_dtype=torch.float32)
        exact = x.double() @ weight.double().T
        floats = [F.linear(x, weight), F.linear(x.bfloat16(), weight.bfloat16())]
        pairs = (ours, same), (floats[0], exact), (floats[1], exact), (ours, exact)
        rows.append([f"{length:,}", *(f"{relative_error(*each):.1e}" for each in pairs)])
    return ["K", "int8: sum and epilogue", "float32", "bfloat16", "int8: all of it"], rows


@torch.no_grad()
def distributions() -> Table:
    """By the distribution of activations: the relative error of a layer's output under every scheme."""
    generator = torch.Generator().manual_seed(2)
    normal = _random(ROWS, K)
    sign = torch.where(torch.rand(ROWS, K, generator=generator) < 0.5, -1.0, 1.0)
    inputs = {
        "uniform": torch.rand(ROWS, K, generator=generator) * 2 - 1,
        "normal": normal,
        "Laplace": sign * torch.empty(ROWS, K).exponential_(generator=generator),
        "Student's t, 3 degrees": normal / (_random(3, ROWS, K, seed=3).square().mean(0)).sqrt(),
        "normal, SiLU": F.silu(normal),
        "normal, 8 columns 10 times as large": _with_outliers(normal, 10),
        "normal, 8 columns 100 times as large": _with_outliers(normal, 100),
    }
    linear = linear_of(_random(N, K, seed=1))
    rows = []
    for name, x in inputs.items():
        exact = F.linear(x.double(), linear.weight.double())
        errors = [relative_error(_quantized(linear, scheme, x)(x), exact) for scheme in SCHEMES]
        rows.append([name, *(f"{error:.2%}" for error in errors)])
    return ["activations", *SCHEMES], rows


@torch.no_grad()
def magnitudes() -> Table:
    """By the magnitude of activations, over the range of float32: the error, and rows that aren't finite."""
    linear = linear_of(_random(N, K, seed=1))
    layer = _quantized(linear, "int8")
    x = _random(ROWS, K)
    rows = []
    for factor in (1e-38, 1e-30, 1e-10, 1.0, 1e10, 1e30, 1e35):
        scaled = x * factor
        out = layer(scaled)
        # float64 of both: squares of these leave the range of float32.
        error = relative_error(out, F.linear(scaled.double(), linear.weight.double()))
        shown = f"{error:.2%}" if error < torch.inf else "-"
        rows.append([f"{factor:.0e}", shown, f"{int((~out.isfinite()).any(1).sum())} of {ROWS}"])
    for name, value in (("one NaN", torch.nan), ("one Inf", torch.inf)):
        broken = x.clone()
        broken[5, 7] = value
        out = layer(broken)
        others = torch.equal(out[6:], layer(x)[6:]) and torch.equal(out[:5], layer(x)[:5])
        count = int((~out.isfinite()).all(1).sum())
        rows.append([name, "others: the same bits" if others else "others changed", f"{count} of {ROWS}"])
    zeros = layer(torch.zeros(ROWS, K))
    rows.append(["zeros", f"{float(zeros.abs().max()):.0%}", f"0 of {ROWS}"])
    return ["activations times", "relative error", "rows not finite"], rows


@torch.no_grad()
def batches() -> Table:
    """Whether a row's output depends on how many rows come with it: the largest difference, and how many differ."""
    linear = linear_of(_random(N, K, seed=1))
    layer, half = _quantized(linear, "int8"), copy.deepcopy(linear).bfloat16()
    x = _random(1024, K)
    alone = {"int8": layer(x[:1]), "float32": linear(x[:1]), "bfloat16": half(x[:1].bfloat16())}
    rows = []
    for count in (2, 16, 17, 64, 256, 1024):
        many = {"int8": layer(x[:count]), "float32": linear(x[:count]), "bfloat16": half(x[:count].bfloat16())}
        cells = [f"{int((many[name][:1] != alone[name]).sum())} of {N}" for name in alone]
        rows.append([str(count), *cells])
    return ["rows together", *(f"{name}: values that differ" for name in alone)], rows


@torch.no_grad()
def depth() -> Table:
    """By the number of transformer blocks: the relative error of the hidden states of a model with random weights."""
    config = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "vocab_size": 512}
    shape = ModelShape("random", "LlamaConfig", max(DEPTHS), {**config, "num_key_value_heads": 2})
    model = shape.build(torch.device("cpu"))
    ids = torch.randint(1, 512, (4, 64), generator=torch.Generator().manual_seed(0))

    def states(model: Any) -> list[Tensor]:
        found = model(ids, output_hidden_states=True).hidden_states
        return [found[place].double() for place in DEPTHS]

    wanted = states(copy.deepcopy(model).double())
    errors = {"bfloat16": states(copy.deepcopy(model).bfloat16())}
    for scheme in ("int8", "int4"):
        errors[scheme] = states(qgemm.quantize_model(copy.deepcopy(model), scheme, progress=False))
    # The last state is after the final norm.
    rows = [
        [str(count), *(f"{relative_error(found[place], wanted[place]):.2%}" for found in errors.values())]
        for place, count in enumerate(DEPTHS)
    ]
    return ["blocks", *errors], rows


@torch.no_grad()
def clipping() -> Table:
    """Static scales: the error where inputs are larger, or smaller, than those that the scale was found on."""
    linear = linear_of(_random(N, K, seed=1))
    x = _random(ROWS, K)
    static, dynamic = _quantized(linear, "int8-static", x), _quantized(linear, "int8")
    rows = []
    for factor in (0.01, 0.1, 0.5, 1.0, 1.5, 2.0, 4.0):
        exact = F.linear((x * factor).double(), linear.weight.double())
        errors = [relative_error(layer(x * factor), exact) for layer in (static, dynamic)]
        rows.append([f"{factor:g}", *(f"{error:.2%}" for error in errors)])
    return ["inputs times", "int8-static", "int8"], rows


@torch.no_grad()
def weights() -> Table:
    """By the distribution of weights: the relative error of the weight alone."""
    normal = _random(N, K)
    kinds = {
        "normal": normal,
        "Student's t, 3 degrees": normal / (_random(3, N, K, seed=3).square().mean(0)).sqrt(),
        "normal, rows from 0.01 to 100 times": normal * torch.logspace(-2, 2, N)[:, None],
        "normal, columns from 0.01 to 100 times": normal * torch.logspace(-2, 2, K),
    }
    rows = []
    for name, weight in kinds.items():
        linear = linear_of(weight)
        found = [_quantized(linear, scheme).dequantize().weight for scheme in ("int8", "int4")]
        rows.append([name, *(f"{relative_error(each, weight.double()):.2%}" for each in found)])
    return ["weights", "int8, a scale a row", "int4, a scale for 128 of a row"], rows


PARTS: dict[str, Callable[[], Table]] = {
    part.__name__: part for part in (sums, distributions, magnitudes, batches, depth, clipping, weights)
}


def _quantized(linear: nn.Linear, scheme: str, x: Tensor | None = None) -> Any:
    """A quantized copy of ``linear``; schemes that need data are calibrated on ``x``."""
    model = nn.Sequential(copy.deepcopy(linear))
    needs_data = scheme.startswith(("int8-static", "int8-outliers"))
    qgemm.quantize_model(model, scheme, calibration=[x] if needs_data else None, progress=False)
    return model[0]


def _with_outliers(x: Tensor, factor: float) -> Tensor:
    x = x.clone()
    x[:, :: K // 8] *= factor
    return x


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


if __name__ == "__main__":
    main()
