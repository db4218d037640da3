"""The report of a checkpoint: in a file of its own with the id of the save, or in the metadata of the weights' files.

transformers' ``save_pretrained`` doesn't let a quantizer write a file, so there it is in the metadata.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import CONFIG_FILE, SAVE_KEY, checkpoint_file, parse_json, read_json
from qgemm.checkpoint.manifest import Manifest
from qgemm.checkpoint.safetensors_file import check_save, read_metadata
from qgemm.model.report import QuantReport
from qgemm.warn import warn_user

REPORT = "qgemm_report"
"""The key for the report in a file's metadata; it is JSON."""


def read_report(folder: Path, manifest: Manifest, files: Iterable[Path]) -> dict[str, Any] | None:
    """The report of the checkpoint in ``folder``, or None if it has none; ``files``: the files with its weights.

    Raises ``FileNotFoundError`` if the report's file is missing: a download of only the weights lacks it, and still
    loads. Raises ``CheckpointError`` if the report is damaged, or from another save.
    """
    report = manifest.report
    if report is None:
        for file in files:  # each file contains the same
            text = read_metadata(file).get(REPORT)
            return None if text is None else parse_json(text, file)
    if not isinstance(report, str):
        return report
    if report == Path(report).name and not os.path.lexists(folder / report):
        raise FileNotFoundError(folder / report)
    path = checkpoint_file(folder, report)
    values = read_json(path)
    check_save(path, values.get(SAVE_KEY), manifest.save)
    found = values.get("report")
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: report must be an object, not {type(found).__name__}")
    return found


def parse_report(values: dict[str, Any], manifest: Manifest, folder: Path) -> QuantReport:
    """Parses ``values`` from ``read_report``; raises ``CheckpointError`` if they aren't a report."""
    try:
        return QuantReport.from_dict(values)
    except (KeyError, TypeError, ValueError) as error:
        place = folder / (manifest.report if isinstance(manifest.report, str) else CONFIG_FILE)
        raise CheckpointError(f"{place}: report can't be read: {error}") from error


def warn_without_report(folder: Path, name: object) -> None:
    """Warns that the report's file, called ``name``, is missing."""
    warn_user(
        f"{folder} has no {name}: the model is loaded, but qgemm.report lists its layers without errors and without "
        "those left in float"
    )
