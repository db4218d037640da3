"""Matches another library's checkpoint to the names of the model: renames tensors, and puts experts together.

Files keep the names with which a model was first published, and have one linear layer per expert. transformers has a
list of renamings for each model, which is applied here. Tensors other than experts that transformers would put together
stay as they are, and then find no place in the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path

import torch
from torch import Tensor, nn

from qgemm.checkpoint.contents import Contents, Made, read_converted
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import place_of
from qgemm.checkpoint.pretrained import is_pretrained
from qgemm.checkpoint.tensors import find_module, split_name
from qgemm.nn import LinearLayer, QuantExperts
from qgemm.nn.float_experts import FloatExperts, UnknownExperts, describe_experts
from qgemm.nn.kinds import meta_linear
from qgemm.scheme import QuantScheme

_CPU = torch.device("cpu")
# The names of an expert's linear layers: gate, up, down.
_LEAVES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_DOWN = [leaves[2] for leaves in _LEAVES]


def expert_leaves(model: nn.Module) -> tuple[str, str, str]:
    """The names of an expert's gate, up and down layers in files of the family of ``model``."""
    return _leaves_that_transformers_fuses(model) or _LEAVES[0]


def loses_single_experts(model: nn.Module) -> bool:
    """Whether transformers would initialize the experts of ``model`` although files have a layer for each expert."""
    return is_pretrained(model) and _leaves_that_transformers_fuses(model) is None


def _leaves_that_transformers_fuses(model: nn.Module) -> tuple[str, str, str] | None:
    if is_pretrained(model):
        from transformers.conversion_mapping import get_model_conversion_mapping

        for transform in get_model_conversion_mapping(model):  # type: ignore[arg-type]
            for leaves in _LEAVES:
                if any(source.endswith(f"experts.*.{leaves[2]}.weight") for source in transform.source_patterns):
                    return leaves
    return None


def rename_as_model(contents: Contents, model: nn.Module) -> None:
    """Renames tensors and layers of ``contents`` as ``model`` calls them, if it is a transformers model."""
    if not is_pretrained(model):
        return
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    wanted = model.state_dict()

    def rename(name: str) -> str:
        renamed: str = rename_source_key(name, renamings, [], str(model.base_model_prefix), wanted)[0]
        return renamed if name not in wanted or renamed in wanted else name

    names = {}
    layers: dict[str, QuantScheme] = {}
    shapes: dict[str, tuple[int, int]] = {}
    grouped = set()
    for name in sorted(contents.headers, key=dot_natural_key):
        layer, leaf = split_name(name)
        if layer in contents.manifest.layers:
            # By the name of its weight, because the renamings don't cover scales.
            new_layer, new_leaf = split_name(rename(f"{layer}.weight"))
            if new_leaf != "weight":
                new_layer = layer
            names[name] = f"{new_layer}.{leaf}"
            layers[new_layer] = contents.manifest.layers[layer]
            if layer in contents.shapes:
                shapes[new_layer] = contents.shapes[layer]
            if layer in contents.grouped:
                grouped.add(new_layer)
        else:
            names[name] = rename(name)
    contents.rename(names)
    contents.shapes, contents.grouped = shapes, grouped
    contents.manifest.layers.clear()
    contents.manifest.layers.update(layers)


def fuse_experts(contents: Contents, model: nn.Module, config_path: Path) -> set[str]:
    """Puts layers of single experts together, as the modules of ``model`` hold them; returns these modules' names.

    Symmetric layers among asymmetric ones get zero points of 0. Raises ``CheckpointError`` if the experts of a module
    aren't all quantized in one scheme, or in one for gates and ups and one for the rest, or if their shapes differ.
    """
    holders = {name[: first.start()] for name in contents.manifest.layers for first in re.finditer(r"\.0(?=\.)", name)}
    found = {}
    for path, module in model.named_modules():
        if path in holders:
            try:
                found[path] = describe_experts(module)
            except UnknownExperts:
                continue  # a list of modules, one for each expert, or a case that the caller refuses
    _check_alike(contents, found)
    for path, source in found.items():
        _fuse(contents, path, source, config_path)
    return set(found)


