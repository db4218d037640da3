"""The results as PNG files: all shapes in one picture (``draw``), and each in its own (``report``).

matplotlib is needed, and pandas for ``report`` (``pip install ".[bench]"``).
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import Run, speedups
from benchmarks.roofline import KINDS, bytes_moved, operations
from benchmarks.tables import OURS, providers_at, summary_families

_TITLES = {"gemm": "GEMM alone", "layer": "whole layer, quantization included"}
_BASE = "bf16"
_LIMIT_STYLES = {"int8": "--", "bf16": ":"}


def draw(run: Run, folder: Path) -> list[Path]:
    """Writes ``speedup.png`` and ``roofline-<level>.png`` into ``folder`` and returns their paths.

    There is no ``speedup.png`` of a run without bf16. Without matplotlib, prints that there are no plots.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print('no plots: matplotlib is not installed (pip install ".[bench]")')
        return []
    import matplotlib

    matplotlib.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    levels = [level for level in _TITLES if any(one.level == level and one.us for one in run.measurements)]
    paths = []
    compared = [level for level in levels if _BASE in providers_at(run.measurements, level)]
    if compared:
        paths.append(_draw_speedups(run, compared, folder / "speedup.png"))
    paths += [_draw_roofline(run, level, folder / f"roofline-{level}.png") for level in levels]
    return paths


def report(run: Run, folder: Path) -> Path | None:
    """Writes a plot and a table (PNG, CSV) for each weight shape and level, and ``results.html`` with all plots.

    By ``triton.testing.perf_report``, from what was measured before: by itself it would time one point after the other,
    where here providers take turns. Returns the path of ``results.html``; without matplotlib, pandas or Triton prints
    that there is none.
    """
    missing = [name for name in ("matplotlib", "pandas", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        print(f'no plots of single shapes: {" and ".join(missing)} not installed (pip install ".[bench]")')
        return None
    import matplotlib
    from matplotlib import pyplot
    from triton.testing import Benchmark, perf_report

    matplotlib.use("agg")
    tops = {(one.level, one.N, one.K, one.provider, one.M): one.tops for one in run.measurements if one.tops}
    benchmarks = []
    for level, N, K in dict.fromkeys(key[:3] for key in tops):
        rows = sorted({key[4] for key in tops if key[:3] == (level, N, K)})
        names = providers_at([one for one in run.measurements if (one.N, one.K) == (N, K)], level)
        limits = {f"limit, {kind}": style for kind, style in _LIMIT_STYLES.items()}
        styles = [(_color(run, name), "-") for name in names] + [("black", style) for style in limits.values()]
        benchmarks.append(
            Benchmark(
                ["M"], rows, "line", [*names, *limits], [*names, *limits], f"{level}-{N}x{K}",
                {"level": level, "N": N, "K": K}, "M, rows of activations", "TOPS", True, True, styles,
            )
        )  # fmt: skip

    def measured(M: int, line: str, level: str, N: int, K: int) -> float:
        if line.startswith("limit, "):
            return _limit_tops(run, M, N, K, line.removeprefix("limit, "), level)
        return tops.get((level, N, K, line, M), float("nan"))

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"figure.max_open_warning": 0}):
        perf_report(benchmarks)(measured).run(save_path=str(folder))
    pyplot.close("all")
    return folder / "results.html"


