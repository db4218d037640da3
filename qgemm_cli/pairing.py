"""``pair_weights``: matches the weights of two checkpoints by their names.

Tensors of a float checkpoint, and of another library's, have the model's names or those in the files, whichever the
other checkpoint shares; those in qgemm's own format have the model's names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from qgemm.checkpoint.contents import Contents, PartReader, check_unheld
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.safetensors_file import OpenFiles
from qgemm.checkpoint.tensors import FLOAT_DTYPES, split_name
from qgemm.nn import QuantExperts, QuantLinear, linear_class
from qgemm.nn.block_scaled import BlockScaledLinear
from qgemm.nn.float_experts import known_experts
from qgemm.numerics.formats import FP8_DTYPES
from qgemm.scheme import QuantScheme
from qgemm.streaming.float_tensors import FloatTensor, ordered_experts, stored_float
from qgemm.streaming.loading import plan_loading
from qgemm.streaming.source import Source
from qgemm_cli.checkpoint import FLOAT, Checkpoint
from qgemm_cli.layers import StoredLayer, find_layers
from qgemm_cli.weights import Converted, ConvertedExperts, Dequantized, Made, Restored, RestoredExperts

MOST_PREFIXES = 32


@dataclass(frozen=True)
class Pairing:
    """The tensors of two checkpoints by name, and for each tensor of ``b`` that is also in ``a``, its name there."""

    a: dict[str, FloatTensor]
    b: dict[str, FloatTensor]
    names_in_a: dict[str, str]

    @property
    def values(self) -> int:
        """The number of values in the tensors that both have."""
        return sum(math.prod(self.b[name].shape) for name in self.names_in_a)


def pair_weights(a: Checkpoint, b: Checkpoint, source_a: Source, source_b: Source, files: OpenFiles) -> Pairing:
    """Pairs tensors by the names that give the most in common: those of the model, or those in the files.

    Integers that aren't quantized weights are left out. ``files``: what other libraries' tensors are read from. Raises
    ``CheckpointError`` if the two have no tensor in common, and for weights in a format that isn't dequantized here.
    """
    pairings = [
        _pair(weights_a, weights_b, {} if b.contents is None else b.contents.manifest.tied)
        for weights_a, weights_b in product(_find_weights(a, source_a, files), _find_weights(b, source_b, files))
    ]
    best = max(pairings, key=lambda pairing: (pairing.values, len(pairing.names_in_a)))
    if not best.names_in_a:
        raise CheckpointError(f"{a.path} and {b.path} have no tensor in common: they belong to different models")
    return best


def _pair(a: dict[str, FloatTensor], b: dict[str, FloatTensor], tied_in_b: dict[str, str]) -> Pairing:
    names_in_a = match_names(b, a)
    aliases = {alias: name for alias, name in tied_in_b.items() if alias in a and alias not in b and name in b}
    return Pairing(
        a, b | {alias: b[name] for alias, name in aliases.items()}, names_in_a | {alias: alias for alias in aliases}
    )


def _find_weights(checkpoint: Checkpoint, source: Source, files: OpenFiles) -> list[dict[str, FloatTensor]]:
    """The tensors of ``checkpoint`` by the model's names, if they are known, and by the names in the files."""
    contents = checkpoint.contents
    if checkpoint.gguf is not None and contents is None:
        raise CheckpointError(checkpoint.refusal)
    if contents is not None and checkpoint.is_foreign:
        by_model = _of_model(checkpoint, contents, files)
        if checkpoint.gguf is not None:
            return [by_model]
        try:
            return [by_model, _in_files(checkpoint, source, files)]
        except CheckpointError:
            if not by_model:
                raise
            return [by_model]
    in_files = _in_files(checkpoint, source, files)
    if checkpoint.format == FLOAT and checkpoint.config:
        try:
            loading = plan_loading(source, drop=["*"])
        except (CheckpointError, ImportError):  # not a transformers model
            return [in_files]
        tensors = {name: tensor for name, tensor in loading.tensors.items() if tensor.dtype.is_floating_point}
        return [_order_experts(tensors, loading.model), in_files]
    return [in_files]


def _of_model(checkpoint: Checkpoint, contents: Contents, files: OpenFiles) -> dict[str, FloatTensor]:
    """The tensors of another library's checkpoint, as ``load_quantized`` makes them; empty if the model can't be built.

    Experts have the names and the order of ``QuantExperts``. Raises ``CheckpointError`` also for invalid values in
    tensors that the model doesn't use; ``contents``: the tensors by their names in the files.
    """
    try:
        found = checkpoint.match()
    except (CheckpointError, ImportError):
        check_unheld(contents)
        return {}
    check_unheld(found.contents)
    contents, tensors = found.contents, dict[str, FloatTensor]()
    parts = PartReader(contents, files)
    for name, layer in found.layers.items():
        if isinstance(layer, QuantExperts):
            for leaf in layer.weight_names:
                tensors[f"{name}.{leaf}"] = ConvertedExperts(parts, name, layer, leaf)
        else:
            tensors[f"{name}.weight"] = Converted(parts, name)
    for name, header in contents.headers.items():
        layer_name, leaf = split_name(name)
        is_part = layer_name in found.layers and not leaf.endswith(("bias", "input_scale"))
        if not is_part and header.dtype in FLOAT_DTYPES:
            tensors[name] = Made(parts, name)
    return tensors


