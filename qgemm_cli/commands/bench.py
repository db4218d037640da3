"""``qgemm bench``: times a model's linear layers on this machine, int8 and float side by side.

Weights and activations are random, in the model's sizes; every output is checked before it is timed. ``timing.py``
defines what a time is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qgemm import QuantLinear
from qgemm.checkpoint.errors import CheckpointError
from qgemm.device import find_device
from qgemm.kernels import has_int8_products
from qgemm_cli.check import largest_errors
from qgemm_cli.checkpoint import open_checkpoint
from qgemm_cli.layers import StoredLayer, find_layers
from qgemm_cli.output import print_lines, print_table, printable, progress_bar
from qgemm_cli.patterns import alike, pattern_of
from qgemm_cli.timing import QUICK, Bystanders, Effort, Pass, all_seconds, copy_count, spread

# The largest relative error of a row that counts as correct, on Gaussian data: rounding causes at most half of it.
MOST_ERROR = {"int8": 0.04, "bf16": 0.01, "fp32": 0.001}
# The spread of the middle half of a row's times, relative to their median, above which a warning is shown.
MOST_SPREAD = 0.2
DEFAULT_SHAPES = {"cuda": ("6144x4096", "4096x4096", "28672x4096", "4096x14336"), "cpu": ("1536x384", "4096x4096")}
"""Llama 3 8B on a GPU; on a CPU, where that takes minutes, MiniLM and the smallest Llama."""


@dataclass(frozen=True)
class Weights:
    """``count`` layers with weights ``[N, K]``, which ``name`` stands for."""

    name: str
    N: int
    K: int
    count: int


def bench(
    path: Path | None, shapes: Sequence[str], rows: Sequence[int], device_name: str | None, quick: bool
) -> dict[str, Any]:
    """Times the layers; returns the document that ``--json`` prints."""
    device = find_device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    weights = [parse_shape(shape) for shape in shapes]
    if path is not None:
        weights += shapes_of(path)
    if not weights:
        weights = [parse_shape(shape) for shape in DEFAULT_SHAPES[device.type]]
    results = []
    bystanders = Bystanders()
    with torch.no_grad(), progress_bar("time", len(weights) * len(rows), shown=True) as advance:
        for one in weights:
            results += _time_weights(one, rows, device, QUICK if quick else Effort(), advance)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "torch": torch.__version__,
        "model": None if path is None else str(path),
        "warnings": [*bystanders.complaints(), *_unsteady(results), *_without_int8(device)],
        "results": results,
        "totals": [_total(M, results) for M in rows],
    }


def parse_rows(text: str) -> list[int]:
    """``"1,16"`` as ``[1, 16]``; raises ``ValueError`` for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 8 and int(part) for part in parts):
        raise ValueError(f"--m is {text!r}; it must be numbers of at least 1, such as 1,16,256")
    return list(dict.fromkeys(map(int, parts)))