def draw_peers(document: Path, path: Path) -> Path:
    """Draws the table below ``<!-- peers -->`` of ``document`` to ``path``: a line for each column, against its Ms."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    lines = document.read_text(encoding="utf-8").partition("<!-- peers -->\n")[2].partition("\n\n")[0].splitlines()
    (_, *names), _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    figure, axis = pyplot.subplots(figsize=(7.2, 3.8))
    for column, name in enumerate(names, 1):
        cells = [(int(row[0]), row[column].strip(")").split(" (")) for row in rows if row[column][:1].isdigit()]
        sizes, means = [M for M, _ in cells], [float(mean) for _, (mean, *_) in cells]
        ours = name.startswith(OURS)
        axis.plot(sizes, means, "o-", ms=4, lw=2.4 if ours else 1.3, label=name)
        if all(least for _, (_, *least) in cells):
            axis.fill_between(sizes, [float(least) for _, (_, least) in cells], means, alpha=0.15, lw=0)
    axis.axhline(1, color="black", lw=0.8)
    _rows_axis(axis, [int(row[0]) for row in rows])
    axis.set_ylim(bottom=0)
    axis.set_ylabel("times as fast as bf16 F.linear")
    axis.set_title("A layer of 4096 x 4096 on one H200, quantization of activations included", fontsize=10)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return _save(figure, path)


def _draw_speedups(run: Run, levels: list[str], path: Path) -> Path:
    """Speed over bf16 against M: the geometric mean over shapes, and a band from the least to the greatest."""
    from matplotlib import pyplot

    over, families = summary_families(run.measurements)
    figure, axes = pyplot.subplots(1, len(levels), figsize=(5.2 * len(levels), 3.8), sharey=True, squeeze=False)
    for axis, level in zip(axes[0], levels, strict=True):
        for name in providers_at(run.measurements, level):
            spreads = speedups(run.measurements, level, _BASE, name, families)
            if name == _BASE or not spreads:
                continue
            rows = list(spreads)
            color = _color(run, name)
            width = 2.2 if name == OURS else 1.3
            axis.plot(rows, [s.mean for s in spreads.values()], "o-", ms=3, lw=width, color=color, label=name)
            least, greatest = ([getattr(s, end) for s in spreads.values()] for end in ("least", "greatest"))
            axis.fill_between(rows, least, greatest, color=color, alpha=0.13, lw=0)
        axis.axhline(1, color="black", lw=0.8)
        _rows_axis(axis, sorted({one.M for one in run.measurements if one.level == level}))
        axis.set_title(_TITLES[level], fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8, loc="lower right")
    axes[0][0].set_ylabel("times as fast as bf16 F.linear")
    figure.suptitle(f"{run.environment['device']}, {over}: geometric mean, minimum to maximum", fontsize=10)
    return _save(figure, path)


def _draw_roofline(run: Run, level: str, path: Path) -> Path:
    """TOPS against M, a panel for each weight shape; the dashed line is qgemm's limit, the dotted one bf16's."""
    from matplotlib import pyplot

    found = [one for one in run.measurements if one.level == level]
    shapes = list(dict.fromkeys((one.family, one.N, one.K) for one in found))
    columns = min(4, len(shapes))
    lines = -(-len(shapes) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(3.4 * columns, 2.8 * lines), squeeze=False)
    for axis in axes.flat[len(shapes) :]:
        axis.remove()
    for axis, (family, N, K) in zip(axes.flat, shapes, strict=False):
        here = [one for one in found if (one.N, one.K) == (N, K)]
        for name in providers_at(here, level):
            points = sorted((one.M, one.tops) for one in here if one.provider == name and one.tops)
            if points:
                width = 2.0 if name == OURS else 1.1
                axis.plot(*zip(*points, strict=True), "o-", ms=2.5, lw=width, color=_color(run, name), label=name)
        rows = sorted({one.M for one in here})
        for kind, style in _LIMIT_STYLES.items():
            limits = [_limit_tops(run, M, N, K, kind, level) for M in rows]
            axis.plot(rows, limits, style, color="black", lw=1, label=f"limit, {kind}")
        _rows_axis(axis, rows)
        axis.set_yscale("log")
        axis.set_title(f"{family}: {N} x {K}", fontsize=9)
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("TOPS")
    axes[0][0].legend(fontsize=7)
    figure.suptitle(f"{run.environment['device']}: {_TITLES[level]}", fontsize=10)
    return _save(figure, path)


def _limit_tops(run: Run, M: int, N: int, K: int, kind: str, level: str) -> float:
    dtype = next(dtype for dtype, name in KINDS.items() if name == kind)
    moved = bytes_moved(M, N, K, dtype if level == "gemm" else torch.bfloat16, dtype, torch.bfloat16)
    ops = operations(M, N, K)
    return ops / run.roofline.limit(ops, moved, kind) / 1e12


def _color(run: Run, name: str) -> str:
    names = list(dict.fromkeys([OURS, _BASE, *(one.provider for one in run.measurements)]))
    return f"C{names.index(name)}"


def _rows_axis(axis: Any, rows: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(rows, [str(M) for M in rows], rotation=45, fontsize=7)
    axis.minorticks_off()
    axis.set_xlabel("M, rows of activations", fontsize=8)


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
