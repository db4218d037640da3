"""Finds what is wrong with a checkpoint: tensors that are missing, don't fit together, or have impossible values."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator

import torch
from torch import Tensor

from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.safetensors_file import StoredTensor, has_checksums, read_and_check
from qgemm.checkpoint.tensors import FLOAT_DTYPES
from qgemm_cli.checkpoint import Checkpoint
from qgemm_cli.layers import StoredLayer
from qgemm_cli.patterns import ranges
from qgemm_cli.refused_values import Owners

CHECKED_FORMATS = (
    *("qgemm", "compressed-tensors", "bitsandbytes", "gptq", "awq", "fp8", "auto-round"),
    *("intel/auto-round", "torchao", "fbgemm_fp8", "modelopt"),
)
"""The formats for which it is known which tensors a layer has."""

_BLOCK = re.compile(r"(.*?(?:^|\.)(?:layers|layer|blocks|block|h))\.(\d{1,6})\.[^.]+\.")
# Blocks that are examined one by one: a file can name as many lists of them as it has tensors.
_MOST_COUNTED = 1000


def find_problems(checkpoint: Checkpoint, layers: list[StoredLayer]) -> Iterator[str]:
    """The problems that names, shapes and dtypes show."""
    for layer in layers if checkpoint.format in CHECKED_FORMATS else ():
        yield from _problems_of_layer(layer)
    if checkpoint.contents is not None and not checkpoint.contents.is_foreign:
        yield from _problems_of_manifest(checkpoint, layers)
    yield from _missing_blocks(checkpoint)


def _problems_of_layer(layer: StoredLayer) -> Iterator[str]:
    tensors = layer.tensors
    if layer.kind == "other":
        for leaf in tensors:
            if leaf in ("weight_scale", "weight_scale_inv", "SCB", "qzeros"):
                yield f"{layer.full_name(leaf)} belongs to a weight that is missing or not quantized"
        return
    found = [leaf for leaf in ("weight_scale", "weight_scale_inv", "SCB") if leaf in tensors]
    if layer.kind == "linear" and layer.storage in ("int8", "fp8") and "weight" in tensors:
        if layer.storage == "int8" and not layer.scales:
            yield f"{layer.full_name('weight')} is int8 but has no scale"
        yield from (_misfit(layer, leaf) for leaf in found if not _scale_fits(layer, leaf))
    elif layer.kind == "linear" and not layer.is_quantized:
        for leaf in found:
            yield f"{layer.full_name(leaf)} belongs to a weight that is {layer.storage}, not quantized"
    if "qweight" in tensors:
        for leaf in ("scales", "qzeros"):
            if leaf not in tensors:
                yield f"{layer.name} has a qweight but no {leaf}"
    if "weight_packed" in tensors and "weight_scale" not in tensors:
        yield f"{layer.name} has a weight_packed but no weight_scale"
    bias = tensors.get("bias")
    if layer.kind == "linear" and bias is not None and len(layer.shape) == 2:
        if bias.shape != layer.shape[:1]:
            yield _misfit(layer, "bias")


def _misfit(layer: StoredLayer, leaf: str) -> str:
    shape = list(layer.tensors[leaf].shape)
    return f"{layer.full_name(leaf)} has shape {shape}, which doesn't fit a weight of {list(layer.shape)}"


def _scale_fits(layer: StoredLayer, leaf: str) -> bool:
    n, k = layer.shape
    shape = layer.tensors[leaf].shape
    if leaf == "SCB":
        return shape == (n,)
    is_blocks = layer.storage == "fp8" and len(shape) == 2 and 1 <= shape[0] <= n and 1 <= shape[1] <= k
    is_groups = layer.storage == "int8" and len(shape) == 2 and shape[0] == n and 1 <= shape[1] <= k
    return shape in ((), (1,), (n,), (n, 1)) or is_blocks or is_groups


def _problems_of_manifest(checkpoint: Checkpoint, layers: list[StoredLayer]) -> Iterator[str]:
    assert checkpoint.contents is not None
    manifest, stored = checkpoint.contents.manifest, checkpoint.stored
    quantized = {layer.module for layer in layers if layer.is_quantized}
    for name in manifest.layers:
        if name not in quantized and name not in manifest.tied:
            alias = manifest.tied.get(f"{name}.weight", "").removesuffix(".weight")
            if alias not in quantized:
                yield f"config.json says that {name} is quantized, but the files hold no such layer"
    for name in sorted(quantized - manifest.layers.keys()):
        yield f"{name} is quantized, but config.json doesn't list it"
    for alias, name in manifest.tied.items():
        if name not in stored:
            yield f"config.json ties {alias} to {name}, which no file holds"
        elif alias in stored:
            yield f"config.json ties {alias} to {name}, but the files hold both"


def _missing_blocks(checkpoint: Checkpoint) -> Iterator[str]:
    """Whole blocks of a model without any tensor in the files."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in checkpoint.stored:
        if match := _BLOCK.match(name):
            numbers[match[1]].add(int(match[2]))
    counted = checkpoint.config.get("num_hidden_layers", checkpoint.config.get("n_layer"))
    for prefix, present in numbers.items():
        wanted = max(present) + 1
        if len(numbers) == 1 and type(counted) is int and wanted < counted <= 100_000:
            wanted = counted
        if len(present) < wanted <= 100_000:
            missing = (number for number in range(wanted) if number not in present)
            which = f": {ranges(missing)} is missing" if wanted <= _MOST_COUNTED else ""
            yield f"{prefix} has {len(present)} of {wanted} blocks{which}"


