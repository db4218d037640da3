"""Times a transformer block, attention and MLP, in bf16 and int8.

The block is the first one of a model of ``benchmarks.models`` with random weights, and runs as transformers runs it in
prefill: causal attention without a cache. On a GPU passes are CUDA graphs over rotated inputs; providers take turns.
Outputs are compared with the float block's first.

Operations are two for each token and each weight that it is multiplied by, and those of the lower half of attention's
two products. Bytes are the fewest that must move: the weights once, the input and the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import relative_error
from benchmarks.models.providers import PROVIDERS
from benchmarks.models.shapes import MODELS, ModelShape
from benchmarks.results import command_line, environment, show
from benchmarks.shapes import parse_pair
from benchmarks.tables import Table, render
from benchmarks.timing import median_seconds
from qgemm_cli.timing import QUICK, Effort, Pass

SIZES = ((1, 128), (1, 2048), (8, 2048))
NAMES = ("bf16", "qgemm")
MAX_ERROR = 0.05
"""Of the block's output with its residuals, relative to the float one's; rounding to int8 makes about a third of it."""
COPIES = 4


@dataclass(frozen=True)
class Result:
    """One provider on ``batch`` sequences of ``length`` tokens. ``peak_bytes``: allocated in a call beside weights."""

    model: str
    provider: str
    batch: int
    length: int
    us: float
    tflops: float
    gb_per_s: float
    weight_bytes: int
    peak_bytes: int | None
    error: float


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Measures what the command line asks for, prints it, and writes the JSON file if one is named."""
    parser = command_line("blocks", __doc__)
    decoders = [name for name, shape in MODELS.items() if shape.is_decoder]
    is_gpu = torch.cuda.is_available()
    parser.add_argument("--model", choices=decoders, default="llama-3-8b" if is_gpu else "llama-3.2-1b")
    parser.add_argument("--size", type=parse_pair, action="append", metavar="BxL", help="sequences and their length")
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if is_gpu else "cpu")
    sizes = args.size or (SIZES if is_gpu else SIZES[:1])
    with torch.no_grad():
        results = measure(MODELS[args.model], sizes, QUICK if args.quick else Effort(), device)
    text = f"a block of {args.model}\n{render(table(results), markdown=False)}"
    show(text, results, environment(device, args.commit), args.json)
    return results


def measure(shape: ModelShape, sizes: Sequence[tuple[int, int]], effort: Effort, device: torch.device) -> list[Result]:
    """All providers on all sizes; raises ``ValueError`` for a wrong output."""
    models = {}
    for name in NAMES:
        model = shape.build(device, layers=1)
        PROVIDERS[name].prepare(model)
        models[name] = model.model
    config = shape.make_config(1)
    weights = _weights_of_a_token(models["bf16"].layers[0], config)
    results = []
    for batch, length in sizes:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(batch, length, config.hidden_size, generator=generator)
        x = x.to(device, next(models["bf16"].parameters()).dtype)
        runs = {name: _block_of(model, x) for name, model in models.items()}
        wanted = runs["bf16"](x)
        errors = {name: relative_error(run(x), wanted) for name, run in runs.items()}
        if wrong := [name for name, error in errors.items() if not error <= MAX_ERROR]:
            raise ValueError(f"wrong output of {wrong[0]}: relative error {errors[wrong[0]]:.3g}, at most {MAX_ERROR}")
        peaks = {name: _peak_bytes(partial(run, x), device) for name, run in runs.items()}
        copies = [x.clone() for _ in range(COPIES)]
        passes = {name: Pass(run, copies, device) for name, run in runs.items()}
        seconds = median_seconds(passes, effort, device)
        width = config.num_attention_heads * models["bf16"].layers[0].self_attn.head_dim
        operations = 2 * batch * length * (weights + width * length)
        for name, model in models.items():
            held = _bytes(model.layers[0])
            rates = operations / seconds[name] / 1e12, (held + 2 * x.nbytes) / seconds[name] / 1e9
            results.append(
                Result(shape.name, name, batch, length, seconds[name] * 1e6, *rates, held, peaks[name], errors[name])
            )
    return results


def table(results: Sequence[Result]) -> Table:
    """A row a size and provider."""
    base = {(one.batch, one.length): one.us for one in results if one.provider == "bf16"}
    rows = []
    for one in results:
        cells = [
            f"{one.us:,.0f}",
            f"{base[one.batch, one.length] / one.us:.2f}",
            f"{one.tflops:.3g}",
            f"{one.gb_per_s:,.3g}",
        ]
        peak = "-" if one.peak_bytes is None else f"{one.peak_bytes / 1e6:,.0f}"
        cells += [f"{one.weight_bytes / 1e6:,.0f}", peak, f"{one.error:.4f}"]
        rows.append([f"{one.batch} x {one.length}", one.provider, *cells])
    return [
        "tokens",
        "",
        "us",
        "times bf16",
        "TFLOP/s",
        "GB/s",
        "weights, MB",
        "peak beside, MB",
        "relative error",
    ], rows


def _block_of(model: Any, x: Tensor) -> Any:
    positions = torch.arange(x.shape[1], device=x.device)[None]
    rotary = model.rotary_emb(x, positions)

    def run(x: Tensor) -> Tensor:
        out = model.layers[0](x, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    return run


def _weights_of_a_token(block: nn.Module, config: Any) -> float:
    """How many of a block's weights a token is multiplied by: of a mixture's experts, those that it chooses."""
    count = 0.0
    for name, parameter in block.named_parameters():
        chosen = config.num_experts_per_tok / config.num_experts if ".experts." in f".{name}" else 1
        count += parameter.numel() * chosen
    return count


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _peak_bytes(run: Any, device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


if __name__ == "__main__":
    main()
