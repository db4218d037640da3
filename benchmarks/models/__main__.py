"""The runner: ``python -m benchmarks.models --help``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.models import plots, tables
from benchmarks.models.measure import Sizes
from benchmarks.models.providers import PROVIDERS
from benchmarks.models.results import DECODE, ENCODE, FIRST_TOKEN, HTTP, PREFILL, SERVE, Figure, Run, extrapolated
from benchmarks.models.shapes import MODELS
from benchmarks.models.worker import Job
from benchmarks.results import environment, write

MEASURES = (PREFILL, DECODE, SERVE, HTTP, FIRST_TOKEN, ENCODE)
QUICK = Sizes(
    batches=(1, 16), contexts=(512,), new=66, requests=(8,), prompts=(16, 128), answers=(8, 32), first=64, rounds=1
)
ROOT = Path(__file__).parents[2]
_SECONDS_BETWEEN_LOOKS = 2.0


def main(arguments: Sequence[str] | None = None) -> Run:
    """Measures what the command line asks for, prints it, and writes the files that were asked for."""
    args = _parse(arguments)
    if args.load:
        run = Run.load(args.load)
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        given = sys.argv[1:] if arguments is None else arguments
        run = Run(environment(device, args.commit), shlex.join(["python", "-m", "benchmarks.models", *given]))
        _measure(run, args)
    print(tables.report(run))
    if args.markdown:
        write(args.markdown, tables.report(run, markdown=True))
    if args.plot and plots.draw(run, args.plot):
        print(f"wrote {args.plot}")
    return run


def _measure(run: Run, args: argparse.Namespace) -> None:
    jobs = list(_jobs(args))
    kernels = tempfile.TemporaryDirectory()  # the cache of compiled kernels that first calls begin with
    with kernels, tqdm(jobs, unit="process") as progress:
        for job in progress:
            progress.set_description(", ".join(filter(None, (job.model, *job.providers, job.cache))))
            caches = Path(kernels.name, job.model, job.providers[0]) if job.cache else None
            before = list(run.figures)
            for figures in _run_job(job, caches, args.timeout):
                run.figures = before + figures
                if args.json:  # what is done is kept if the rest breaks off
                    run.save(args.json)
            _extrapolate(run, args.layers)
    if args.json:
        run.save(args.json)


def _jobs(args: argparse.Namespace) -> Iterator[Job]:
    """The processes, in order."""
    missing = [name for name in args.provider or () if not PROVIDERS[name].is_installed]
    if missing:
        raise SystemExit(f"{missing[0]} isn't installed here")
    named = args.provider or [name for name, provider in PROVIDERS.items() if provider.is_installed]
    is_gpu, sizes = torch.cuda.is_available(), _sizes(args)
    for model in args.model or [name for name, shape in MODELS.items() if shape.is_decoder == is_gpu]:
        counts = args.layers or [MODELS[model].layers]
        if MODELS[model].is_decoder:
            for name in named:
                yield from _jobs_of_decoder(model, name, counts, args.measure, sizes)
        elif ENCODE in args.measure and (own := [name for name in named if ENCODE in PROVIDERS[name].measures]):
            yield Job(model, counts[-1], tuple(own), (ENCODE,), sizes=sizes)


def _sizes(args: argparse.Namespace) -> Sizes:
    sizes = QUICK if args.quick else Sizes()
    return replace(
        sizes,
        batches=tuple(args.batch or sizes.batches),
        contexts=tuple(args.context or sizes.contexts),
        new=args.new or sizes.new,
        requests=tuple(args.requests or sizes.requests),
    )


def _jobs_of_decoder(
    model: str, name: str, counts: Sequence[int], wanted: Sequence[str], sizes: Sizes
) -> Iterator[Job]:
    """The processes of the provider ``name``. ``counts``: of layers, ``wanted``: what to measure."""
    measures = [each for each in wanted if each in PROVIDERS[name].measures and each != ENCODE]
    steady = tuple(each for each in measures if each not in (SERVE, HTTP, FIRST_TOKEN))
    if steady:
        yield from (Job(model, layers, (name,), steady, sizes=sizes) for layers in counts)
    for measure in (SERVE, HTTP):  # by itself, so that its cache of keys and values finds all memory free
        if measure in measures:
            yield Job(model, counts[-1], (name,), (measure,), sizes=sizes)
    if FIRST_TOKEN in measures:
        for cache in ("cold", "warm"):
            yield Job(model, counts[-1], (name,), (FIRST_TOKEN,), cache, sizes)


def _run_job(job: Job, caches: Path | None, timeout: float) -> Iterator[list[Figure]]:
    """The figures of a process so far, every few seconds and at its end; one more with the reason if it failed."""
    environ = dict(os.environ)
    if caches is not None:
        environ |= {"TRITON_CACHE_DIR": str(caches / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    with tempfile.TemporaryDirectory() as folder:
        path, said = Path(folder, "figures"), Path(folder, "said")
        path.touch()
        command = [sys.executable, "-m", "benchmarks.models.worker", job.to_json(), str(path)]
        reason = ""
        with said.open("wb") as file:
            options: dict[str, Any] = {"cwd": ROOT, "env": environ, "stdout": subprocess.DEVNULL, "stderr": file}
            process = subprocess.Popen(command, **options, start_new_session=True)
            try:
                end = time.monotonic() + timeout
                while process.poll() is None and time.monotonic() < end:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_SECONDS_BETWEEN_LOOKS)
                    yield _figures_in(path)
            finally:
                if process.poll() is None:
                    reason = f"not done after {timeout:g} s"
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with a server that it started
                process.wait()
        if process.returncode and not reason:
            lines = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            reason = lines[-1][:300] if lines else f"exit status {process.returncode}"
        figures = _figures_in(path)
    if reason:
        name = " and ".join(job.providers)
        figures.append(Figure(job.model, job.layers, name, job.measures[0], cache=job.cache, reason=reason))
    yield figures


def _figures_in(path: Path) -> list[Figure]:
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [Figure(**json.loads(line)) for line in whole.splitlines()]


def _extrapolate(run: Run, layers: Sequence[int] | None) -> None:
    """Adds figures of whole models on the line through two numbers of layers, once both are there."""
    if not layers or len(layers) != 2:
        return
    found = {(one.model, one.provider, one.size, one.layers): one for one in run.figures if one.value}
    for (model, provider, size, count), few in list(found.items()):
        more, full = found.get((model, provider, size, layers[1])), MODELS[model].layers
        if count == layers[0] and more and size[0] in (PREFILL, DECODE) and (model, provider, size, full) not in found:
            run.figures.append(extrapolated(few, more, full))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description="Times whole models.")
    add = parser.add_argument
    add("--model", choices=MODELS, action="append", help="(default: decoders on a GPU, encoders on a CPU)")
    add("--provider", choices=PROVIDERS, action="append", help="(default: all that are installed)")
    add(
        "--measure",
        choices=MEASURES,
        action="append",
        help="serve: many requests at once; http: the same from a server (default: all but http)",
    )
    add("--batch", type=int, action="append", help="of decode (default: 1, 16 and 64)")
    add("--context", type=int, action="append", help="of decode (default: 512, 4096 and 16384)")
    add("--new", type=int, metavar="TOKENS", help="that are decoded")
    add("--requests", type=int, action="append", help="of serve and http, at once (default: 64 and 256)")
    add(
        "--layers",
        type=int,
        action="append",
        help="of a smaller model; given twice, prefill and decode of the whole are extrapolated, and labelled so",
    )
    add("--quick", action="store_true", help="fewer rounds and sizes")
    add("--timeout", type=float, default=900.0, metavar="SECONDS", help="of one process")
    add("--json", type=Path, metavar="FILE", help="write all that was measured; the file is updated as the run goes")
    add("--load", type=Path, metavar="FILE", help="measure nothing: tables and the plot from such a file")
    add("--markdown", type=Path, metavar="FILE", help="write the tables in Markdown")
    add("--plot", type=Path, metavar="FILE", help="write a PNG plot")
    add("--commit", help="what to call the commit, in a copy of the tree without git")
    args = parser.parse_args(arguments)
    args.measure = args.measure or [each for each in MEASURES if each != HTTP]
    if args.layers and (len(args.layers) > 2 or args.layers != sorted(set(args.layers))):
        parser.error("--layers is given once, or twice with the smaller number first")
    return args


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes are ended on the way out
    main()
