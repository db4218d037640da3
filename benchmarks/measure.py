"""Measures: providers on a table of shapes, their host time, and the quantization of rows."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import first_line
from benchmarks.providers import Provider
from benchmarks.results import Measurement, Quantization
from benchmarks.roofline import KINDS, Roofline, bytes_moved, operations
from benchmarks.shapes import WeightShape
from benchmarks.timing import SUSTAINED, host_seconds, median_seconds
from qgemm.kernels import quantize_rows
from qgemm.kernels.reference import quantize_rows_reference
from qgemm_cli.check import largest_errors
from qgemm_cli.timing import Effort, Pass, copy_count

HOST_SHAPE = WeightShape("host", 1024, 1024)
HOST_ROWS = (1, 16, 256, 2048)
BUSY_ROWS = 256
"""From so many on, the tensor cores of a GPU are busy, not its memory."""


def measure_shape(
    shape: WeightShape,
    rows: Sequence[int],
    providers: Sequence[Provider],
    levels: Sequence[str],
    roofline: Roofline,
    effort: Effort,
    device: torch.device,
) -> Iterator[list[Measurement]]:
    """The measurements of one weight shape, a list for each M. The copies of the weight are made once."""
    weight = random_operand(shape.N, shape.K, device)
    weights: dict[str, list[Any]] = {}
    failed: dict[str, str] = {}
    for provider in providers:
        key = _key(provider)
        try:
            count = copy_count(weight.numel() * provider.weight_dtype.itemsize, device)
            weights[key] = [provider.prepare_weight(weight) for _ in range(count)]
        except Exception as error:  # a provider that can't take a shape is a line in the results
            failed[key] = first_line(error)
    for M in rows:
        yield _measure_size(shape, M, weight, weights, failed, providers, levels, roofline, effort, device)


def _measure_size(
    shape: WeightShape,
    M: int,
    weight: Tensor,
    weights: dict[str, list[Any]],
    failed: dict[str, str],
    providers: Sequence[Provider],
    levels: Sequence[str],
    roofline: Roofline,
    effort: Effort,
    device: torch.device,
) -> list[Measurement]:
    x = random_operand(M, shape.K, device)
    reasons = dict(failed)
    passes: dict[str, Pass] = {}
    outputs: dict[str, Tensor] = {}
    for provider in providers:
        key = _key(provider)
        if key in reasons:
            continue
        try:
            a = provider.prepare_input(x)
            one = Pass(partial(provider.run, a), weights[key], device)
            outputs[key] = provider.finish(one.checked_output(), a, weights[key][0])
            passes[key] = one
        except Exception as error:
            reasons[key] = first_line(error)
    errors = largest_errors(x, weight, outputs)
    outputs.clear()
    for provider in providers:
        key = _key(provider)
        if key in passes and not errors[key] <= provider.max_error:
            reasons[key] = f"wrong output: relative error {errors[key]:.3g}, at most {provider.max_error} is right"
            del passes[key]
    seconds = median_seconds(passes, effort_for(M, effort, device), device)
    return [
        _measurement(
            provider,
            level,
            shape,
            M,
            seconds.get(_key(provider)),
            errors.get(_key(provider)),
            roofline,
            reasons.get(_key(provider)),
        )
        for level in levels
        for provider in providers
        if level in provider.levels
    ]


def _measurement(
    provider: Provider,
    level: str,
    shape: WeightShape,
    M: int,
    seconds: float | None,
    error: float | None,
    roofline: Roofline,
    reason: str | None,
) -> Measurement:
    _, N, K = shape
    if seconds is None:
        return Measurement(provider.name, level, *shape, M, error=error, reason=reason)
    ops = operations(M, N, K)
    moved = bytes_moved(M, N, K, provider.input_dtype, provider.weight_dtype, provider.output_dtype)
    return Measurement(
        provider.name,
        level,
        *shape,
        M,
        us=seconds * 1e6,
        error=error,
        tops=ops / seconds / 1e12,
        tb_per_s=moved / seconds / 1e12,
        share=roofline.limit(ops, moved, KINDS[provider.weight_dtype]) / seconds,
    )


def measure_quantization(M: int, K: int, bandwidth: float, effort: Effort, device: torch.device) -> Quantization:
    """``quantize_rows`` of inputs ``[M, K]`` that come from memory; ``bandwidth``: a copy's bytes a second.

    Raises ``ValueError`` if an output differs from the reference in any bit.
    """
    x = random_operand(M, K, device)
    inputs = [x.clone() for _ in range(copy_count(x.nbytes, device))]
    one = Pass(lambda x: quantize_rows(x)[0], inputs, device)
    q, scale = quantize_rows(x)
    for found, expected in zip((q, scale), quantize_rows_reference(x), strict=True):
        if not torch.equal(found, expected):
            raise ValueError(f"wrong output of quantize_rows for {M} x {K}")
    if not torch.equal(one.checked_output(), q):
        raise ValueError(f"other output of quantize_rows for {M} x {K} when it was timed")
    seconds = median_seconds({"quantize_rows": one}, effort, device)["quantize_rows"]
    rate = (x.nbytes + q.nbytes + scale.nbytes) / seconds
    return Quantization(M, K, seconds * 1e6, rate / 1e12, rate / bandwidth)


def measure_host(providers: Sequence[Provider], device: torch.device) -> dict[str, dict[str, float]]:
    """Microseconds of the host for one eager call of each layer, by provider, then by rows of ``HOST_ROWS``."""
    weight = random_operand(HOST_SHAPE.N, HOST_SHAPE.K, device)
    found: dict[str, dict[str, float]] = {}
    for M in HOST_ROWS:
        x = random_operand(M, HOST_SHAPE.K, device)
        runs = {}
        for provider in providers:
            if "layer" not in provider.levels:
                continue
            try:
                a, b = provider.prepare_input(x), provider.prepare_weight(weight)
                provider.run(a, b)
            except Exception as error:
                print(f"host, {provider.name}, M = {M}: left out ({first_line(error)})")
                continue
            runs[provider.name] = partial(provider.run, a, b)
        for name, seconds in host_seconds(runs).items():
            found.setdefault(name, {})[str(M)] = seconds * 1e6
    return found


def effort_for(M: int, effort: Effort, device: torch.device) -> Effort:
    """``effort``; in place of the usual one ``SUSTAINED``, if ``M`` rows keep a GPU's tensor cores busy."""
    return SUSTAINED if M >= BUSY_ROWS and device.type == "cuda" and effort == Effort() else effort


def relative_error(out: Tensor, wanted: Tensor) -> float:
    """``|out - wanted| / |wanted|`` over all values, in float64."""
    wanted = wanted.double()
    return float((out.double() - wanted).norm() / wanted.norm())


def random_operand(rows: int, columns: int, device: torch.device) -> Tensor:
    """Standard normal values ``[rows, columns]``: bfloat16 on a GPU, float32 on a CPU."""
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)


def _key(provider: Provider) -> str:
    return f"{provider.name}, {' and '.join(provider.levels)}"