def _in_files(checkpoint: Checkpoint, source: Source, files: OpenFiles) -> dict[str, FloatTensor]:
    in_files: dict[str, FloatTensor] = {}
    contents = checkpoint.contents
    schemes = {} if contents is None else contents.manifest.layers
    parts = None if contents is None or not contents.is_foreign else PartReader(contents, files)
    for layer in find_layers(checkpoint):
        if parts is not None and layer.name in schemes and layer.full_name("weight") in parts.contents.headers:
            in_files.update(_of_foreign(layer, source, parts))
        else:
            in_files.update(_of_layer(layer, source, schemes.get(layer.module if parts is None else layer.name)))
    return in_files


def _order_experts(tensors: dict[str, FloatTensor], model: nn.Module) -> dict[str, FloatTensor]:
    """``tensors`` of the float ``model``; those of experts get the names and the order of ``QuantExperts``."""
    ordered = dict(tensors)
    for module_name, module in model.named_modules():
        layout = known_experts(module)
        if layout is None:  # in this case they aren't quantized either
            continue
        own = {name: ordered.pop(f"{module_name}.{theirs}", None) for name, theirs in layout.parameters.items()}
        for name, tensor in own.items():
            if tensor is not None:
                ordered[f"{module_name}.{name}"] = ordered_experts(tensor, name, layout)
    return ordered


def _of_layer(layer: StoredLayer, source: Source, scheme: QuantScheme | None) -> Iterable[tuple[str, FloatTensor]]:
    main = "" if layer.kind == "experts" else "weight"
    weight = layer.tensors.get(main)
    kind = QuantLinear if scheme is None or layer.kind != "linear" else linear_class(scheme)
    others: tuple[str, ...] = ()
    if scheme is not None and layer.kind == "experts" and scheme.is_weight_only:
        yield layer.full_name(main), RestoredExperts(source, layer, scheme.of(layer.name.rpartition(".")[2]))
        others = tuple(leaf for leaf in layer.tensors if leaf != "_bias")
    elif scheme is not None and kind not in (QuantLinear, BlockScaledLinear):
        yield layer.full_name(main), Restored(source, layer, scheme)
        # Other parts of the weight, and a bias that differs from the float layer's.
        others = kind.row_names + kind.index_names
    elif layer.is_quantized:
        leaf = next(
            (leaf for leaf in ("weight_scale", "weight_scale_inv", "SCB", "_scale") if leaf in layer.tensors), ""
        )
        if weight is None or weight.dtype not in (torch.int8, *FP8_DTYPES) or not leaf:
            raise CheckpointError(
                f"{layer.name} is stored as {layer.storage}: qgemm compares float, int8 and fp8 weights"
            )
        yield layer.full_name(main), Dequantized(source, layer, weight, layer.full_name(leaf))
    for leaf, tensor in layer.tensors.items():
        is_scale = layer.is_quantized and layer.full_name(leaf) in layer.scales
        if leaf not in others and tensor.dtype in FLOAT_DTYPES and (leaf == "input_scale" or not is_scale):
            yield layer.full_name(leaf), _as_stored(source, layer.full_name(leaf))


def _of_foreign(layer: StoredLayer, source: Source, parts: PartReader) -> Iterable[tuple[str, FloatTensor]]:
    yield layer.full_name("weight"), Converted(parts, layer.name)
    for leaf, tensor in layer.tensors.items():
        name = layer.full_name(leaf)
        is_float = tensor.dtype in FLOAT_DTYPES
        if is_float and (leaf == "input_scale" or (name not in parts.contents.conversions and leaf != "weight_scale")):
            yield name, _as_stored(source, name)


def _as_stored(source: Source, name: str) -> FloatTensor:
    found = stored_float(source, name, torch.float32)
    found.shape = found.shape or (1,)  # a single number has either shape, depending on the format
    return found


def match_names(names: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """For each of ``names`` that is also in ``others``, the name there.

    All names of one side may have a prefix, as in a model inside of another one (``model.layers...``).
    """
    names, known = list(names), set(others)
    best: dict[str, str] = {}
    for prefix in ["", *_prefixes(names, known)]:
        found = {name: prefix + name for name in names if prefix + name in known}
        if len(found) > len(best):
            best = found
    for prefix in _prefixes(list(known), set(names)):
        found = {name: name.removeprefix(prefix) for name in names if name.removeprefix(prefix) in known}
        if len(found) > len(best):
            best = found
    return best


def _prefixes(names: list[str], others: set[str]) -> list[str]:
    """Possible prefixes of ``names`` in ``others``: the shortest of those before the longest names.

    No model is a part of so many others; each prefix is tried on every name.
    """
    longest = max(names, key=len, default="")
    found = {other.removesuffix(longest) for other in others if other.endswith(f".{longest}")}
    return sorted(found, key=lambda prefix: (len(prefix), prefix))[:MOST_PREFIXES]
