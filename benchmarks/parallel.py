"""Layers of a large model on one GPU and cut among several.

The model has random weights, a few of its layers, and a vocabulary that is smaller in proportion, so that the head's
share of a step is that of the whole model. Each process builds it whole, is measured alone, and keeps the part that
``from_pretrained`` with a ``distributed_config`` gives it. All decode with ``fast_generate``, in CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F

import qgemm
from benchmarks.models.measure import MAX_GAP, decoding_rate, gaps, median_seconds, random_tokens
from benchmarks.models.shapes import MODELS, ModelShape
from benchmarks.results import environment, write_json
from benchmarks.tables import Table, render
from qgemm.nn.quant_layer import has_quant_layers, quant_layers

PROVIDERS = ("bf16", "qgemm", "qgemm, shared scales")
"""What follows a comma is another way to run the same parts."""
_SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
          "head_dim": 32, "vocab_size": 512}  # fmt: skip
_QWEN = MODELS["qwen3-30b-a3b"]
SHAPES = {
    "llama-3-8b": MODELS["llama-3-8b"],
    "llama-3-70b": MODELS["llama-3-8b"].resized(
        "llama-3-70b", 80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64
    ),
    "tiny": MODELS["llama-3-8b"].resized("tiny", 2, **_SMALL),
    "qwen3-30b-a3b": replace(_QWEN, layers=48),
    "tiny-mixture": _QWEN.resized(
        "tiny-mixture", 2, **_SMALL, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2
    ),
}
LAYERS = {"qwen3-30b-a3b": 12}
"""How many are run by default, where it isn't 8."""


@dataclass(frozen=True)
class Sizes:
    """What is timed: a prompt ``[batch, length]``, and steps of these batches after a context; medians of rounds."""

    prefill: tuple[int, int] = (8, 2048)
    batches: tuple[int, ...] = (1, 16)
    context: int = 512
    new: int = 66
    rounds: int = 3


@dataclass(frozen=True)
class Figure:
    """One provider on so many GPUs.

    - ``prefill_ms``; ``step_us``: of each batch.
    - ``gap``: how far the logit of a generated token is below the largest of the same model's forward, in standard
      deviations.
    - ``same``: the tokens, of those that follow each prompt, until the first that differs from one GPU's, on average.
    - ``kl``: of the next token's distribution to that of one GPU, and ``kl_float`` to that of bf16 on one GPU; means.
    - ``note``: what was told.
    """

    model: str
    layers: int
    provider: str
    gpus: int
    prefill_ms: float
    step_us: tuple[float, ...]
    gap: float
    same: float
    kl: float
    kl_float: float
    note: str = ""


def main(arguments: Sequence[str] | None = None) -> list[Figure]:
    """Measures what the command line asks for and prints it."""
    args = _parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figures")
        start_processes(_process, (folder, args), nprocs=args.processes, start_method="spawn")
        figures = [Figure(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = environment(device, args.commit)
    print(f"{args.processes} x {about['device']}, {about['versions']}, commit {about['commit']}\n")
    print(render(table(figures, Sizes().batches), markdown=True))
    if args.json:
        write_json(args.json, [about, *map(asdict, figures)])
    return figures


def table(figures: Sequence[Figure], batches: Sequence[int]) -> Table:
    """A row a figure, with the times of one GPU over its in brackets."""
    alone = {(one.model, one.provider): one for one in figures if one.gpus == 1}
    rows = []
    for one in figures:
        base = alone[one.model, one.provider.partition(", ")[0]]
        cells = [f"{one.prefill_ms:.1f} ms ({base.prefill_ms / one.prefill_ms:.2f})"]
        cells += [f"{us:.0f} us ({of / us:.2f})" for us, of in zip(one.step_us, base.step_us, strict=True)]
        checks = [f"{one.gap:.2f}", f"{one.same:.1f}", f"{one.kl:.1e}", f"{one.kl_float:.1e}"]
        rows.append([f"{one.model}, {one.layers} layers", one.provider, str(one.gpus), *cells, *checks, one.note])
    steps = [f"step, batch {batch}" for batch in batches]
    return ["model", "provider", "GPUs", "prefill", *steps, "gap", "same tokens", "KL", "KL to bf16", "note"], rows


def _process(rank: int, folder: str, args: argparse.Namespace) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.processes)}
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    options: dict[str, Any] = {}
    if is_gpu:
        torch.cuda.set_device(device)
        options["device_id"] = device
    distributed.init_process_group(
        "nccl" if is_gpu else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=args.processes,
        **options,
    )
    try:
        with torch.no_grad():
            for name in args.model:
                _measure(SHAPES[name], args, device, Path(folder, "figures") if rank == 0 else None)
    finally:
        distributed.destroy_process_group()


