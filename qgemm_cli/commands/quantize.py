"""``qgemm quantize``: from folder to folder, by ``qgemm.quantize_checkpoint`` or with calibration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import qgemm
from qgemm.calibration import Calibration
from qgemm.calibration.quantization import Quantization
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.gguf import find_gguf
from qgemm.checkpoint.layout import read_json
from qgemm.model.report import QuantReport
from qgemm.model.selection import Pattern, SchemeChoice, shown_pattern
from qgemm.scheme import QuantScheme
from qgemm.tables import size
from qgemm_cli.calibrating import Windows, check_text, parse_recipe, quantize_calibrated
from qgemm_cli.output import print_lines, print_table, printable
from qgemm_cli.patterns import alike, collapse, pattern_of


def quantize(
    source: Path,
    destination: Path,
    *,
    config: Path | None,
    scheme: Sequence[str],
    skip: Sequence[str],
    include: Sequence[str],
    input_scales: Path | None,
    recipe: str | None,
    statistics: Path | None,
    text: Path | None,
    samples: int,
    length: int,
    drop: Sequence[str],
    workers: int,
    **options: Any,
) -> dict[str, Any]:
    """Writes the checkpoint; returns the document that ``--json`` prints.

    ``options``: those of ``quantize_checkpoint`` that ``quantize_calibrated`` also has.
    """
    if (gguf := find_gguf(source)) is not None and gguf.exists():
        raise CheckpointError(
            f"{gguf} is a GGUF file, and quantize starts from a float model: give that, as transformers saves it. "
            "qgemm convert writes a GGUF file in another format and, with --scheme, in another scheme"
        )
    _check_one_gives_scales(input_scales, statistics, recipe, text)
    if config is None:
        schemes: Any = parse_schemes(scheme or ["int8"])
        methods = None if recipe is None else parse_recipe(recipe)
        scales = None if input_scales is None else read_json(input_scales)
        wanted = Quantization.of(schemes, skip=skip, include=include, input_scales=scales, recipe=methods)
    elif scheme or skip or include or recipe is not None or input_scales is not None:
        raise ValueError("--config replaces --scheme, --skip, --include, --input-scales and --recipe: omit those")
    else:
        wanted, schemes = _read_config(config)
    calibration = None if statistics is None else Calibration.load(statistics)
    windows = None if text is None else Windows(text, samples, length)
    from_files = windows is None and not wanted.goes_by_blocks(())
    if not from_files:
        _refuse_options_for_files(drop, workers, "--recipe" if windows is None else "--text")
    check_text(wanted, windows, calibration)
    count = None
    if from_files:
        given: dict[str, Any] = {name: getattr(wanted, name) for name in ("skip", "include", "input_scales")}
        given |= {"calibration": calibration, "drop": drop, "workers": workers}
        report = qgemm.quantize_checkpoint(source, destination, schemes, **given, **options)
    else:
        report, count = quantize_calibrated(source, destination, wanted, windows, **options)
    about = {"source": str(source), "destination": str(destination), "scheme": schemes, "recipe": report.recipe}
    return {**about, "windows": count, **_figures(report)}


def _figures(report: QuantReport) -> dict[str, Any]:
    return {
        "quantized": len(report.quantized),
        "kept": len(report.kept),
        "coverage": report.coverage,
        "bytes_before": report.bytes_before,
        "bytes_after": report.bytes_after,
        "largest_error": report.largest_error,
        "layers": report.to_dict()["records"],
    }


def _read_config(path: Path) -> tuple[Quantization, Any]:
    """The settings in a file, and their schemes by name."""
    wanted = Quantization.load(path)
    if wanted.device is not None or wanted.resume_folder is not None:
        raise ValueError(
            f"{path}: the device and the folder to resume from are options of the command: leave them out of the file"
        )
    by_pattern = {shown_pattern(pattern): each and each.name for pattern, each in wanted.schemes.items()}
    return wanted, [each.name for each in wanted.options] or by_pattern


def _refuse_options_for_files(drop: Sequence[str], workers: int, why: str) -> None:
    """Raises ``ValueError`` for options that only apply from files to files; ``why``: the option that prevents that."""
    if drop:
        raise ValueError(f"--drop is for quantizing from files to files, without {why}: leave it out")
    if workers > 1:
        raise ValueError("--workers is for quantizing from files to files, without a text or a recipe: leave it out")


def _check_one_gives_scales(
    input_scales: Path | None, statistics: Path | None, recipe: str | None, text: Path | None
) -> None:
    measured = [name for name, given in (("--input-scales", input_scales), ("--statistics", statistics)) if given]
    runs = [name for name, given in (("--text", text), ("--recipe", recipe)) if given is not None]
    if measured and len(several := [*measured, *runs]) > 1:
        raise ValueError(f"{several[0]} and {several[1]} both give the scales: pass one")


def parse_schemes(given: Sequence[str]) -> SchemeChoice:
    """Parses ``--scheme``: one scheme, or patterns with schemes (``PATTERN=SCHEME``), in which "float" means none."""
    if len(given) == 1 and "=" not in given[0]:
        return given[0]
    schemes: dict[Pattern, str | QuantScheme | None] = {}
    for text in given:
        pattern, equals, scheme = text.rpartition("=")
        if not equals or pattern in schemes:
            wanted = "has that pattern twice" if equals else "is one of several, each of which must be PATTERN=SCHEME"
            raise ValueError(f"--scheme {text} {wanted}")
        schemes[pattern] = None if scheme == "float" else scheme
    return schemes


def show(document: dict[str, Any]) -> None:
    """Prints the document as text: a row for each kind of layer."""
    rows = []
    for members in alike(document["layers"], lambda one: (pattern_of(one["name"]), one["action"], one["reason"])):
        action, reason = members[0]["action"], members[0]["reason"]
        errors = [layer["weight_error"] for layer in members if layer["weight_error"] is not None]
        rows.append(
            (
                printable(collapse(layer["name"] for layer in members)),
                str(len(members)),
                f"{action}: {reason}" if reason else action,
                size(sum(layer["bytes_before"] for layer in members)),
                size(sum(layer["bytes_after"] for layer in members)),
                f"{max(errors):.4f}" if errors else "",
            )
        )
    print_table(("layer", "count", "action", "before", "after", "largest error"), rows, right=(1, 3, 4, 5))
    total = document["quantized"] + document["kept"]
    print_lines(
        [
            f"{document['quantized']} of {total} layers quantized, {document['coverage']:.1%} of their bytes: "
            f"{size(document['bytes_before'])} before, {size(document['bytes_after'])} after",
            f"wrote {printable(document['destination'])}",
        ]
    )
