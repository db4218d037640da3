"""The plot of a run: how many times as fast as bf16 every provider is, a panel a model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from benchmarks.models.providers import BASE
from benchmarks.models.results import FIRST_TOKEN, Run
from benchmarks.models.tables import row_name


def draw(run: Run, path: Path) -> bool:
    """Writes a PNG; prints why not without matplotlib or anything to compare, and returns whether it did."""
    found = {(one.model, one.layers, one.size, one.provider): one.value for one in run.figures if one.value}
    bases = [key for key in found if key[3] == BASE and key[2][0] != FIRST_TOKEN]
    models = list(dict.fromkeys(key[:2] for key in bases))
    if importlib.util.find_spec("matplotlib") is None or not models:
        print("no plot: " + ("there is nothing beside bf16" if not models else "matplotlib is not installed"))
        return False
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(one.provider for one in run.figures))
    heights = [sum(key[:2] == model for key in bases) for model in models]
    figure, panels = pyplot.subplots(
        len(models), 1, figsize=(8, 1 + 0.22 * len(names) * sum(heights)), height_ratios=heights, squeeze=False
    )
    width = 0.8 / len(names)
    for panel, model in zip(panels[:, 0], models, strict=True):
        sizes = [key[2] for key in bases if key[:2] == model]
        for place, name in enumerate(names):
            keys = [(*model, size, name) for size in sizes]
            points = [
                (row + place * width, found[key] / found[key[:3] + (BASE,)])
                for row, key in enumerate(keys)
                if key in found
            ]
            if points:
                rows, values = zip(*points, strict=True)
                bars = panel.barh(rows, values, width, label=name)
                panel.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
        panel.set_yticks([row + 0.4 - width / 2 for row in range(len(sizes))], [row_name(size) for size in sizes])
        panel.invert_yaxis()
        panel.set_title(f"{model[0]}, {model[1]} layers", fontsize=10)
        panel.grid(axis="x", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1.05), ncol=min(len(names), 3), frameon=False)
    panels[-1, 0].set_xlabel(f"times as fast as {BASE} in transformers")
    figure.suptitle(run.environment["device"], fontsize=10, x=0.01, ha="left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True
