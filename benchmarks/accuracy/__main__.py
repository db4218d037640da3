"""Measures what quantization costs trained models: ``python -m benchmarks.accuracy --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import safe_open
from tqdm import tqdm

from benchmarks.accuracy import minilm, plots, tables
from benchmarks.accuracy.jobs import Models, measure_all
from benchmarks.accuracy.measure import QUICK, Effort, pending
from benchmarks.accuracy.peers import PEERS, installed_peers
from benchmarks.accuracy.results import MINILM, SUBJECTS, Result, Run
from benchmarks.accuracy.variants import Variant, named, variants
from benchmarks.results import environment, write


def main(arguments: Sequence[str] | None = None) -> Run:
    """Measures what the command line asks for, prints it, and writes the files that were asked for."""
    args = _parse(arguments)
    run = Run.load(args.load) if args.load else _measure(args)
    print(tables.report(run))
    if args.markdown:
        write(args.markdown, tables.report(run, markdown=True))
    if args.document:
        tables.put_into(args.document, run)
    if args.plot:
        plots.draw(run, args.plot)
    return run


def _measure(args: argparse.Namespace) -> Run:
    device = torch.device(args.device)
    effort = QUICK if args.quick else Effort()
    if args.seeds:
        effort = replace(effort, seeds=tuple(range(args.seeds)))
    table = _table(args.variant)
    about = environment(device, args.commit)
    run = Run(about, _settings(args.model, effort))
    if args.json and args.json.exists() and not args.again:
        earlier = Run.load(args.json)
        if earlier.settings != run.settings:
            raise SystemExit(f"{args.json} was measured with other settings: name another file, or pass --again")
        about["versions"] = earlier.environment["versions"] | about["versions"]
        run.results = earlier.results
    todo = pending(args.subject or SUBJECTS, table, effort.seeds, run.results)
    again = {(variant.name, subject, seed) for subject, variant, seed in todo}
    run.results = [one for one in run.results if (one.variant, one.subject, one.seed) not in again]
    if any(subject == MINILM for subject, _, _ in todo):
        try:
            minilm.minilm_folder()
        except ModuleNotFoundError as error:
            print(f"left out: {MINILM}: {error}")
            todo = [one for one in todo if one[0] != MINILM]
    models = Models(frozenset(subject for subject, _, _ in todo), args.model, effort, device, about["device"])
    with tqdm(measure_all(models, todo, args.jobs), total=len(todo), unit="model", disable=None) as progress:
        for result in progress:
            progress.set_description(f"{result.variant}, {result.subject}")
            tqdm.write(_line(result), file=sys.stderr)
            run.results.append(result)
            if args.json:  # what is done is kept if the rest breaks off
                run.save(args.json)
    order = {one.name: place for place, one in enumerate((*variants(), *PEERS))}
    # What a file has from a table with other rows comes last.
    run.results.sort(key=lambda one: (order.get(one.variant, len(order)), SUBJECTS.index(one.subject), one.seed))
    if args.json:
        run.save(args.json)
    return run


def _line(result: Result) -> str:
    """A result as a line of progress."""
    figures = {
        field: getattr(result, field)
        for field in ("perplexity", "kl", "least_cosine", "mean_cosine", "neighbours", "seconds")
    }
    shown = ", ".join(f"{field} {value:.5g}" for field, value in figures.items() if value is not None)
    return f"{result.variant}, {result.subject}, seed {result.seed}: {result.reason or shown}"


def _table(names: list[str] | None) -> list[Variant]:
    """The rows to measure. What isn't installed is a line of output, unless it was asked for by name."""
    rows, missing = installed_peers()
    for line in missing:
        print(f"left out: {line}")
    try:
        return named([*variants(), *rows], names)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def _settings(folder: Path, effort: Effort) -> dict[str, object]:
    """What was measured, as the report says it; two runs with the same settings can be put together."""
    if not (folder / "tokens.safetensors").exists():
        raise SystemExit(f"{folder} holds no model: python -m benchmarks.accuracy.train {folder}")
    parameters = 0
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            parameters += sum(torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys())  # noqa: SIM118
    with safe_open(folder / "tokens.safetensors", framework="pt") as file:
        windows = file.get_slice("held_out").get_shape()[0] // effort.window
    windows = min(windows, effort.windows or windows)
    values = asdict(effort) | {"seeds": list(effort.seeds)}
    return values | {"parameters": parameters, "tokens": windows * effort.window}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description="Measure what quantization costs trained models."
    )
    parser.add_argument(
        "--model", type=Path, default=Path("build/accuracy/model"), help="a folder of ...accuracy.train"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes measure at a time, on the one device")
    parser.add_argument("--quick", action="store_true", help="less text, fewer sentences, one seed")
    parser.add_argument("--seeds", type=int, help="how many draws of calibration data")
    parser.add_argument("--variant", action="append", help="only this row of the table; may be given several times")
    parser.add_argument(
        "--subject", action="append", choices=SUBJECTS, help="only on this model; may be given several times"
    )
    parser.add_argument(
        "--json", type=Path, help="where to write the results; what it has already isn't measured again"
    )
    parser.add_argument("--again", action="store_true", help="measure anew what --json has already")
    parser.add_argument("--markdown", type=Path, help="where to write the table")
    parser.add_argument(
        "--document", type=Path, help="a Markdown file that has a place for the table, to write it there"
    )
    parser.add_argument("--plot", type=Path, help="where to write the plot, a PNG file")
    parser.add_argument("--load", type=Path, help="no measuring: the table and the plot of a JSON file")
    parser.add_argument("--commit", help="of a copy of the tree that git doesn't know")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
