"""The results as tables, for a terminal or in Markdown: means over models first, then every shape."""

from collections.abc import Sequence
from statistics import geometric_mean

from benchmarks.results import ConfigCheck, Measurement, Quantization, Run, speedups
from benchmarks.shapes import SUMMARY_FAMILIES

OURS = "qgemm"
LARGE_WEIGHT_BYTES = 100_000_000
DECODE_ROWS = 16

Table = tuple[list[str], list[list[str]]]


def render(table: Table, markdown: bool) -> str:
    """A table as aligned columns, or in Markdown with numbers on the right."""
    header, rows = table
    if markdown:
        rule = ["---", *["---:"] * (len(header) - 1)]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])
    widths = [max(len(cells[column]) for cells in [header, *rows]) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in [header, *rows]
    )


def report(run: Run, markdown: bool = False) -> str:
    """All tables of a run, with where it was measured above them."""
    heading = "## " if markdown else ""
    parts = [describe(run)]
    if any(one.us and one.provider == OURS for one in run.measurements):
        over, families = summary_families(run.measurements)
        parts += [
            f"{heading}Times as fast as others over {over}: geometric mean (minimum)",
            render(summary_table(run.measurements, families), markdown),
            "\n".join(("- " if markdown else "") + line for line in extremes(run.measurements)),
        ]
    for level, title in (("gemm", "GEMM alone"), ("layer", "Whole layer, quantization of activations included")):
        if any(one.level == level for one in run.measurements):
            parts += [f"{heading}{title}: microseconds", render(shape_table(run.measurements, level), markdown)]
    if run.quantizations:
        title = f"{heading}quantize_rows"
        parts += [title, render(quantization_table(run.quantizations), markdown)]
    if run.host_us:
        parts += [f"{heading}Host time of an eager call of the layer", render(host_table(run.host_us), markdown)]
    if run.config_checks:
        parts += [f"{heading}The chosen config beside the fastest", render(config_table(run.config_checks), markdown)]
        parts.append(config_summary(run.config_checks))
    notes = reasons(run.measurements)
    if notes:
        parts += [f"{heading}Not timed", "\n".join(("- " if markdown else "") + note for note in notes)]
    return "\n\n".join(part for part in parts if part)


def describe(run: Run) -> str:
    """Where and with what it was measured, in one line."""
    about = run.environment
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    peaks = ", ".join(f"{kind} {peak:g}" for kind, peak in run.peak_tops.items())
    return (
        f"{about['device']}; {versions}; commit {about['commit']}; {about['date']}. "
        f"Copy bandwidth {run.bandwidth / 1e12:.3g} TB/s, measured; "
        + (f"peak TOPS by the datasheet: {peaks}." if peaks else "no peak known, so the limit is the memory's alone.")
    )


def summary_families(measurements: Sequence[Measurement]) -> tuple[str, tuple[str, ...] | None]:
    """What means are over, in words, and the families of those shapes; None for all."""
    shapes = {(one.N, one.K) for one in measurements if one.family in SUMMARY_FAMILIES}
    if shapes:
        return f"{len(shapes)} weight shape{'s' * (len(shapes) > 1)} of Llama 3", SUMMARY_FAMILIES
    return "all weight shapes", None


def summary_table(measurements: Sequence[Measurement], families: Sequence[str] | None) -> Table:
    """By M, how many times as fast as each other provider qgemm is: the geometric mean, and the minimum in brackets."""
    columns = {
        f"{name}, {level}": speedups(measurements, level, name, OURS, families)
        for level in ("gemm", "layer")
        for name in providers_at(measurements, level)
        if name != OURS
    }
    columns = {title: spreads for title, spreads in columns.items() if spreads}
    rows = []
    for M in sorted({M for spreads in columns.values() for M in spreads}):
        cells = [spreads.get(M) for spreads in columns.values()]
        rows.append([str(M), *(f"{cell.mean:.2f} ({cell.least:.2f})" if cell else "-" for cell in cells)])
    return ["M", *columns], rows


def shape_table(measurements: Sequence[Measurement], level: str) -> Table:
    """Every shape and M: microseconds of each provider, and how near qgemm comes to the limits."""
    found = {(one.N, one.K, one.M, one.provider): one for one in measurements if one.level == level}
    names = providers_at(measurements, level)
    rows = []
    last = None
    for N, K, M in dict.fromkeys(key[:3] for key in found):
        ours = found.get((N, K, M, OURS))
        times = [found.get((N, K, M, name)) for name in names]
        row = ["" if last == (N, K) else f"{N} x {K}", str(M), *(_cell(one, "us", ".1f") for one in times)]
        if OURS in names:
            row += [_cell(ours, "tops", ".1f"), _cell(ours, "tb_per_s", ".2f"), _cell(ours, "share", ".0%")]
        rows.append(row)
        last = (N, K)
    return ["N x K", "M", *names, *([f"{OURS} TOPS", "TB/s", "of the limit"] if OURS in names else [])], rows


