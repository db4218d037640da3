"""The table of a run: a row for each variant, as aligned text or Markdown."""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy.results import MINILM, OUTLIERS, PLAIN, Mean, Run
from benchmarks.accuracy.variants import BASELINE
from benchmarks.tables import render

BEGIN, END = "<!-- table -->", "<!-- end of table -->"
HEADER = [
    "variant",
    "MB",
    "perplexity",
    "KL",
    "perplexity with outliers",
    "KL with outliers",
    "MiniLM: minimum cosine",
    "mean cosine",
    "same neighbour",
]


def report(run: Run, *, markdown: bool = False) -> str:
    """The table, what it was measured on, and a line for everything that failed."""
    rows = [_row(run, variant) for variant in run.variants]
    about, settings = run.environment, run.settings
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    parameters, window = settings["parameters"] / 1e6, settings["window"]
    lines = [
        f"Language model: {parameters:.1f} million parameters; {settings['tokens']:,} held-out tokens in windows of "
        f"{window}, calibration on {settings['calibration_windows']} other windows.",
        f"MiniLM: {settings['sentences']:,} sentences, calibration on {settings['calibration_sentences']} others.",
        f"Seeds of calibration data: {len(settings['seeds'])}; a figure is their mean, ± half of their range.",
        "Perplexity, in brackets its change against bf16; KL of the logits from the bf16 model's, in nats per token.",
        f"{_devices(run)}; {versions}; commit {about['commit']}; {about['date']}.",
    ]
    parts = [render((HEADER, rows), markdown), ("  \n" if markdown else "\n").join(lines)]
    if failed := _failed(run):
        parts += ["Left out:", "\n".join(f"- {line}" for line in failed)]
    return "\n\n".join(parts)


def _devices(run: Run) -> str:
    """What was measured on what: ``NVIDIA H200 (plain, outliers), CPU (minilm)``."""
    subjects: dict[str, dict[str, None]] = {}
    for one in run.results:
        subjects.setdefault(one.device, {})[one.subject] = None
    if len(subjects) == 1:
        return next(iter(subjects))
    return ", ".join(f"{device} ({', '.join(names)})" for device, names in subjects.items())


def put_into(document: Path, run: Run) -> None:
    """Writes the table of a run between the two comments that mark its place in a Markdown document."""
    text = document.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{document} has no place for the table: {BEGIN} and, after it, {END}")
    document.write_text(f"{before}{begin}\n{report(run, markdown=True)}\n{end}{after}", encoding="utf-8")


def _failed(run: Run) -> list[str]:
    """A line for each reason: what failed, and on which models."""
    subjects: dict[tuple[str, str], dict[str, None]] = {}
    for one in run.results:
        if one.reason is not None:
            subjects.setdefault((one.variant, one.reason), {})[one.subject] = None
    return [f"{variant} ({', '.join(models)}): {reason}" for (variant, reason), models in subjects.items()]


def _row(run: Run, variant: str) -> list[str]:
    note = next(one.note for one in run.results if one.variant == variant)
    size = run.mean(variant, PLAIN, "bytes") or run.mean(variant, OUTLIERS, "bytes")
    neighbours = run.mean(variant, MINILM, "neighbours")
    return [
        f"{variant} ({note})" if note else variant,
        "-" if size is None else f"{size.mean / 1e6:.1f}",
        _perplexity(run, variant, PLAIN),
        _shown(run.mean(variant, PLAIN, "kl"), "#.2g"),
        _perplexity(run, variant, OUTLIERS),
        _shown(run.mean(variant, OUTLIERS, "kl"), "#.2g"),
        _shown(run.mean(variant, MINILM, "least_cosine"), ".4f"),
        _shown(run.mean(variant, MINILM, "mean_cosine"), ".5f"),
        _shown(None if neighbours is None else neighbours.times(100), ".1f") + ("" if neighbours is None else " %"),
    ]


def _perplexity(run: Run, variant: str, subject: str) -> str:
    """``4.321 (+0.10 ± 0.02 %)``."""
    found, base = run.mean(variant, subject, "perplexity"), run.mean(BASELINE, PLAIN, "perplexity")
    if found is None:
        return "-"
    if base is None:
        return _shown(found, "#.4g")
    # Without a sign, a change that rounds to zero.
    change = Mean(round(100 * (found.mean / base.mean - 1), 2) + 0.0, 100 * found.spread / base.mean)
    return f"{found.mean:#.4g} ({'+' if change.mean >= 0 else ''}{_shown(change, '.2f')} %)"


def _shown(value: Mean | None, form: str) -> str:
    """A mean and half of its range, where there is one; a dash for nothing."""
    if value is None:
        return "-"
    return format(value.mean, form) + (f" ± {format(value.spread / 2, form)}" if value.spread > 0 else "")
