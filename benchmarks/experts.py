"""Times qgemm's experts beside transformers' in bfloat16.

transformers' module is the model's own, by ``grouped_mm``, and for few tokens by ``batched_mm`` too; the faster one
counts. qgemm's is ``QuantExperts`` made of it.

A measured pass is a run of calls over copies of the experts' weights and over routings, so that each call reads the
experts that it needs from memory. Tokens are standard normal, weights normal and small enough that the output is about
as large as the input; a random router's softmax chooses. Both sides get bfloat16 tokens and the same routing, with the
router's weights in the dtype that the model's router gives.

Before anything is timed, rows of both outputs are compared with a float32 computation from the bfloat16 weights.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.results import command_line, environment, write_results
from benchmarks.roofline import Roofline, known_peaks
from benchmarks.tables import render
from benchmarks.timing import copy_bandwidth, median_seconds
from qgemm.nn import QuantExperts
from qgemm.nn.float_experts import FloatExperts, describe_experts
from qgemm.numerics.groups import SCALE_DTYPES
from qgemm.scheme import resolve_scheme
from qgemm_cli.timing import QUICK, ROTATED_BYTES, Effort, Pass

TOKENS = (1, 16, 2048)
MOST_BATCHED_TOKENS = 16
"""``batched_mm`` copies an expert's weights for each pair of a token and an expert."""
LARGEST_ERRORS = {"qgemm": 0.08, "grouped_mm": 0.015, "batched_mm": 0.015}
"""Relative errors of a row that count as right: about twice what rounding makes. A row of products of gates and ups has
outliers, so int8 is coarser there than for one layer."""
LARGEST_ERROR_OF_4_BITS = 0.5
CHECKED_ROWS = 16
MOST_ROUTINGS = 64


class Model(NamedTuple):
    """The experts of a model. ``config``: that of transformers, by name, with what it calls its sizes."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    weights_dtype: torch.dtype
    """Of the router's weights."""
    module: str
    experts_class: str
    config_class: str
    config: dict[str, int]


MODELS = (
    Model(
        "mixtral-8x7b", 8, 2, 4096, 14336, torch.float32, "mixtral", "MixtralExperts", "MixtralConfig",
        {"num_local_experts": 8, "hidden_size": 4096, "intermediate_size": 14336},
    ),
    Model(
        "qwen3-30b-a3b", 128, 8, 2048, 768, torch.bfloat16, "qwen3_moe", "Qwen3MoeExperts", "Qwen3MoeConfig",
        {"num_experts": 128, "hidden_size": 2048, "moe_intermediate_size": 768},
    ),
    Model(
        "gpt-oss-20b", 32, 4, 2880, 2880, torch.bfloat16, "gpt_oss", "GptOssExperts", "GptOssConfig",
        {"num_local_experts": 32, "hidden_size": 2880, "intermediate_size": 2880},
    ),
)  # fmt: skip

