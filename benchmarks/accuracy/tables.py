"""The table of a run: a row for each variant, as aligned text or Markdown."""

from __future__ import annotations

from benchmarks.accuracy.results import MINILM, OUTLIERS, PLAIN, Mean, Run
from benchmarks.accuracy.variants import BASELINE

HEADER = (
    "variant",
    "MB",
    "perplexity",
    "change",
    "KL",
    "with outliers: perplexity",
    "change",
    "KL",
    "MiniLM: least cosine",
    "mean cosine",
    "same neighbour",
)


def report(run: Run, *, markdown: bool = False) -> str:
    """The table, what it was measured on, and a line for everything that failed."""
    rows = [_row(run, variant) for variant in run.variants]
    shown = _markdown(rows) if markdown else _text(rows)
    about, settings = run.environment, run.settings
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    failed = [f"{one.variant}, {one.subject}: {one.reason}" for one in run.results if one.reason is not None]
    lines = [
        shown,
        "",
        f"{about['device']}; {versions}; commit {about['commit']}; {about['date']}.",
        f"Language model: {settings['parameters'] / 1e6:.1f} million parameters, {settings['tokens']:,} held-out tokens "
        f"in windows of {settings['window']}, calibration on {settings['calibration_windows']} other windows.",
        f"MiniLM: {settings['sentences']:,} sentences, calibration on {settings['calibration_sentences']} others.",
        f"Seeds of calibration data: {len(settings['seeds'])}. A figure is their mean, ± half of the range.",
        "KL is in nats per token, of the logits from those of the bf16 model.",
    ]
    return "\n".join([*lines, *(["", "Left out:", *dict.fromkeys(f"- {line}" for line in failed)] if failed else [])])


def _row(run: Run, variant: str) -> list[str]:
    note = next(one.note for one in run.results if one.variant == variant)
    size = run.mean(variant, PLAIN, "bytes") or run.mean(variant, MINILM, "bytes")
    cells = [f"{variant} ({note})" if note else variant, "" if size is None else f"{size.mean / 1e6:.1f}"]
    for subject in (PLAIN, OUTLIERS):
        perplexity, kl = run.mean(variant, subject, "perplexity"), run.mean(variant, subject, "kl")
        base = run.mean(BASELINE, PLAIN, "perplexity")
        change = None
        if perplexity is not None and base is not None:
            change = Mean(100 * (perplexity.mean / base.mean - 1), 100 * perplexity.spread / base.mean)
        cells += [_shown(perplexity, "{:.4g}", spread=False), _shown(change, "{:+.2f}", " %"), _shown(kl, "{:.2g}")]
    return [
        *cells,
        _shown(run.mean(variant, MINILM, "least_cosine"), "{:.4f}"),
        _shown(run.mean(variant, MINILM, "mean_cosine"), "{:.5f}"),
        _shown(_percent(run.mean(variant, MINILM, "neighbours")), "{:.1f}", " %"),
    ]


def _percent(share: Mean | None) -> Mean | None:
    return None if share is None else Mean(100 * share.mean, 100 * share.spread)


def _shown(value: Mean | None, form: str, unit: str = "", *, spread: bool = True) -> str:
    """A mean with half of its range; a dash where there is none."""
    if value is None:
        return "-"
    text = form.format(value.mean)
    if spread and value.spread > 0:
        text += " ± " + form.replace("+", "").format(value.spread / 2)
    return text + unit


def _text(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in (HEADER, *rows)) for column in range(len(HEADER))]

    def line(cells: tuple[str, ...] | list[str]) -> str:
        name, *rest = cells
        figures = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        return "  ".join([name.ljust(widths[0]), *figures])

    return "\n".join([line(HEADER), "-" * len(line(HEADER)), *map(line, rows)])


def _markdown(rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(HEADER) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (HEADER, rule, *rows))
