"""The plot of ``Sensitivity``: layers from top to bottom, the worst first, with their damage on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_LAYERS = 40


def plot_damages(damages: Sequence[tuple[str, str, float]], label: str, path: str | Path | None) -> Axes:
    """Draws ``damages``, triples of layer, scheme and damage, over an axis with ``label``; see ``Sensitivity.plot``."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f'a plot needs matplotlib: pip install "matplotlib>=3.8" ({error})') from error
    worst_first = sorted(damages, key=lambda each: -each[2])
    names = list(dict.fromkeys(name for name, _, _ in worst_first))[:_MAX_LAYERS]
    places = {name: place for place, name in enumerate(names)}
    shown = [(places[name], scheme, damage) for name, scheme, damage in damages if name in places]
    longest = max(map(len, names), default=0)
    figure = Figure(figsize=(5.5 + 0.06 * longest, 1.4 + 0.2 * len(names)), layout="constrained")
    axis = figure.add_subplot()
    _set_scale(axis, [damage for _, _, damage in shown])
    edge = axis.get_xlim()[0]
    for scheme in dict.fromkeys(scheme for _, scheme, _ in shown):
        points = [(damage, place) for place, own, damage in shown if own == scheme]
        seen = [point for point in points if point[0] > edge]
        (line,) = axis.plot([x for x, _ in seen], [y for _, y in seen], "o", ms=5, alpha=0.8, label=scheme)
        rest = [place for damage, place in points if damage <= edge]
        if rest:  # matplotlib counts an unclipped empty line as a point at the figure's corner
            axis.plot([edge] * len(rest), rest, "<", ms=7, color=line.get_color(), clip_on=False)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.tick_params(axis="x", labelsize=7)
    axis.set_xlabel(label, fontsize=8)
    axis.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside upper right", ncols=4, frameon=False)
    if path is not None:
        figure.savefig(path, dpi=150)
    return axis


def _set_scale(axis: Axes, damages: Sequence[float]) -> None:
    """Sets a logarithmic axis for ``damages``, with as many labels as fit; a linear one if all are 0."""
    from matplotlib.ticker import LogLocator, NullFormatter

    positive = [damage for damage in damages if damage > 0]
    if not positive:
        axis.set_xlim(0, 1)
        return
    low, high = min(positive), max(positive)
    axis.set_xscale("log")
    axis.set_xlim(low / 1.5, high * 1.5)
    decades = math.log10(high / low)
    labelled = ((1, (1, 1.5, 2, 3, 5, 7)), (3, (1, 2, 5)), (5, (1, 3)), (math.inf, (1,)))
    axis.xaxis.set_major_locator(LogLocator(subs=next(subs for limit, subs in labelled if decades < limit)))
    axis.xaxis.set_major_formatter(lambda damage, place: f"{damage:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