Routing = tuple[Tensor, Tensor, Tensor]
"""Tokens, the experts that they go to, and with which weights."""
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Result:
    """One side on one model's experts; times in microseconds, ``eager_us`` with the host's."""

    model: str
    tokens: int
    provider: str
    us: float
    eager_us: float
    error: float
    active_experts: float
    tb_per_s: float
    tops: float
    share: float


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Measures what the command line asks for, prints it, and writes the JSON file if one is named."""
    parser = command_line("experts", __doc__)
    parser.add_argument("--model", choices=[model.name for model in MODELS], action="append", help="(default: all)")
    parser.add_argument("--tokens", type=int, action="append", help="(default: 1, 16 and 2,048)")
    parser.add_argument("--scheme", default="int8", help="of qgemm's experts (default: int8)")
    parser.add_argument("--breakdown", action="store_true", help="also what each kernel of a call takes")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.experts times kernels on a GPU, and there is none")
    device = torch.device("cuda", torch.cuda.current_device())
    about = environment(device, args.commit)
    roofline = Roofline(copy_bandwidth(device), known_peaks(about["device"]))
    results: list[Result] = []
    kernels: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for model in MODELS:
            if args.model and model.name not in args.model:
                continue
            for found, parts in measure(
                model, args.tokens or TOKENS, QUICK if args.quick else Effort(), roofline, args.breakdown, args.scheme
            ):
                results += found
                kernels |= parts
                write_results(args.json, results, about, bandwidth=roofline.bandwidth, kernels_us=kernels)
            torch.cuda.empty_cache()
    print(f"{about['device']}, torch {torch.__version__}, {roofline.bandwidth / 1e12:.2f} TB/s copied")
    print(report(results))
    for name, times in kernels.items():
        print(f"{name}: " + ", ".join(f"{kernel} {us:.1f}" for kernel, us in times.items()))
    return results


def measure(
    model: Model, tokens: Sequence[int], effort: Effort, roofline: Roofline, breakdown: bool, scheme: str = "int8"
) -> Iterator[tuple[list[Result], dict[str, dict[str, float]]]]:
    """The results of one model, for one number of tokens after another."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    floats = float_layer(model, device)
    values_of_expert = sum(weight[0].numel() for weight in floats.parameters() if weight.ndim == 3)
    count = max(2, min(4, int(8e9 / (2 * model.num_experts * values_of_expert))))
    quantized = QuantExperts.from_experts(floats, scheme)
    float_layers = [floats, *(copy.deepcopy(floats) for _ in range(count - 1))]
    layers: dict[str, list[Layer]] = {
        "qgemm": [quantized, *(copy.deepcopy(quantized) for _ in range(count - 1))],
        "grouped_mm": list(float_layers),
    }
    layers["batched_mm"] = [by_batches(layer) for layer in float_layers]
    for T in tokens:
        calls = int(ROTATED_BYTES["cuda"] / (values_of_expert * min(T * model.top_k, model.num_experts)))
        routings = [route(model, T, device) for _ in range(min(max(calls, count), MOST_ROUTINGS))]
        active = sum(index.unique().numel() for _, index, _ in routings) / len(routings)
        passes: dict[str, Pass] = {}
        eager: dict[str, float] = {}
        errors: dict[str, float] = {}
        parts: dict[str, dict[str, float]] = {}
        providers = [name for name in layers if name != "batched_mm" or T <= MOST_BATCHED_TOKENS]
        for name in providers:
            copies = layers[name]
            calls_of_pass = [(copies[i % count], routings[i]) for i in range(len(routings))]
            eager[name] = eager_seconds(calls_of_pass)
            passes[name] = Pass(lambda call: call[0](*call[1]), calls_of_pass, device)
            last = calls_of_pass[(passes[name].calls - 1) % len(calls_of_pass)][1]
            errors[name] = largest_error(passes[name].checked_output(), last, floats)
            is_fine = name != "qgemm" or resolve_scheme(scheme).weight.format.bits == 8
            if not errors[name] <= (LARGEST_ERRORS[name] if is_fine else LARGEST_ERROR_OF_4_BITS):
                raise ValueError(f"{name} is wrong on {model.name}, {T} tokens: relative error {errors[name]:.3g}")
            if breakdown:
                parts[f"{model.name} {T} {name}"] = kernel_times(calls_of_pass[:8])
        seconds = median_seconds(passes, effort, device)
        yield (
            [
                result(
                    model, T, name, seconds[name], eager[name], errors[name], active, roofline, values_of_expert, scheme
                )
                for name in providers
            ],
            parts,
        )


def result(
    model: Model,
    T: int,
    provider: str,
    seconds: float,
    eager: float,
    error: float,
    active: float,
    roofline: Roofline,
    values_of_expert: int,
    scheme: str = "int8",
) -> Result:
    """What was measured, with rates: of the active experts' weights and the tokens, once each."""
    itemsize, kind = (2.0, "bf16") if provider != "qgemm" else _stored(scheme)
    moved = active * values_of_expert * itemsize + 2 * T * model.hidden * 2
    operations = 2.0 * T * model.top_k * values_of_expert
    share = roofline.limit(operations, moved, kind) / seconds
    return Result(
        model.name, T, provider, seconds * 1e6, eager * 1e6, error, active,
        moved / seconds / 1e12, operations / seconds / 1e12, share,
    )  # fmt: skip


def _stored(scheme: str) -> tuple[float, str]:
    """Bytes of a weight in ``scheme``, and in what it is multiplied."""
    found = resolve_scheme(scheme)
    form, size = found.weight.format, found.weight.group_size
    of_scale = SCALE_DTYPES[found.weight.scale_dtype].itemsize / size if size else 0.0
    return form.bits / 8 + of_scale, "int8" if found.activation is not None else "bf16"


def route(model: Model, T: int, device: torch.device) -> Routing:
    """Tokens and their experts, as a softmax router with random logits chooses them."""
    probabilities = torch.randn(T, model.num_experts, device=device).softmax(dim=-1)
    top, index = probabilities.topk(model.top_k, dim=-1)
    top = top / top.sum(dim=-1, keepdim=True)
    x = torch.randn(T, model.hidden, device=device, dtype=torch.bfloat16)
    return x, index, top.to(model.weights_dtype)


