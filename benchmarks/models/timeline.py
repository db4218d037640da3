"""The kernels of one step of decoding, before and after.

Every provider generates a few tokens under PyTorch's profiler. One step is cut out of its kernels, which repeat from
step to step, and drawn on one scale of time with the others.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.measure import generate, random_tokens
from benchmarks.models.providers import PROVIDERS
from benchmarks.models.shapes import MODELS
from benchmarks.results import environment, write_json
from benchmarks.tables import Table, render

NEW = 12
KINDS = {
    "attention": r"attention|_attend_|_combine_|flash|fmha|softmax",
    "product": r"gemm|gemv|linear|cutlass|nvjet|xmma|wgmma|splitK|dot_kernel|_mm",
    "norm, quantization, activation": r"norm|quantize|rotate|rotary|activat|silu|gelu",
    "PyTorch's": r"at::|elementwise|vectorized|triton_|reduce|Cat|copy|Memcpy|Memset|index|scatter|gather",
}
"""What a kernel does, by the first expression that its name holds."""
OTHER = "other"


@dataclass(frozen=True)
class Kernel:
    """One kernel of a step; microseconds from the step's first kernel on."""

    name: str
    start: float
    duration: float

    @property
    def kind(self) -> str:
        """What it does, of ``KINDS``."""
        return next((kind for kind, names in KINDS.items() if re.search(names, self.name, re.IGNORECASE)), OTHER)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[Kernel]]:
    """Records what the command line asks for, prints a table, and writes the files that are named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models.timeline", description=__doc__.splitlines()[0])
    decoders = [name for name, shape in MODELS.items() if shape.is_decoder]
    parser.add_argument("--model", choices=decoders, default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="of a smaller model")
    parser.add_argument("--provider", choices=PROVIDERS, action="append", help="(default: bf16, bf16 compiled, qgemm)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--commit", help="what to call the commit, in a copy of the tree without git")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.models.timeline records kernels on a GPU, and there is none")
    device = torch.device("cuda", torch.cuda.current_device())
    steps = {}
    for name in args.provider or ("bf16", "bf16 compiled", "qgemm"):
        steps[name] = one_step(_record(args, name, device), NEW - 1)
        torch.cuda.empty_cache()
    about = environment(device, args.commit)
    title = f"one step of {args.model}, batch {args.batch}, context {args.context}, {about['device']}"
    print(f"{title}, commit {about['commit']}\n{render(table(steps), markdown=True)}")
    if args.json:
        values = {"environment": about, "steps": {name: [asdict(one) for one in step] for name, step in steps.items()}}
        write_json(args.json, values)
    if args.plot:
        draw(steps, title, args.plot)
    return steps


def _record(args: argparse.Namespace, name: str, device: torch.device) -> list[Kernel]:
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    provider = PROVIDERS[name]
    model = MODELS[args.model].build(device, args.layers)
    provider.prepare(model)
    ids = random_tokens(model, args.batch, args.context)
    for _ in range(2):
        generate(model, provider, ids, NEW)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        generate(model, provider, ids, NEW)
        torch.cuda.synchronize()
    every: Any = found.events()
    # Compiled graphs are spans around their kernels.
    events = [
        event
        for event in every
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", event.name.startswith("#"))
    ]
    kernels = [Kernel(event.name, event.time_range.start, event.time_range.elapsed_us()) for event in events]
    return sorted(kernels, key=lambda kernel: kernel.start)


def one_step(kernels: Sequence[Kernel], steps: int) -> list[Kernel]:
    """The last step that is followed by nothing but what ends the call, from 0 on; ``steps``: how many there are.

    Steps run the same kernels in the same order. Where they don't, as eager attention has other ones for other lengths,
    the last step is from the first to the last of the kernels that there are once in a step, such as the embedding and
    the choice of a token. Raises ``ValueError`` if it finds neither.
    """
    names = [kernel.name for kernel in kernels]
    longest = len(names) // steps + 1  # the prompt's kernels are among them too
    for rest in range(min(64, len(names))):
        end = len(names) - rest
        for count in range(longest, longest // 2, -1):
            if end - 2 * count > 0 and names[end - count : end] == names[end - 2 * count : end - count]:
                return _from_0(kernels[end - count : end])
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    # The prompt may have one, too.
    once = [at[-1] for at in places.values() if len(at) in (steps, steps + 1) and at[-1] - at[0] >= len(names) // 2]
    if len(once) > 1:
        return _from_0(kernels[min(once) : max(once) + 1])
    raise ValueError(f"no step repeats in {len(names)} kernels of {steps} steps")


def _from_0(step: Sequence[Kernel]) -> list[Kernel]:
    return [Kernel(one.name, one.start - step[0].start, one.duration) for one in step]


def in_turn(step: Sequence[Kernel]) -> list[Kernel]:
    """Each kernel from where the ones ahead of it have ended: one that is started early waits for them."""
    kernels, ended = [], 0.0
    for one in step:
        start, end = max(one.start, ended), max(one.start + one.duration, ended)
        kernels.append(Kernel(one.name, start, end - start))
        ended = end
    return kernels


def table(steps: dict[str, list[Kernel]]) -> Table:
    """Microseconds of each kind of kernels, how many there are, and how long the GPU waits in between."""
    kinds = [kind for kind in (*KINDS, OTHER) if any(one.kind == kind for step in steps.values() for one in step)]
    rows = []
    for name, step in steps.items():
        sums = [sum(one.duration for one in in_turn(step) if one.kind == kind) for kind in kinds]
        whole = _end(step)
        idle = whole - sum(sums)
        rows.append([name, f"{whole:,.0f}", str(len(step)), *(f"{each:,.0f}" for each in sums), f"{idle:,.0f}"])
    return ["", "step, us", "kernels", *kinds, "between kernels"], rows


def _end(step: Sequence[Kernel]) -> float:
    return max(one.start + one.duration for one in step)


def draw(steps: dict[str, list[Kernel]], title: str, path: Path) -> None:
    """A line of bars a provider, all on one scale."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(10, 1.2 + 0.7 * len(steps)), layout="constrained")
    for row, step in enumerate(map(in_turn, steps.values())):
        for place, kind in enumerate((*KINDS, OTHER)):
            spans = [(one.start, one.duration) for one in step if one.kind == kind]
            label = kind if row == 0 else None
            axis.broken_barh(spans, (row - 0.35, 0.7), color=f"C{place}", label=label, linewidth=0)
        axis.text(_end(step), row, f" {_end(step):,.0f} us, {len(step)} kernels", va="center", fontsize=8)
    axis.set_yticks(range(len(steps)), list(steps))
    axis.invert_yaxis()
    axis.set_xlim(0, 1.2 * max(map(_end, steps.values())))
    axis.set_xlabel("microseconds")
    axis.set_title(title, fontsize=10)
    figure.legend(fontsize=8, loc="outside lower center", ncol=5, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
