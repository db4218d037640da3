"""``qgemm compare``: how much two checkpoints differ, weight by weight, and over a text."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.safetensors_file import OpenFiles
from qgemm.device import find_device
from qgemm.streaming.float_tensors import FloatTensor
from qgemm_cli.checkpoint import Checkpoint, name_of_dtype, open_checkpoint
from qgemm_cli.layers import MATRICES, StoredLayer, find_layers
from qgemm_cli.output import print_lines, print_table, printable, progress_bar
from qgemm_cli.pairing import pair_weights
from qgemm_cli.patterns import alike, collapse, natural_order, pattern_of
from qgemm_cli.soundness import find_problems
from qgemm_cli.weights import ConvertedExperts

_VALUES = 1 << 24  # compared at a time: 64 MB in float32
MOST_NAMES = 5


def compare(
    path_a: Path,
    path_b: Path,
    text: Path | None,
    tokenizer: Path | None,
    device_name: str,
    window: int,
    most_tokens: int,
) -> dict[str, Any]:
    """Compares; returns the document that ``--json`` prints. ``b`` is compared with ``a``, the reference."""
    device = find_device(device_name)
    a, b = open_checkpoint(path_a), open_checkpoint(path_b)
    for checkpoint in (a, b):
        layers = find_layers(checkpoint)
        if problems := [*checkpoint.problems, *find_problems(checkpoint, layers)]:
            raise CheckpointError(f"{checkpoint.path} has problems, see qgemm inspect: {problems[0]}")
    document: dict[str, Any] = {
        "a": {"path": str(path_a), "format": a.format, "variant": a.variant},
        "b": {"path": str(path_b), "format": b.format, "variant": b.variant},
        **_compare_weights(a, b),
        "text": None,
    }
    if text is not None:
        document["text"] = _compare_over_text(a, b, text, tokenizer, device, window, most_tokens)
    return document


def _compare_weights(a: Checkpoint, b: Checkpoint) -> dict[str, Any]:
    layers_a, layers_b = _layers_by_weight(a), _layers_by_weight(b)
    compared, other_shapes = [], []
    with ExitStack() as stack:
        source_a, source_b = (stack.enter_context(checkpoint.open_source()) for checkpoint in (a, b))
        pairing = pair_weights(a, b, source_a, source_b, stack.enter_context(closing(OpenFiles())))
        advance = stack.enter_context(progress_bar("compare", pairing.values, shown=True))
        for name, name_in_a in sorted(pairing.names_in_a.items(), key=lambda names: natural_order(names[0])):
            ours, theirs = pairing.b[name], pairing.a[name_in_a]
            entry = _describe(name, name_in_a, ours, theirs, layers_b.get(name), layers_a.get(name_in_a))
            if theirs.shape in (ours.shape, _transposed(ours.shape)):
                compared.append({**entry, **_difference(theirs, ours)})
            else:
                other_shapes.append({**entry, "shape_in_a": list(theirs.shape)})
            advance(math.prod(ours.shape))
    errors = [entry["relative_error"] for entry in compared if entry["quantized"]]
    names_in_a = set(pairing.names_in_a.values())
    return {
        "layers": compared,
        "same": sum(entry["relative_error"] == 0 for entry in compared),
        "largest_error": max(errors, key=_nan_last, default=None),
        "mean_error": sum(errors) / len(errors) if errors else None,
        "other_shapes": other_shapes,
        "only_in_a": sorted(pairing.a.keys() - names_in_a, key=natural_order),
        "only_in_b": sorted(pairing.b.keys() - pairing.names_in_a.keys(), key=natural_order),
        "without_counterpart": [
            *_lone_weights(pairing.a, names_in_a, layers_a, layers_b),
            *_lone_weights(pairing.b, pairing.names_in_a, layers_b, layers_a),
        ],
    }


def _lone_weights(
    tensors: dict[str, FloatTensor],
    paired: Container[str],
    layers: dict[str, StoredLayer],
    others: dict[str, StoredLayer],
) -> list[str]:
    """Weights of linear layers and experts that the other checkpoint lacks; a head may be tied to its embedding."""
    embeddings = {layer.shape for layer in others.values() if layer.kind == "embedding"}
    lone = {name: _layer_of(layers.get(name), tensor) for name, tensor in tensors.items() if name not in paired}
    found = [name for name, layer in lone.items() if layer is not None and layer.kind in MATRICES]
    return sorted((name for name in found if tensors[name].shape not in embeddings), key=natural_order)


def _describe(
    name: str, name_in_a: str, b: FloatTensor, a: FloatTensor, layer_b: StoredLayer | None, layer_a: StoredLayer | None
) -> dict[str, Any]:
    layer_a, layer_b = (_layer_of(*each) for each in ((layer_a, a), (layer_b, b)))
    known = [layer for layer in (layer_b, layer_a) if layer is not None]
    return {
        "name": name,
        "name_in_a": name_in_a,
        "kind": known[0].kind if known else "other",
        "shape": list(b.shape),
        "stored_as_a": _storage(layer_a, a),
        "stored_as_b": _storage(layer_b, b),
        "quantized": any(layer.is_quantized for layer in known),
    }


def _layer_of(layer: StoredLayer | None, tensor: FloatTensor) -> StoredLayer | None:
    return tensor.stored if layer is None and isinstance(tensor, ConvertedExperts) else layer


def _transposed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[::-1] if len(shape) == 2 else shape


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _layers_by_weight(checkpoint: Checkpoint) -> dict[str, StoredLayer]:
    """The layers of ``checkpoint``, by the names of their weights."""
    layers = find_layers(checkpoint)
    return {layer.full_name("" if layer.kind == "experts" else "weight"): layer for layer in layers}


def _storage(layer: StoredLayer | None, tensor: FloatTensor) -> str:
    return layer.storage if layer is not None else name_of_dtype(tensor.dtype)


def _difference(a: FloatTensor, b: FloatTensor) -> dict[str, Any]:
    """``||b - a|| / ||a||`` (Frobenius) and the largest difference of two values; ``a`` may be stored transposed.

    transformers' Conv1D stores its float weight as ``[K, N]``. If K equals N, the shape doesn't show that, so for a
    weight with a large difference the transpose is tried as well.
    """
    direct = None if a.shape != b.shape else _measure(_pairs(a, b))
    if direct is not None and (len(b.shape) != 2 or b.shape[0] != b.shape[1] or direct["relative_error"] < 0.5):
        return {**direct, "transposed": False}
    turned = _measure(iter([(a.rows(0, a.row_count).float().t(), b.rows(0, b.row_count).float())]))
    if direct is None or turned["relative_error"] < direct["relative_error"]:
        return {**turned, "transposed": True}
    return {**direct, "transposed": False}


def _pairs(a: FloatTensor, b: FloatTensor) -> Iterator[tuple[Tensor, Tensor]]:
    step = max(1, _VALUES // max(1, math.prod(b.shape[1:])))
    for start, stop in b.spans(step):
        yield a.rows(start, stop).float(), b.rows(start, stop).float()


def _measure(pairs: Iterator[tuple[Tensor, Tensor]]) -> dict[str, float]:
    squares = torch.zeros(2, dtype=torch.float64)
    largest = 0.0
    for wanted, got in pairs:
        difference = got - wanted
        squares += torch.stack([part.square().sum(dtype=torch.float64) for part in (difference, wanted)])
        if difference.numel():
            largest = max(largest, float(difference.abs().max()))
    error, norm = squares.sqrt().tolist()
    return {"relative_error": error / norm if norm else (math.inf if error else 0.0), "largest_difference": largest}


def _compare_over_text(
    a: Checkpoint,
    b: Checkpoint,
    text: Path,
    tokenizer: Path | None,
    device: torch.device,
    window: int,
    most_tokens: int,
) -> dict[str, Any]:
    from qgemm_cli.logits import compare_logits, load_model, read_tokens

    if tokenizer is not None:
        tokens = read_tokens(text, [tokenizer], most_tokens)
    else:
        folders = [each.folder for each in (a, b) if each.folder is not None]
        gguf = next((each.gguf for each in (a, b) if each.gguf is not None), None)
        tokens = read_tokens(text, folders, most_tokens, gguf)
    models = [load_model(checkpoint, device) for checkpoint in (a, b)]
    with progress_bar("run", tokens.numel(), shown=True) as advance:
        return {"file": str(text), **compare_logits(models[0], models[1], tokens, window, advance)}


def find_differences(document: dict[str, Any], tolerance: float | None, most_kl: float | None) -> list[str]:
    """The reasons for exit code 1: different shapes, layers without a counterpart, and errors above the limits.

    Of errors first their number, then one reason for each kind of layer.
    """
    found = [f"{one['name']} has shape {one['shape']}, in A {one['shape_in_a']}" for one in document["other_shapes"]]
    if tolerance is not None:
        errors = {layer["name"]: layer["relative_error"] for layer in document["layers"]}
        above = {name: error for name, error in errors.items() if not error <= tolerance}
        if above:
            found.append(f"{len(above)} of {len(errors)} tensors have a relative error above {tolerance:g}")
        for names in alike(above, pattern_of):
            found.append(f"{collapse(names)}: relative error {max((above[n] for n in names), key=_nan_last):.4g}")
        lone = alike(document["without_counterpart"], pattern_of)
        found += [f"{collapse(names)} is only in one of the two" for names in lone]
    text = document["text"]
    if text is not None and most_kl is not None and not text["mean_kl"] <= most_kl:
        found.append(f"mean divergence {text['mean_kl']:.4g}, above {most_kl:g}")
    return found


def show(document: dict[str, Any], every_layer: bool) -> None:
    """Prints the document as text: a row for each kind of layer that differs, or for ``every_layer``."""
    rows = list(_rows(document["layers"], every_layer))
    print_lines(f"{key.upper()}: {printable(document[key]['path'])}, {document[key]['format']}" for key in ("a", "b"))
    columns = ("layer", "count", "A", "B", "mean error", "largest error", "largest difference")
    print_table(columns, rows, right=(1, 4, 5, 6))
    print_lines(_summary(document))


def _rows(layers: list[dict[str, Any]], every_layer: bool) -> Iterator[tuple[str, ...]]:
    shown = [layer for layer in layers if every_layer or layer["relative_error"] != 0]
    name_of = str if every_layer else pattern_of
    for members in alike(shown, lambda one: (name_of(one["name"]), one["stored_as_a"], one["stored_as_b"])):
        first, errors = members[0], [layer["relative_error"] for layer in members]
        yield (
            printable(first["name"] if every_layer else collapse(layer["name"] for layer in members)),
            str(len(members)),
            first["stored_as_a"],
            first["stored_as_b"],
            f"{sum(errors) / len(errors):.5f}",
            f"{max(errors, key=_nan_last):.5f}",
            f"{max(layer['largest_difference'] for layer in members):.3g}",
        )


def _summary(document: dict[str, Any]) -> Iterator[str]:
    compared = len(document["layers"])
    yield f"{compared} tensors compared, {document['same']} of them the same"
    if document["largest_error"] is not None:
        yield (
            f"relative error of the quantized weights: mean {document['mean_error']:.5f}, "
            f"largest {document['largest_error']:.5f}"
        )
    for key in ("only_in_a", "only_in_b"):
        if names := document[key]:
            shown = ", ".join(printable(name) for name in names[:MOST_NAMES])
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            yield f"only in {key[-1].upper()}: {shown}{more}"
    if (text := document["text"]) is not None:
        yield f"over {text['tokens']} tokens of {printable(text['file'])}, {text['window']} at a time:"
        yield f"  divergence (KL, nats): mean {text['mean_kl']:.3g}, largest {text['max_kl']:.3g}"
        yield f"  same most likely token: {text['top1_agreement']:.2%}"
        if text["perplexity_a"] is not None:
            yield f"  perplexity: A {text['perplexity_a']:.4f}, B {text['perplexity_b']:.4f}"
