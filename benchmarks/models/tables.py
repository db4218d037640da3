"""A run as tables: a table of speed a model, then memory and agreement, then what wasn't measured and why."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.models.providers import BASE
from benchmarks.models.results import ENCODE, FIRST_TOKEN, HTTP, SERVE, STREAM, Figure, Run
from benchmarks.tables import Table, render


def report(run: Run, markdown: bool = False) -> str:
    """All tables, with where and by which command they were measured above them."""
    about = run.environment
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    parts = [f"{about['device']}; {versions}; commit {about['commit']}; {about['date']}.", f"`{run.command}`"]
    for model, layers in dict.fromkeys((one.model, one.layers) for one in run.figures):
        figures = [one for one in run.figures if (one.model, one.layers) == (model, layers)]
        title = f"{model}, {layers} layers: tokens a second (times {BASE}'s)"
        if any(one.measure == ENCODE for one in figures):
            title = f"{model}, {layers} layers: sentences a second (times {BASE}'s, which is float32 on a CPU)"
        parts += [("## " if markdown else "") + title, render(speed_table(figures), markdown)]
        if (memory := memory_table(figures))[1]:
            parts.append(render(memory, markdown))
    if notes := list(dict.fromkeys(f"{one.provider}: {one.note}" for one in run.figures if one.note)):
        parts.append("\n".join(f"- {note}" for note in notes))
    if failed := [f"{_said(one)}, {one.provider}: {one.reason}" for one in run.figures if one.reason]:
        parts += [("## " if markdown else "") + "Not measured", "\n".join(f"- {line}" for line in failed)]
    return "\n\n".join(parts)


def speed_table(figures: Sequence[Figure]) -> Table:
    """A row a measure, a column a provider. ``*``: with a note, such as that it is extrapolated."""
    names = list(dict.fromkeys(one.provider for one in figures))
    found = {(one.size, one.provider): one for one in figures if one.value}
    rows = []
    for size in dict.fromkeys(one.size for one in figures if one.value):
        base = found.get((size, BASE))
        rows.append([row_name(size), *(_cell(found.get((size, name)), base) for name in names)])
    return ["", *names], rows


def memory_table(figures: Sequence[Figure]) -> Table:
    """Of each provider, gigabytes of weights and at most, and the minimum cosine of its outputs."""
    rows = []
    for name in dict.fromkeys(one.provider for one in figures):
        own = [one for one in figures if one.provider == name]
        weights, peak, cosine = (
            [getattr(one, field) for one in own if getattr(one, field) is not None]
            for field in ("weight_bytes", "peak_bytes", "cosine")
        )
        if any(weights) or cosine:
            cells = [f"{max(values) / 1e9:.2f}" if any(values) else "-" for values in (weights, peak)]
            rows.append([name, *cells, f"{min(cosine):.4f}" if cosine else "-"])
    return ["", "weights, GB", "peak, GB", "minimum cosine of outputs"], rows


def row_name(size: tuple[str, int, int, str]) -> str:
    """``Figure.size`` in words."""
    measure, batch, context, cache = size
    if measure in (SERVE, HTTP, STREAM):
        return f"{measure}, {batch} requests of up to {context} tokens"
    unit = ", seconds" if measure == FIRST_TOKEN else ""
    return f"{measure}, {batch} x {context}{f', {cache} kernel cache' if cache else ''}{unit}"


def _said(one: Figure) -> str:
    return f"{one.model}, {row_name(one.size)}" if one.batch else f"{one.model}, {one.measure}"


def _cell(one: Figure | None, base: Figure | None) -> str:
    if one is None or one.value is None:
        return "-"
    shown = f"{one.value:,.0f}" if one.value >= 100 else f"{one.value:.1f}"
    star = "*" if one.note.startswith("extrapolated") else ""
    if base is None or base is one or not base.value:
        return shown + star
    ratio = base.value / one.value if one.measure == FIRST_TOKEN else one.value / base.value
    return f"{shown}{star} ({ratio:.2f})"
