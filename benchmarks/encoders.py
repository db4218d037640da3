"""Times encoders, as embedding models are, on a GPU.

Models have random weights in bfloat16. The ways to run each take turns: as it is, quantized to int8, and fused as
well, and the first and the last of these with ``fast_forward``. Of a call are measured what it takes from an idle GPU
to an idle GPU, with the host's time, and what its kernels take, in a CUDA graph. The last tokens of all sequences but
one's are padding, so that attention has a mask.

Before they are timed, the last hidden states are compared with those of the float model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import qgemm
from benchmarks.measure import relative_error
from benchmarks.models.shapes import MODELS, ModelShape
from benchmarks.results import command_line, environment, show
from benchmarks.shapes import parse_pair
from benchmarks.tables import Table, render
from benchmarks.timing import median_seconds
from qgemm_cli.timing import QUICK, Effort, Pass

_LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
ENCODERS = {
    shape.name: shape
    for shape in (
        MODELS["minilm-l6"],
        MODELS["bert-base"],
        ModelShape("xlm-roberta-large", "XLMRobertaConfig", 24, _LARGE, is_decoder=False),
    )
}
SIZES = ((1, 16), (8, 64), (32, 128), (64, 384))
PADDING = 5  # tokens
MAX_ERROR = 0.1
"""Of all hidden states, relative to those of the float model."""
COPIES = 4
Run = Callable[[dict[str, Any]], Tensor]
FLOAT = "bfloat16"
WAYS: dict[str, Callable[[Any], object]] = {
    FLOAT: lambda model: model,
    f"{FLOAT}, fast_forward": qgemm.fast_forward,
    "int8": qgemm.quantize_model,
    "int8, fused": partial(qgemm.quantize_model, fuse=True),
    "int8, fused, fast_forward": lambda model: qgemm.fast_forward(qgemm.quantize_model(model, fuse=True)),
}


@dataclass(frozen=True)
class Result:
    """One way on ``batch`` sequences of ``length`` tokens: milliseconds of a call, and of its kernels."""

    model: str
    way: str
    batch: int
    length: int
    call_ms: float
    kernels_ms: float
    error: float


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Measures what the command line asks for, prints it, and writes the JSON file if one is named."""
    parser = command_line("encoders", __doc__)
    parser.add_argument("--model", choices=list(ENCODERS), action="append", help="(default: all)")
    parser.add_argument("--size", type=parse_pair, action="append", metavar="BxL", help="sequences and their length")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this needs a GPU; python -m benchmarks.models times encoders on a CPU")
    device = torch.device("cuda", torch.cuda.current_device())
    results: list[Result] = []
    with torch.inference_mode():
        for name in args.model or ENCODERS:
            results += measure(ENCODERS[name], args.size or SIZES, QUICK if args.quick else Effort(), device)
    show(render(table(results), markdown=False), results, environment(device, args.commit), args.json)
    return results


def measure(shape: ModelShape, sizes: Sequence[tuple[int, int]], effort: Effort, device: torch.device) -> list[Result]:
    """All ways on all sizes; raises ``ValueError`` for a wrong output."""
    models = {way: shape.build(device) for way in WAYS}
    for way, model in models.items():
        WAYS[way](model)
    results = []
    for batch, length in sizes:
        given = [inputs(batch, length, device) for _ in range(COPIES)]
        runs = {way: partial(hidden_states, model) for way, model in models.items()}
        found = check_and_time(runs, given, dict.fromkeys(runs, MAX_ERROR), effort, device)
        results += [Result(shape.name, way, batch, length, *figures) for way, figures in found.items()]
    return results


def inputs(batch: int, length: int, device: torch.device) -> dict[str, Tensor]:
    """Tokens, and the mask of those that count."""
    ids = torch.randint(5, 1000, (batch, length), device=device)
    mask = torch.ones_like(ids)
    mask[1:, -PADDING:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def hidden_states(model: Any, given: dict[str, Tensor]) -> Tensor:
    """The last ones."""
    out: Tensor = model(**given).last_hidden_state
    return out


def check_and_time(
    runs: Mapping[str, Run],
    given: Sequence[dict[str, Any]],
    limits: Mapping[str, float],
    effort: Effort,
    device: torch.device,
) -> dict[str, tuple[float, float, float]]:
    """By way: ms of a call, ms of its kernels, and the relative error of the output, at most that of ``limits``."""
    wanted = runs[FLOAT](given[0])
    errors = {way: relative_error(run(given[0]), wanted) for way, run in runs.items()}
    for way, error in errors.items():
        if not error <= limits[way]:
            raise ValueError(f"wrong output of {way}: relative error {error:.3g}, at most {limits[way]}")
    calls = call_seconds(runs, given, effort)
    kernels = median_seconds({way: Pass(run, given, device) for way, run in runs.items()}, effort, device)
    return {way: (calls[way] * 1e3, kernels[way] * 1e3, errors[way]) for way in runs}


def call_seconds(runs: Mapping[str, Run], given: Sequence[dict[str, Any]], effort: Effort) -> dict[str, float]:
    """Seconds of one call from an idle device to an idle device: medians of calls in turn."""
    times: dict[str, list[float]] = {way: [] for way in runs}
    for turn in range(10 * effort.rounds):
        for way, run in runs.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run(given[turn % len(given)])
            torch.cuda.synchronize()
            times[way].append(time.perf_counter() - start)
    return {way: statistics.median(values) for way, values in times.items()}


def beside(of_float: Any, one: Any) -> list[str]:
    """Cells with the milliseconds of ``one``, a call's and its kernels', each with how many times ``of_float``'s."""
    pairs = ((of_float.call_ms, one.call_ms), (of_float.kernels_ms, one.kernels_ms))
    return [cell for base, ms in pairs for cell in (f"{ms:.2f}", f"{base / ms:.2f}")]


def table(results: Sequence[Result]) -> Table:
    """A row for each model, size and way."""
    floats = {(one.model, one.batch, one.length): one for one in results if one.way == FLOAT}
    rows = []
    for one in results:
        times = beside(floats[one.model, one.batch, one.length], one)
        rows.append([one.model, f"{one.batch} x {one.length}", one.way, *times, f"{one.error:.3f}"])
    return ["model", "tokens", "", "call, ms", "times", "kernels, ms", "times", "error"], rows


if __name__ == "__main__":
    main()