def merge_float_experts(contents: Contents, model: nn.Module) -> None:
    """Puts float experts together that files hold one by one, if their module holds them in this order."""
    found = [(name, match) for name in contents.headers for match in re.finditer(r"\.0\.(\w+)\.weight$", name)]
    holders = {name[: match.start()] for name, match in found if match[1] in _DOWN}
    for path in sorted(holders):
        module = find_module(model, path)
        try:
            source = describe_experts(module)  # type: ignore[arg-type]
        except UnknownExperts:
            continue
        leaves = next(each for each in _LEAVES if f"{path}.0.{each[2]}.weight" in contents.headers)
        weights, E = weights_of_experts(source, leaves), source.num_experts
        names = [f"{path}.{expert}.{leaf}.weight" for expert in range(E) for _, own, _ in weights for leaf in own]
        is_plain = not (source.has_bias or source.is_transposed or source.is_interleaved)
        if not is_plain or any(name not in contents.headers for name in names):
            continue
        for name, own, (N, K) in weights:
            for expert, (index, leaf) in product(range(E), enumerate(own)):
                place = (expert, slice(index * N, (index + 1) * N))
                target = f"{path}.{source.parameters[name]}"
                contents.merge(target, f"{path}.{expert}.{leaf}.weight", (N, K), (E, N * len(own), K), place)


def weights_of_experts(
    experts: FloatExperts | QuantExperts, leaves: tuple[str, str, str]
) -> list[tuple[str, tuple[str, ...], tuple[int, int]]]:
    """Each weight of ``experts``: its name, the layers of a single expert that form it, and ``[N, K]`` of these.

    ``leaves``: the files' names for gates, ups and the down projection.
    """
    gate, up, down = leaves
    wide, narrow = experts.intermediate_size, experts.hidden_size
    first = (gate, up) if experts.activation.gated else (up,)
    return [("gate_up_proj", first, (wide, narrow)), ("down_proj", (down,), (narrow, wide))]


def _leaves_in(contents: Contents, path: str) -> tuple[str, str, str]:
    """The names of the layers of the experts ``path``."""
    layers = contents.manifest.layers
    return next((leaves for leaves in _LEAVES if f"{path}.0.{leaves[2]}" in layers), _LEAVES[0])


def _fuse(contents: Contents, path: str, source: FloatExperts, config_path: Path) -> None:
    layers, E = contents.manifest.layers, source.num_experts
    weights = weights_of_experts(source, _leaves_in(contents, path))
    of_weights = [[f"{path}.{expert}.{leaf}" for expert in range(E) for leaf in leaves] for _, leaves, _ in weights]
    singles = list(chain(*of_weights))
    if missing := [name for name in singles if name not in layers]:
        raise CheckpointError(
            f"{place_of(config_path)} lacks {missing[0]} quantized: all experts of a layer must be, or none"
        )
    activation = next((layers[name].activation for name in singles if layers[name].activation is not None), None)
    fused = _fused_scheme(contents, path, of_weights, config_path)
    for name, leaves, shape in weights:
        made: dict[QuantScheme, LinearLayer] = {}
        for expert, (index, leaf) in product(range(E), enumerate(leaves)):
            layer = f"{path}.{expert}.{leaf}"
            scheme = layers.pop(layer)
            if (found := contents.shapes.pop(layer, shape)) != shape:
                raise CheckpointError(
                    f"{place_of(config_path)}: layer {layer} has the shape {list(found)}; the model's is {list(shape)}"
                )
            if scheme not in made:
                made[scheme] = meta_linear(scheme, shape[1], shape[0], source.has_bias)
            one = made[scheme]
            if problem := _why_apart(scheme, one, len(leaves)):
                raise CheckpointError(f"{config_path}: {layer} is an expert in {scheme.name}, {problem}")
            _merge(contents, layer, one, f"{path}.{name}", (expert, E), (index, len(leaves)))
    layers[path] = fused
    if activation is not None and fused.is_weight_only:
        contents.note(f"activations of experts stay in float, where the checkpoint asks for {activation.dtype}")


def _merge(
    contents: Contents, layer: str, like: LinearLayer, weight: str, expert: tuple[int, int], part: tuple[int, int]
) -> None:
    """Notes that the tensors of ``layer`` are parts of those of ``weight``, and which ones.

    ``like``: a layer with such parameters. ``expert``, ``part``: its number among all, and of the expert's layers.
    """
    (e, E), (index, parts) = expert, part
    for own in like.whole_names:
        if index == 0:
            shape = tuple(like.stored(own).shape)
            contents.merge(f"{weight}{own.removeprefix('weight')}", f"{layer}.{own}", shape, (E, *shape), (e,))
        else:
            contents.leave_out(f"{layer}.{own}")
    for own in (*like.row_names, *(["bias"] if like.has_bias else [])):
        rows, *columns = like.stored(own).shape
        target = f"{weight}{own.removeprefix('weight') if own != 'bias' else '_bias'}"
        place, whole = (e, slice(index * rows, (index + 1) * rows)), (E, rows * parts, *columns)
        contents.merge(target, f"{layer}.{own}", (rows, *columns), whole, place)