def host_table(host_us: dict[str, dict[str, float]]) -> Table:
    """Host microseconds of an eager call by rows, and the ratio to bf16's."""
    base = host_us.get("bf16", {})
    every = list(dict.fromkeys(M for times in host_us.values() for M in times))
    rows = []
    for name, times in host_us.items():
        row = [name]
        for M in every:
            us, bf16 = times.get(M), base.get(M)
            row += ["-" if us is None else f"{us:.1f}", f"{us / bf16:.2f}" if us and bf16 else "-"]
        rows.append(row)
    return ["layer", *(title for M in every for title in (f"M = {M}, us", "of bf16's"))], rows


def quantization_table(quantizations: Sequence[Quantization]) -> Table:
    """Time and rate of every size of input."""
    rows = [[f"{one.M} x {one.K}", f"{one.us:.1f}", f"{one.tb_per_s:.2f}", f"{one.share:.0%}"] for one in quantizations]
    return ["rows x columns", "us", "TB/s", "of a copy's"], rows


def config_table(checks: Sequence[ConfigCheck]) -> Table:
    """Chosen and fastest config of every product, and the ratio of their times."""
    rows = [
        [f"{one.N} x {one.K}", str(one.M), f"{one.chosen_us:.1f}", f"{one.best_us:.1f}", f"{one.ratio:.3f}"]
        + [_short(one.chosen), "the chosen one" if one.best == one.chosen else _short(one.best)]
        for one in checks
    ]
    return ["N x K", "M", "chosen us", "best us", "ratio", "chosen", "best"], rows


def config_summary(checks: Sequence[ConfigCheck]) -> str:
    """The geometric mean of the ratios, and the worst."""
    worst = max(checks, key=lambda one: one.ratio)
    return (
        f"Chosen / fastest over {len(checks)} products: {geometric_mean(one.ratio for one in checks):.3f} in the "
        f"geometric mean, {worst.ratio:.3f} at worst (M = {worst.M}, {worst.N} x {worst.K})."
    )


def extremes(measurements: Sequence[Measurement]) -> list[str]:
    """The highest rates of qgemm's GEMM, and the minimum memory rate on large weights with few rows."""
    ours = [one for one in measurements if one.provider == OURS and one.level == "gemm" and one.us]
    if not ours:
        return []
    fastest = max(ours, key=lambda one: one.tops or 0)
    lines = [f"Highest rate: {fastest.tops:.4g} TOPS ({_size(fastest)})."]
    large = [one for one in ours if one.N * one.K >= LARGE_WEIGHT_BYTES and one.M <= DECODE_ROWS]
    if large:
        low = min(large, key=lambda one: one.tb_per_s or 0)
        high = max(large, key=lambda one: one.tb_per_s or 0)
        lines.append(
            f"Weights of 100 MB and more, M up to {DECODE_ROWS}: {low.tb_per_s:.2f} TB/s ({_size(low)}) "
            f"to {high.tb_per_s:.2f} TB/s ({_size(high)})."
        )
    return lines


def reasons(measurements: Sequence[Measurement]) -> list[str]:
    """Why providers weren't timed, each reason once with how often it came."""
    sizes: dict[tuple[str, str, str], list[Measurement]] = {}
    for one in measurements:
        if one.reason:
            sizes.setdefault((one.provider, one.level, one.reason), []).append(one)
    return [
        f"{provider}, {level}: {reason} ({_size(found[0])}{f' and {len(found) - 1} more' if len(found) > 1 else ''})"
        for (provider, level, reason), found in sizes.items()
    ]


def providers_at(measurements: Sequence[Measurement], level: str) -> list[str]:
    """The names of those with measurements at ``level``, in their order."""
    return list(dict.fromkeys(one.provider for one in measurements if one.level == level))


def _size(one: Measurement) -> str:
    return f"M = {one.M}, {one.N} x {one.K}"


def _cell(one: Measurement | None, name: str, form: str) -> str:
    value = getattr(one, name, None)
    return "-" if value is None else format(value, form)


def _short(config: str) -> str:
    """``GemmConfig(block_m=128, ...)`` with less to read."""
    inner = config.removeprefix("GemmConfig(").removesuffix(")")
    return " ".join(part.strip() for part in inner.split(","))