def _measure(shape: ModelShape, args: argparse.Namespace, device: torch.device, path: Path | None) -> None:
    layers = min(args.layers or LAYERS.get(shape.name, 8), shape.layers)
    vocabulary = max(512, shape.config["vocab_size"] * layers // shape.layers // 32 * 32)
    shape = replace(shape, config={**shape.config, "vocab_size": vocabulary})
    sizes = Sizes() if device.type == "cuda" else Sizes((2, 64), context=16, new=10, rounds=1)
    of_float: Tensor | None = None
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for provider in args.provider:
        kind, _, variant = provider.partition(", ")
        if not variant:
            model = shape.build(device, layers)
            _prepare(model, kind)
        for gpus in (args.processes,) if variant else (1, args.processes):
            start = time.perf_counter()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                if variant:
                    qgemm.share_scales(model)
                elif gpus > 1:
                    _cut(model, args.processes, args.by_expert)
                logits, tokens, gap = _look(model, sizes)
                prefill = _prefill(model, sizes)
                steps = tuple(_step(model, batch, sizes) for batch in sizes.batches)
            if gpus == 1:
                found[kind] = logits, tokens
                of_float = logits if kind == "bf16" else of_float
            whole_logits, whole_tokens = found[kind]
            is_same = (tokens == whole_tokens).long().cumprod(-1).sum(-1)
            notes = [str(each.message)[:150] for each in said if "generate" in str(each.message)]
            note = "; ".join(dict.fromkeys(notes + _not_fused(model)))
            told = provider + (", by expert" if args.by_expert and gpus > 1 else "")
            figure = Figure(
                shape.name, layers, told, gpus, prefill * 1e3, tuple(s * 1e6 for s in steps), gap,
                is_same.float().mean().item(), _kl(whole_logits, logits),
                float("nan") if of_float is None else _kl(of_float, logits),
                "wrong output" if not gap <= MAX_GAP else note,
            )  # fmt: skip
            if path is not None:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(figure)) + "\n")
                print(f"{time.perf_counter() - start:.1f} s: {figure}", flush=True)


def _not_fused(model: Any) -> list[str]:
    """What is to be told of a quantized model's layers that aren't fused whole."""
    if not has_quant_layers(model):
        return []
    records = qgemm.fusion_report(model).records
    reasons = [each.reason for each in records if each.reason or not each.parts]
    return [f"{len(reasons)} of {len(records)} layers not fused: {reasons[0]}"] if reasons else []


def _prepare(model: Any, kind: str) -> None:
    if kind == "qgemm":
        qgemm.quantize_model(model, "int8", fuse=True, progress=False)
    qgemm.fast_generate(model)


def _cut(model: Any, size: int, by_expert: bool) -> None:
    """Leaves this process its part of a model, as loading does."""
    from transformers.distributed.configuration_utils import DistributedConfig

    from qgemm.integrations.transformers.tensor_parallel import cut_layers, plan_layers

    qgemm.fast_generate(model, enabled=False)
    layers = quant_layers(model)
    if layers:
        qgemm.unfuse(model)
    # From transformers 5.19 on whole experts go with attention that is split, and the flag is deprecated.
    has_size = hasattr(DistributedConfig, "ep_size")
    experts: dict[str, Any] = {"ep_size": size} if has_size else {"enable_expert_parallel": True}
    config, _, mesh = type(model).prepare_distribute_model(
        DistributedConfig(tp_size=size, tp_plan="auto", **(experts if by_expert else {}))
    )
    model.config.distributed_config = config
    plan_layers(model, layers)
    type(model).maybe_distribute_model(model, config, mesh)
    cut_layers(model)
    if layers:
        qgemm.fuse(model)
    qgemm.fast_generate(model)


def _look(model: Any, sizes: Sizes) -> tuple[Tensor, Tensor, float]:
    """Logits of a prompt's tokens, tokens that are generated after it, and the gap of those."""
    ids = random_tokens(model, 1, sizes.context)
    logits = model(ids).logits.float()
    out = _generate(model, ids, sizes.new)
    return logits, out[:, sizes.context :], float(gaps(model, out, sizes.new).max())


def _prefill(model: Any, sizes: Sizes) -> float:
    ids = random_tokens(model, *sizes.prefill)
    return median_seconds(lambda: model(ids, use_cache=True, logits_to_keep=1), sizes.rounds)


def _step(model: Any, batch: int, sizes: Sizes) -> float:
    ids = random_tokens(model, batch, sizes.context)
    return batch / decoding_rate(lambda new: _generate(model, ids, new), batch, sizes.new, sizes.rounds)


def _generate(model: Any, ids: Tensor, new: int) -> Tensor:
    mask = torch.ones_like(ids)
    out: Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return out


def _kl(expected: Tensor, found: Tensor) -> float:
    """The mean of KL(expected || found)."""
    of, to = (F.log_softmax(each.double(), -1).flatten(0, -2) for each in (expected, found))
    return F.kl_div(to, of, reduction="batchmean", log_target=True).item()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=SHAPES, action="append", help="(default: llama-3-70b)")
    add("--provider", choices=PROVIDERS, action="append", help="(default: all)")
    add("--layers", type=int, help="of the model (default: 8; of qwen3-30b-a3b 12)")
    add("--by-expert", action="store_true", help="give each process whole experts, not columns of all")
    add("--processes", type=int, default=2, help="each with a GPU of its own (default: 2)")
    add("--json", type=Path, metavar="FILE", help="write all that was measured")
    add("--commit", help="what to call the commit, in a copy of the tree without git")
    args = parser.parse_args(arguments)
    args.model = args.model or ["llama-3-70b"]
    others = [provider for provider in PROVIDERS if ", " in provider]
    args.provider = args.provider or [each for each in PROVIDERS if not args.by_expert or each not in others]
    if args.by_expert:
        if without := [name for name in args.model if "num_experts" not in SHAPES[name].config]:
            parser.error(f"{without[0]} has no experts")
        if set(args.provider) & set(others):
            parser.error(f"with --by-expert no layer is split along K, so there is no {others[0]!r}")
    return args


if __name__ == "__main__":
    main()
