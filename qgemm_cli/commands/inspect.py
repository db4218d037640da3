"""``qgemm inspect``: a checkpoint's format, layers, sizes and coverage, and its problems.

It reads headers, and values that can be checked: those of quantized layers, and of files with checksums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.tensors import split_name
from qgemm.scheme import QuantScheme
from qgemm.tables import size
from qgemm_cli.checkpoint import Checkpoint, open_checkpoint
from qgemm_cli.layers import BLOCKS, StoredLayer, coverage, find_layers
from qgemm_cli.output import print_lines, print_table, printable, progress_bar
from qgemm_cli.patterns import alike, collapse, natural_order, pattern_of
from qgemm_cli.refused_values import Owners, ValuesAsLoaded, find_owners
from qgemm_cli.soundness import damaged_values, find_problems, scale_names, values_to_check

MOST_ROWS = 200
MOST_PROBLEMS = 50
MOST_TIES = 5


def examine(path: Path, verify: bool) -> dict[str, Any]:
    """Describes the checkpoint at ``path``; returns the document that ``--json`` prints.

    ``verify``: also read the values that can be checked.
    """
    checkpoint = open_checkpoint(path)
    layers = sorted(find_layers(checkpoint), key=lambda layer: natural_order(layer.name))
    problems = [*checkpoint.problems, *find_problems(checkpoint, layers)]
    contents = checkpoint.contents
    verified, refusal = _verify(checkpoint, layers, problems) if verify else (None, "")
    refusal = checkpoint.refusal or refusal
    in_memory = contents if checkpoint.matching is None else checkpoint.matching.contents
    return {
        "path": str(path),
        "format": checkpoint.format,
        "variant": checkpoint.variant,
        "architecture": _architecture(checkpoint),
        "loads": contents is not None and not refusal,
        "refusal": refusal or None,
        "notes": [] if contents is None else contents.notes,
        "files": [{"name": file.name, "bytes": file.stat().st_size} for file in checkpoint.files],
        "bytes": {
            "disk": sum(file.stat().st_size for file in checkpoint.files),
            "tensors": sum(tensor.nbytes for tensor in checkpoint.stored.values()),
            "memory": None if in_memory is None else sum(tensor.nbytes for tensor in in_memory.headers.values()),
        },
        "dtypes": _dtypes(checkpoint),
        "weights": sum(layer.weights for layer in layers if layer.kind != "other"),
        "coverage": coverage(layers),
        "tied": {} if contents is None else contents.manifest.tied,
        "layers": [_describe(layer, checkpoint) for layer in layers],
        "verified": verified,
        "problems": problems,
    }


def _verify(checkpoint: Checkpoint, layers: list[StoredLayer], problems: list[str]) -> tuple[dict[str, int], str]:
    """Checks values, and adds to ``problems``; returns how much was read, and the reason why a load would fail."""
    scales, contents, owners = scale_names(layers), checkpoint.contents, Owners()
    as_loaded = None
    if contents is not None and checkpoint.is_foreign:
        as_loaded = ValuesAsLoaded(checkpoint, contents)
    elif contents is not None:
        owners = find_owners(contents)
    wanted, loaded = values_to_check(checkpoint, scales, owners), {} if as_loaded is None else as_loaded.stored
    total = sum(tensor.nbytes for tensor in (*wanted.values(), *loaded.values()))
    with progress_bar("verify", total, shown=total > 0) as advance:
        problems += damaged_values(wanted, scales, owners, advance)
        refused = [] if as_loaded is None else as_loaded.find_problems(advance)
    # For a tensor with invalid scales, one problem is enough.
    known = tuple(problem.partition(" holds ")[0] for problem in problems)
    problems += [problem for problem in refused if not problem.startswith(known)]
    read = wanted | loaded
    found = {"tensors": len(read), "bytes": sum(tensor.nbytes for tensor in read.values())}
    return found, (as_loaded.refusal if as_loaded is not None else "") or (refused[0] if refused else "")


def _architecture(checkpoint: Checkpoint) -> str | None:
    names = checkpoint.config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _dtypes(checkpoint: Checkpoint) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, tensor in checkpoint.stored.items():
        counts[checkpoint.storage_of(name)] += tensor.nbytes
    return dict(counts.most_common())


def _describe(layer: StoredLayer, checkpoint: Checkpoint) -> dict[str, Any]:
    scheme = None if checkpoint.contents is None else _scheme_of(layer, checkpoint.contents)
    return {
        "name": layer.name,
        "kind": layer.kind,
        "storage": layer.storage,
        "quantized": layer.is_quantized,
        "scheme": None if scheme is None else scheme.of(layer.name.rpartition(".")[2]).name,
        "shape": list(layer.shape),
        "bytes": layer.nbytes,
    }


def _scheme_of(layer: StoredLayer, contents: Contents) -> QuantScheme | None:
    """Its scheme, or that of a layer that is made from its tensors, if ``contents`` call it by another name."""
    names = [layer.module]
    for leaf in layer.tensors:
        targets = contents.conversion_of(layer.full_name(leaf)).targets
        names += [split_name(target.name)[0] for target in targets if target is not None]
    return next((contents.manifest.layers[name] for name in names if name in contents.manifest.layers), None)


def show(document: dict[str, Any], every_layer: bool) -> None:
    """Prints the document as text: a row for each kind of layer, or for ``every_layer``."""
    print_lines(_summary(document))
    layers = document["layers"]
    rows = list(_rows(layers, every_layer))
    shown = rows if every_layer else rows[:MOST_ROWS]
    print_table(("layer", "count", "kind", "stored as", "shape", "bytes"), shown, right=(1, 5))
    if len(shown) < len(rows):
        print_lines([f"and {len(rows) - len(shown)} rows more: --all shows every layer"])
    problems = document["problems"]
    print_lines(f"problem: {printable(problem, 1000)}" for problem in problems[:MOST_PROBLEMS])
    if len(problems) > MOST_PROBLEMS:
        print_lines([f"and {len(problems) - MOST_PROBLEMS} problems more: --json has all of them"])
    if not problems:
        print_lines(["no problems found"])


def _summary(document: dict[str, Any]) -> Iterable[str]:
    variant = f" ({document['variant']})" if document["variant"] else ""
    architecture = f", {document['architecture']}" if document["architecture"] else ""
    yield printable(f"{document['format']}{variant}{architecture}", 200)
    files, nbytes = len(document["files"]), document["bytes"]
    memory = "" if nbytes["memory"] is None else f", {size(nbytes['memory'])} in memory as qgemm loads it"
    yield f"{size(nbytes['disk'])} in {files} file{'s' * (files != 1)}{memory}; {document['weights']:,} weights"
    yield "dtypes: " + ", ".join(f"{name} {size(count)}" for name, count in document["dtypes"].items())
    share = document["coverage"]
    if share is not None:
        yield f"quantized: {share:.1%} of the weights of linear layers and experts"
    refusal = printable(document["refusal"] or "see the problems", 500)
    loads = "qgemm loads it, unless a problem below stops it" if document["problems"] else "qgemm loads it"
    yield loads if document["loads"] else f"qgemm doesn't load it: {refusal}"
    yield from (f"note: {printable(note, 500)}" for note in document["notes"])
    for alias, name in list(document["tied"].items())[:MOST_TIES]:
        yield f"tied: {printable(alias)} is {printable(name)}"
    if document["verified"] is not None:
        tensors = document["verified"]["tensors"]
        yield f"values checked: {tensors} tensors, {size(document['verified']['bytes'])}"


def _rows(layers: list[dict[str, Any]], every_layer: bool) -> Iterable[tuple[str, ...]]:
    name_of, others = str if every_layer else pattern_of, ("kind", "storage", "scheme", "shape")
    for members in alike(layers, lambda layer: (name_of(layer["name"]), *(str(layer[key]) for key in others))):
        name, kind, storage, scheme, shape = (members[0][key] for key in ("name", *others))
        shown = name if every_layer else collapse(layer["name"] for layer in members)
        yield (
            printable(shown) or "(the model itself)",
            str(len(members)),
            kind,
            f"{storage} as {scheme}" if scheme and storage in BLOCKS else scheme or storage,
            " x ".join(map(str, shape)),
            size(sum(layer["bytes"] for layer in members)),
        )