def values_to_check(checkpoint: Checkpoint, scales: Container[str], owners: Container[str]) -> dict[str, StoredTensor]:
    """The tensors that ``damaged_values`` should read: ``scales``, ``owners``, and all of a file with checksums."""
    checked = {path for path in checkpoint.files if has_checksums(path)}
    return {
        name: tensor
        for name, tensor in checkpoint.stored.items()
        if tensor.dtype is not None and (tensor.path in checked or name in scales or name in owners)
    }


def scale_names(layers: Iterable[StoredLayer]) -> set[str]:
    """The scales of quantized layers, except those that are quantized themselves."""
    return {
        name
        for layer in layers
        if layer.is_quantized
        for name, tensor in layer.scales.items()
        if tensor.dtype in FLOAT_DTYPES
    }


def damaged_values(
    stored: dict[str, StoredTensor], scales: Container[str], owners: Owners, advance: Callable[[float], object]
) -> Iterator[str]:
    """Reads ``stored``, one tensor at a time, and reports those that differ from their checksum or have invalid values.

    ``scales``: the names of scales. ``owners``: the layers that contain tensors unchanged.
    """
    by_path: dict[object, dict[str, StoredTensor]] = defaultdict(dict)
    for name, tensor in stored.items():
        by_path[tensor.path][name] = tensor
    for path, tensors in by_path.items():
        try:
            for name, value, is_sound in read_and_check(tensors, torch.device("cpu")):
                advance(tensors[name].nbytes)
                layer, leaf = owners.get(name, (None, ""))
                problem = "" if layer is None else layer.problem_with(leaf, value)
                if is_sound is False:
                    yield f"{path}: {name} doesn't have the checksum that it was saved with"
                elif name in scales and (bad := _bad_scales(name, value, may_be_negative=not problem)):
                    yield f"{path}: {name} holds {bad} of {value.numel()} scales that can't be"
                elif problem:
                    yield f"{path}: {name} {problem}"
        except CheckpointError as error:
            yield str(error)


def _bad_scales(name: str, value: Tensor, may_be_negative: bool) -> int:
    """How many are NaN or infinite, or are 0 where that would turn a whole weight, or an input, into zeros by mistake.

    Negative ones count too, unless the layer accepts them.
    """
    is_fine = value.isfinite()
    if not may_be_negative:
        is_fine &= value >= 0
    if name.endswith("input_scale"):
        is_fine &= value > 0
    elif value.ndim < 2 and not name.endswith((".scales", "SCB", "absmax")) and not bool(value.any()):
        is_fine &= False  # in some libraries' files rows of zeros have a scale of 0, but not all rows
    return int((~is_fine).sum())
