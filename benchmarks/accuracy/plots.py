"""The plot of a run: how far every variant is from the bf16 model, without and with outlier channels."""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy.results import OUTLIERS, PLAIN, Run
from benchmarks.accuracy.variants import BASELINE

_LEAST = 1e-6
"""A KL below it is drawn there."""


def draw(run: Run, path: Path) -> None:
    """A dot for the KL of each variant's logits on each model, a line over the seeds; less is better."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in run.variants if name != BASELINE and (run.of(name, PLAIN) or run.of(name, OUTLIERS))]
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.32 * len(names)), layout="constrained")
    for subject, marker, label in ((PLAIN, "o", "as trained"), (OUTLIERS, "D", "with outlier channels")):
        found = [(row, one.kl) for row, name in enumerate(names) for one in run.of(name, subject) if one.kl is not None]
        if found:
            rows, values = zip(*found, strict=True)
            axes.scatter([max(value, _LEAST) for value in values], rows, marker=marker, s=26, alpha=0.7, label=label)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="both", alpha=0.3)
    axes.set_xlabel("KL divergence from the bf16 model's logits, nats per token")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)  # above the dots
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