def parse_shape(text: str) -> Weights:
    """``"4096x14336"`` as a weight of ``N x K``; raises ``ValueError`` for anything else."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and 0 < len(part) < 8 for part in parts):
        raise ValueError(f"--shape is {text!r}; it must be NxK, such as 4096x14336")
    N, K = map(int, parts)
    if not N or not K:
        raise ValueError(f"--shape is {text!r}; N and K must be at least 1")
    return Weights(text, N, K, 1)


def shapes_of(path: Path) -> list[Weights]:
    """The weights of the linear layers in the checkpoint at ``path``: the quantized ones, or those in its blocks.

    A float checkpoint doesn't say what would be quantized. Heads, which stay in float, lie outside of the blocks, whose
    names contain a number. Raises ``CheckpointError`` if there are none.
    """
    checkpoint = open_checkpoint(path)
    linear = [
        layer
        for layer in find_layers(checkpoint)
        if layer.kind == "linear" and len(layer.shape) == 2 and min(layer.shape) > 0
    ]
    chosen = [layer for layer in linear if layer.is_quantized] or [
        layer for layer in linear if pattern_of(layer.name) != layer.name
    ]
    if not chosen:
        raise CheckpointError(f"{path} has no linear layers to time: name sizes with --shape NxK")
    groups = alike(chosen, lambda layer: layer.shape)
    return [
        Weights(_common_name(members), members[0].shape[0], members[0].shape[1], len(members)) for members in groups
    ]


def _common_name(layers: Iterable[StoredLayer]) -> str:
    """The name that the layers share within their blocks."""
    return ", ".join(dict.fromkeys(pattern_of(layer.name).rpartition("{}.")[2] for layer in layers))


def _time_weights(
    one: Weights, rows: Sequence[int], device: torch.device, effort: Effort, advance: Callable[[float], object]
) -> list[dict[str, Any]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight = torch.randn(one.N, one.K, device=device, dtype=dtype)
    linear = nn.Linear(one.K, one.N, bias=False, device="meta", dtype=dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    copies: dict[str, list[Any]] = {
        "int8": [QuantLinear.from_linear(linear) for _ in range(copy_count(one.N * one.K, device))],
        "bf16": [weight.bfloat16().clone() for _ in range(copy_count(2 * one.N * one.K, device))],
    }
    if device.type == "cpu":
        copies["fp32"] = [weight.clone() for _ in range(copy_count(4 * one.N * one.K, device))]
    results = []
    for M in rows:
        x = torch.randn(M, one.K, device=device, dtype=dtype)
        results.append(_time_product(one, M, x, weight, copies, device, effort))
        advance(1)
    return results


def _time_product(
    one: Weights,
    M: int,
    x: Tensor,
    weight: Tensor,
    copies: dict[str, list[Any]],
    device: torch.device,
    effort: Effort,
) -> dict[str, Any]:
    runs: dict[str, Callable[[Any], Tensor]] = {
        "int8": lambda layer: layer(x),
        "bf16": partial(F.linear, x.bfloat16()),
        "fp32": partial(F.linear, x),
    }
    passes = {name: Pass(runs[name], weights, device) for name, weights in copies.items()}
    errors = largest_errors(x, weight, {name: one.checked_output() for name, one in passes.items()})
    wrong = [name for name, error in errors.items() if not error <= MOST_ERROR[name]]
    seconds = all_seconds({name: one for name, one in passes.items() if name not in wrong}, effort, device)
    times = {name: statistics.median(seconds[name]) * 1e6 if name in seconds else None for name in passes}
    spreads = {name: spread(seconds[name]) if name in seconds else None for name in passes}
    sizes = {"name": one.name, "N": one.N, "K": one.K, "count": one.count, "M": M}
    return {**sizes, "us": times, "spread": spreads, "error": errors, "speedup": _speedups(times), "wrong": wrong}


def _speedups(times: dict[str, float | None]) -> dict[str, float | None]:
    """How many times as fast int8 is as each of the others."""
    int8 = times["int8"]
    others = {name: time for name, time in times.items() if name != "int8"}
    return {name: None if int8 is None or time is None else time / int8 for name, time in others.items()}


def _unsteady(results: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence, if times vary too much."""
    over = [result for result in results if (_largest_spread(result) or 0) > MOST_SPREAD]
    if not over:
        return []
    return [
        f"the times of {len(over)} of {len(results)} rows vary by more than {MOST_SPREAD:.0%} (interquartile range): "
        "something else ran, or clocks changed; measure again on a quiet machine"
    ]


def _without_int8(device: torch.device) -> list[str]:
    """A sentence, if the device doesn't multiply int8 faster than float32."""
    if device.type != "cpu" or has_int8_products():
        return []
    return ["this CPU has no int8 dot products (AVX512-VNNI or similar): int8 saves memory here, but no time"]


def _largest_spread(result: dict[str, Any]) -> float | None:
    """The largest spread of the times in one row; None for a total, and where nothing was timed."""
    return max((value for value in result.get("spread", {}).values() if value is not None), default=None)


def _total(M: int, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The time of all layers for M rows, for kinds that were timed for every layer."""
    members = [result for result in results if result["M"] == M]
    times: dict[str, float | None] = {}
    for name in members[0]["us"]:
        parts = [member["us"][name] for member in members]
        known = [part * member["count"] for part, member in zip(parts, members, strict=True) if part is not None]
        times[name] = sum(known) if len(known) == len(parts) else None
    return {"M": M, "layers": sum(member["count"] for member in members), "us": times, "speedup": _speedups(times)}


def show(document: dict[str, Any]) -> None:
    """Prints the document as text."""
    count = document["threads"]
    threads = "" if count is None else f", {count} thread{'s' * (count != 1)}"
    print_lines([f"{document['device']}{threads}, torch {document['torch']}; microseconds a layer"])
    names = list(document["results"][0]["us"])
    columns = (
        "layers",
        "count",
        "N x K",
        "M",
        *names,
        *(f"{name} / int8" for name in names if name != "int8"),
        "spread",
    )
    rows = []
    for result in document["results"]:
        label = (printable(_shortened(result["name"])), str(result["count"]), f"{result['N']} x {result['K']}")
        rows.append((*label, *_numbers(result, names)))
    if document["model"] is not None:
        rows += [("all of them", str(total["layers"]), "", *_numbers(total, names)) for total in document["totals"]]
    print_table(columns, rows, right=(1, *range(3, len(columns))))
    print_lines(f"warning: {warning}" for warning in document["warnings"])
    for result in document["results"]:
        for name in result["wrong"]:
            print_lines([f"problem: {name} at {result['N']} x {result['K']}, M = {result['M']} gives a wrong output"])


def _shortened(names: str) -> str:
    first, *others = names.split(", ")
    return f"{first} and {len(others)} more" if len(others) > 1 else names


def _numbers(result: dict[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    times = (result["us"][name] for name in names)
    speedups = ("" if speedup is None else f"{speedup:.2f}" for speedup in result["speedup"].values())
    largest = _largest_spread(result)
    return (
        str(result["M"]),
        *("wrong" if time is None else f"{time:,.1f}" for time in times),
        *speedups,
        "" if largest is None else f"{largest:.0%}",
    )