def _fused_scheme(contents: Contents, path: str, of_weights: list[list[str]], config_path: Path) -> QuantScheme:
    """The scheme of the experts ``path``, of whose two weights each is formed by some layers, ``of_weights``.

    If all layers can't have one, those of each weight have one. Adds zero points to symmetric layers if others have
    some; an expert's zero points may happen to be all in the middle, or 0. Raises ``CheckpointError``, naming two
    layers, for other differences, and for static activations.
    """
    layers, names = contents.manifest.layers, list(chain(*of_weights))
    if any(layers[name].is_static for name in names):
        same = layers[names[0]].weight.dtype
        raise CheckpointError(
            f"{config_path}: {path} has static activations, which qgemm doesn't compute for experts: give a scheme to "
            f"convert them to as they are loaded, such as scheme={same!r}, which keeps the weights"
        )
    parts = [names] if _first_and_other(layers, names)[1] is None else of_weights
    schemes = []
    for part in parts:
        first, other = _first_and_other(layers, part)
        if other is not None:
            raise _different(layers, first, other, config_path)
        schemes.append(layers[first].for_experts())
        for name in part:
            if layers[name].weight.symmetric and not schemes[-1].weight.symmetric:
                _add_zero_points(contents, name, first)
                layers[name] = schemes[-1]
    try:
        return schemes[0].with_down(schemes[-1])
    except ValueError:
        raise _different(layers, parts[0][0], parts[-1][0], config_path) from None


def _first_and_other(layers: Mapping[str, QuantScheme], names: list[str]) -> tuple[str, str | None]:
    """The layer whose scheme all ``names`` are to have, and one that can't have it, if there is one."""
    first = next((name for name in names if not layers[name].weight.symmetric), names[0])
    fused = layers[first].for_experts()
    for name in names:
        own = layers[name].for_experts()
        if own == fused:
            continue
        shifted = replace(own.weight, is_ordered=layers[name].weight.is_ordered)
        if own.weight.symmetric:
            shifted = replace(shifted, symmetric=fused.weight.symmetric, float_zeros=fused.weight.float_zeros)
        if shifted != fused.weight or own.activation != fused.activation:
            return first, name
    return first, None


def _different(layers: Mapping[str, QuantScheme], first: str, other: str, config_path: Path) -> CheckpointError:
    return CheckpointError(
        f"{config_path}: {first} has the scheme {layers[first].name!r}, and {other} {layers[other].name!r}; qgemm's "
        "experts of a module have one scheme; with activations in float down may have another than gates and ups. Give "
        "one to convert them to as they are loaded, such as scheme='int8'"
    )


def _add_zero_points(contents: Contents, layer: str, like: str) -> None:
    """Gives a symmetric ``layer`` zero points of 0, in the dtype of those of the layer ``like``."""
    weight, scale, zero_point = (f"{layer}.{leaf}" for leaf in ("weight", "weight_scale", "weight_zero_point"))
    headers = contents.headers
    made: dict[str, Made] = {name: (name, headers[name].shape, headers[name].dtype) for name in (weight, scale)}
    known = headers.get(f"{like}.weight_zero_point")
    dtype = torch.int8 if known is None else known.dtype
    made[zero_point] = scale, headers[scale].shape, dtype

    def add(values: dict[str, Tensor]) -> Sequence[Tensor]:
        return values[weight], values[scale], torch.zeros_like(values[scale], dtype=dtype)

    contents.convert_further(made, (weight, scale), add)


def _check_alike(contents: Contents, experts: Mapping[str, FloatExperts]) -> None:
    """Raises ``CheckpointError`` unless gate and up of each of the ``experts``, by path, have the same global scale."""
    pairs = []
    for path, source in experts.items():
        for expert in range(source.num_experts if source.activation.gated else 0):
            gate, up = (f"{path}.{expert}.{leaf}.weight_global_scale" for leaf in _leaves_in(contents, path)[:2])
            if gate in contents.headers and up in contents.headers:
                pairs.append((gate, up))
    found = {target.name: value for target, value in read_converted(contents, _CPU, only=set(chain(*pairs)))}
    for gate, up in pairs:
        if not torch.equal(found[gate], found[up]):
            raise CheckpointError(
                f"{contents.headers[up].path}: {up} differs from {gate}, and qgemm's experts have one scale for both: "
                "give a scheme to convert them to as they are loaded, such as scheme='int8'"
            )


def _why_apart(scheme: QuantScheme, layer: LinearLayer, parts: int) -> str:
    """Why layers like ``layer`` can't be put together, where ``parts`` of them form a weight of an expert."""
    if not scheme.weight.is_stored_as(scheme.for_experts().weight):
        return "which qgemm doesn't compute: give a scheme to convert it to as it is loaded, such as scheme='int8'"
    if parts > 1 and layer.out_features % layer.rows_in_step:
        return f"whose blocks of {layer.rows_in_step} rows would hold both gates and ups"
    return ""
