"""The benchmark runner: ``python -m benchmarks --help``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import plots, tables
from benchmarks.configs import check_config, rotated_weights
from benchmarks.measure import measure_host, measure_quantization, measure_shape
from benchmarks.peers import PEERS, installed_peers
from benchmarks.providers import Provider, cpu_providers, gpu_providers
from benchmarks.results import Run, environment, write
from benchmarks.roofline import known_peaks
from benchmarks.shapes import (
    CPU_SHAPES,
    HELD_OUT_ROWS,
    HELD_OUT_SHAPES,
    SHAPES,
    WeightShape,
    default_sizes,
    parse_shape,
)
from benchmarks.timing import copy_bandwidth
from qgemm_cli.timing import QUICK, Effort

LEVELS = ("gemm", "layer", "quantize", "host")


def main(arguments: Sequence[str] | None = None) -> Run:
    """Measures what the command line asks for, prints it, and writes the files that were asked for."""
    args = _parse(arguments)
    if args.load:
        run = _select(Run.load(args.load), args)
    else:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        with torch.no_grad():
            run = _measure(args, device)
    if args.json and not args.load:
        run.save(args.json)
    print(tables.report(run))
    if args.markdown:
        write(args.markdown, tables.report(run, markdown=True))
    if args.plots:
        for path in plots.draw(run, args.plots):
            print(f"wrote {path}")
        if page := plots.report(run, args.plots / "shapes"):
            print(f"wrote {page}")
    return run


def _select(run: Run, args: argparse.Namespace) -> Run:
    """The part of a loaded run that the command line names."""
    shapes = {(shape.N, shape.K) for shape in _choose_shapes(args, [])}
    run.measurements = [
        one
        for one in run.measurements
        if one.level in args.level
        and (not args.m or one.M in args.m)
        and (not shapes or (one.N, one.K) in shapes)
        and (not args.provider or one.provider in args.provider)
    ]
    if "host" not in args.level:
        run.host_us = {}
    columns = {K for _, K in shapes}
    run.quantizations = [
        one
        for one in run.quantizations
        if _quantizes(args) and (not args.m or one.M in args.m) and (not columns or one.K in columns)
    ]
    return run


def _measure(args: argparse.Namespace, device: torch.device) -> Run:
    torch.manual_seed(0)
    about = environment(device, args.commit)
    run = Run(about, copy_bandwidth(device), known_peaks(about["device"]) | dict(args.peak))
    effort = QUICK if args.quick else Effort()
    if args.check_configs:
        _check_configs(run, args, effort, device)
    else:
        _measure_providers(run, args, effort, device)
    return run


def _measure_providers(run: Run, args: argparse.Namespace, effort: Effort, device: torch.device) -> None:
    providers = _choose_providers(args.provider, args.level, device)
    default_shapes, default_rows = default_sizes(device, args.quick)
    shapes, rows = _choose_shapes(args, default_shapes), args.m or default_rows
    levels = [level for level in args.level if level in ("gemm", "layer")]
    if "host" in args.level:
        if device.type == "cuda":
            run.host_us = measure_host(providers, device)
        else:
            print("host: no GPU, so there is no host time apart from the time itself")
    if _quantizes(args):
        sizes = [(M, K) for K in dict.fromkeys(shape.K for shape in shapes) for M in rows]
        for M, K in tqdm(sizes, desc="quantize_rows", unit="size"):
            run.quantizations.append(measure_quantization(M, K, run.bandwidth, effort, device))
            if args.json:
                run.save(args.json)
    if not levels:
        return
    with tqdm(total=len(shapes) * len(rows), unit="product") as progress:
        for shape in shapes:
            progress.set_description(f"{shape.N} x {shape.K}")
            for found in measure_shape(shape, rows, providers, levels, run.roofline, effort, device):
                run.measurements += found
                progress.update()
                if args.json:  # what is done is kept if the rest breaks off
                    run.save(args.json)


def _quantizes(args: argparse.Namespace) -> bool:
    return "quantize" in args.level and (not args.provider or tables.OURS in args.provider)


def _check_configs(run: Run, args: argparse.Namespace, effort: Effort, device: torch.device) -> None:
    if device.type != "cuda":
        raise SystemExit("--check-configs times kernels on a GPU, and there is none")
    shapes, rows = _choose_shapes(args, HELD_OUT_SHAPES), args.m or HELD_OUT_ROWS
    with tqdm(total=len(shapes) * len(rows), unit="product") as progress:
        for shape in shapes:
            progress.set_description(f"{shape.N} x {shape.K}")
            weights = rotated_weights(shape, device)
            for M in rows:
                run.config_checks.append(check_config(shape, M, weights, effort, device))
                progress.update()
                if args.json:
                    run.save(args.json)


def _choose_providers(names: list[str] | None, levels: Sequence[str], device: torch.device) -> list[Provider]:
    wanted = set(names) if names else None
    builtin = gpu_providers() if device.type == "cuda" else cpu_providers()
    providers = [one for one in builtin if wanted is None or one.name in wanted]
    if device.type == "cuda":
        peers, missing = installed_peers(wanted)
        providers += peers
        for line in missing:
            print(line)
    wanted_levels = {"layer" if level == "host" else level for level in levels}
    return [one for one in providers if wanted_levels & set(one.levels)]


def _choose_shapes(args: argparse.Namespace, default: Sequence[WeightShape]) -> list[WeightShape]:
    named = list(args.shape or [])
    for family in args.family or []:
        named += [shape for shape in SHAPES if shape.family == family]
    return named or list(default)


def _rows(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("rows must be at least 1")
    return int(text)


def _peak(text: str) -> tuple[str, float]:
    kind, tops = text.split("=")
    return kind, float(tops)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = dict.fromkeys(one.name for one in (*gpu_providers(), *cpu_providers()))
    families = dict.fromkeys(shape.family for shape in (*SHAPES, *CPU_SHAPES))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Times qgemm beside its peers.")
    add = parser.add_argument
    add(
        "--m", type=_rows, action="append", help="rows of activations; may be given several times, as may the next four"
    )
    add("--shape", type=parse_shape, action="append", metavar="NxK", help="a weight shape")
    add("--family", choices=families, action="append", help="the weight shapes of a model")
    add("--provider", choices=[*names, *PEERS], action="append", help="(default: all that are installed)")
    add("--level", choices=LEVELS, action="append", help="(default: all)")
    add("--quick", action="store_true", help="fewer rounds, and fewer sizes where none are named")
    add("--check-configs", action="store_true", help="instead: select_config's choice beside every valid config")
    add("--json", type=Path, metavar="FILE", help="write all that was measured; the file is updated as the run goes")
    add("--load", type=Path, metavar="FILE", help="measure nothing: tables and plots from such a file")
    add("--markdown", type=Path, metavar="FILE", help="write the tables in Markdown")
    add(
        "--plots",
        type=Path,
        metavar="FOLDER",
        help="write PNG plots; in shapes/ one of each weight shape, with its numbers",
    )
    add("--peak", type=_peak, action="append", default=[], metavar="KIND=TOPS", help="of the GPU, such as int8=1979")
    add("--commit", help="what to call the commit, in a copy of the tree without git")
    args = parser.parse_args(arguments)
    args.level = args.level or list(LEVELS)
    return args


if __name__ == "__main__":
    main()