def float_layer(model: Model, device: torch.device) -> nn.Module:
    """transformers' experts of the model in bfloat16, with its implementation by ``grouped_mm``."""
    import importlib

    package = importlib.import_module(f"transformers.models.{model.module}.modeling_{model.module}")
    import transformers

    config: Any = getattr(transformers, model.config_class)(**model.config)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module: nn.Module = getattr(package, model.experts_class)(config)
    for name, parameter in list(module.named_parameters()):
        value = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        rows = model.intermediate if name.startswith("down") else model.hidden
        for expert in value:
            expert.normal_(std=rows**-0.5)
        setattr(module, name, nn.Parameter(value, requires_grad=False))
    return module


def by_batches(layer: nn.Module) -> nn.Module:
    """``layer``, with the same weights, by ``batched_mm``."""
    other, config = copy.copy(layer), copy.copy(layer.config)
    config._experts_implementation = "batched_mm"  # type: ignore[union-attr]
    other.config = config
    return other


def largest_error(out: Tensor, routing: Routing, floats: nn.Module) -> float:
    """The largest relative error of some rows, the first and the last among them, against float32."""
    x, index, top = routing
    T, source = x.shape[0], describe_experts(floats)
    largest = 0.0
    for row in sorted({round(i * (T - 1) / (CHECKED_ROWS - 1)) for i in range(CHECKED_ROWS)}):
        wanted = torch.zeros(x.shape[1], device=x.device, dtype=torch.float64)
        for expert, weight in zip(index[row].tolist(), top[row].double(), strict=True):
            h = source.activation(_product(floats, source, "gate_up_proj", expert, x[row].float())[None])[0]
            wanted += weight * _product(floats, source, "down_proj", expert, h).double()
        error = ((out[row].double() - wanted).norm() / wanted.norm()).item()
        largest = max(largest, error) if error < torch.inf else torch.inf
    return largest


def _product(floats: nn.Module, source: FloatExperts, name: str, expert: int, x: Tensor) -> Tensor:
    out = source.rows_of(name, floats.get_parameter(source.parameters[name]), expert).float() @ x
    if source.has_bias:
        bias = floats.get_parameter(source.parameters[f"{name}_bias"])
        out += source.bias_of(f"{name}_bias", bias)[expert].float()
    return out


def eager_seconds(calls: Sequence[tuple[Layer, Routing]]) -> float:
    """Seconds of a call without a graph: runs of at least 50, the median of 5."""
    calls = list(calls) * -(-50 // len(calls))
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for layer, routing in calls:
            layer(*routing)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / len(calls))
    return sorted(times[1:])[2]  # the first one warms up


def kernel_times(calls: Sequence[tuple[Layer, Routing]]) -> dict[str, float]:
    """Microseconds of each kernel in a call, by name, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for layer, routing in calls:
            layer(*routing)
        torch.cuda.synchronize()
    return {
        event.key.replace("void ", "")[:48]: event.self_device_time_total / len(calls)
        for event in profiler.key_averages()
    }


def report(results: Sequence[Result]) -> str:
    """The table: times of both, transformers' faster one, and how many times as fast qgemm is."""
    header = ["experts", "tokens", "active", "bf16 us", "qgemm us", "times", "eager bf16", "eager qgemm", "times"]
    header += ["TB/s", "TOPS", "of limit", "error"]
    by_key = {(one.model, one.tokens, one.provider): one for one in results}
    rows = []
    for (name, T, provider), ours in by_key.items():
        if provider == "qgemm":
            others = [by_key[key] for way in ("grouped_mm", "batched_mm") if (key := (name, T, way)) in by_key]
            us, eager_us = min(each.us for each in others), min(each.eager_us for each in others)
            cells = [name, str(T), f"{ours.active_experts:.1f}", f"{us:.1f}", f"{ours.us:.1f}"]
            cells += [f"{us / ours.us:.2f}", f"{eager_us:.0f}", f"{ours.eager_us:.0f}"]
            cells += [f"{eager_us / ours.eager_us:.2f}", f"{ours.tb_per_s:.2f}", f"{ours.tops:.0f}"]
            rows.append([*cells, f"{ours.share:.0%}", f"{ours.error:.4f}"])
    return render((header, rows), markdown=False)


if __name__ == "__main__":
    main()
