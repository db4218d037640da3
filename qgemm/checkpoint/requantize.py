"""``requantize``: converts layers of a checkpoint to another scheme, by way of the float weights that they stand for.

Each layer is converted as soon as it has been read, a few rows at a time, so that no weight is ever in float as a
whole. Values are rounded to nearest; the error of the first quantization stays, and the second one adds its own, which
is a small part of the first in 8 bits. Where the weight's scheme stays the same, as from int4 to int4 with int8
activations, values are unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from qgemm.checkpoint.cache_scales import NOTE
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.safetensors_file import unfit
from qgemm.checkpoint.tensors import find_module
from qgemm.model.offloading import carry_hooks, is_offloaded
from qgemm.nn import LinearLayer, QuantExperts, QuantLayer, linear_class
from qgemm.nn.attention import opened_attention
from qgemm.nn.float_experts import describe_experts
from qgemm.nn.kinds import meta_linear
from qgemm.nn.linear_layer import is_conv1d, is_float_linear, largest, linear_weight
from qgemm.nn.quant_layer import frozen, quant_layers
from qgemm.scheme import QuantScheme

ABOUT_FILES = ("quant_method is ", "packing_format is ")
"""The beginnings of notes that describe the files instead of what layers compute."""

# Temporaries have this many values at a time.
_PIECE = 1 << 22


def requantize(contents: Contents, model: nn.Module, scheme: QuantScheme) -> None:
    """Arranges for the layers of ``contents`` to be converted to ``scheme``, experts to its ``for_experts``.

    ``model``: the float model, whose names the layers have. Raises ``CheckpointError`` for a layer whose parameters are
    missing from the checkpoint, ``ValueError`` for one whose new scheme needs more than its weight.
    """
    layers, tied = contents.manifest.layers, contents.manifest.tied
    are_all_new = True
    for name, own in list(layers.items()):
        module = find_module(model, name)
        # A layer without a module belongs to an expert, which will be put together with others.
        wanted = scheme if module is not None and _is_linear(module) else scheme.for_experts()
        if own == wanted:
            are_all_new = False
            continue
        _check_target(wanted, name, own)
        old, made = (_layer_like(contents, name, module, each) for each in (own, wanted))
        layers[name] = wanted
        before, after = ([leaf for leaf, _ in each.named_parameters(recurse=False)] for each in (old, made))
        for leaf in before + after:
            # A layer's second name has no tensors of its own.
            if (source := tied.pop(f"{name}.{leaf}", None)) is not None and leaf in before:
                first = source.rpartition(".")[0]
                tied.update({f"{name}.{each}": f"{first}.{each}" for each in after})
        if any(f"{name}.{leaf}" in contents.headers for leaf in before):
            _check(contents, name, old, before)
            _note(contents, name, old, made, before, after)
    contents.report = contents.lacks = None  # it described the former schemes
    if are_all_new:
        # The checkpoint's requests about activations no longer apply.
        contents.notes = [note for note in contents.notes if note == NOTE or note.startswith(ABOUT_FILES)]


def restore_float(contents: Contents, name: str, module: nn.Module) -> None:
    """Arranges for the layer ``name`` to be restored to float if it can be the ``weight`` of ``module``."""
    weight, scheme = module._parameters.get("weight"), contents.manifest.layers[name]
    if weight is None or is_conv1d(module) or linear_class(scheme).folds_bias:
        return
    if weight.shape != (contents.shapes.get(name) or contents.headers[f"{name}.weight"].shape):
        return
    N, K = weight.shape
    old, dtype = meta_linear(scheme, K, N), weight.dtype
    leaves = [leaf for leaf, _ in old.named_parameters(recurse=False)]
    _check(contents, name, old, leaves)

    def convert(values: dict[str, Tensor]) -> Sequence[Tensor]:
        _take(old, {leaf: values[f"{name}.{leaf}"] for leaf in leaves})
        restored = torch.cat([rows.to(dtype) for rows in _rows(old, _rows_at_a_time(old))])
        old.to("meta")
        return [restored]

    made = {f"{name}.weight": (f"{name}.weight", (N, K), dtype)}
    contents.convert_further(made, [f"{name}.{leaf}" for leaf in leaves], convert)
    del contents.manifest.layers[name]
    contents.shapes.pop(name, None)
    contents.restored.append(name)


def convert_layers(model: nn.Module, scheme: QuantScheme, is_split: bool) -> bool:
    """Replaces the layers of a loaded ``model`` by layers in ``scheme``, one by one; returns whether any differed.

    ``is_split``: whether the layers are split among several processes. Raises ``ValueError``, before any layer is
    converted, for layers that are split or offloaded, and for a scheme that needs more than their weights.
    """
    layers = quant_layers(model)
    others = {name: layer for name, layer in layers.items() if layer.scheme != _in_its_place(layer, scheme)}
    for name, layer in others.items():
        _check_target(_in_its_place(layer, scheme), name, layer.scheme)
        if is_split or is_offloaded(layer):
            how = "is split among processes" if is_split else "is offloaded by the device_map"
            raise ValueError(
                f"scheme is {scheme.name!r}, but {name}, in {layer.scheme.name!r}, {how}, and only whole layers can be "
                f"converted while loading: run qgemm convert --to qgemm --scheme {scheme.name}, and load that folder"
            )
    made: dict[QuantLayer, QuantLayer] = {}
    with opened_attention(model, others):
        for name, layer in others.items():
            if layer not in made:
                made[layer] = _converted_layer(layer, _in_its_place(layer, scheme))
                carry_hooks(layer, made[layer])
                made[layer].layer_name = layer.layer_name
            model.set_submodule(name, made[layer])
    return bool(others)


def _check_target(scheme: QuantScheme, name: str, own: QuantScheme) -> None:
    """Raises ``ValueError`` if ``scheme``, for the layer ``name`` of scheme ``own``, needs more than the weight."""
    if scheme.needs_data:
        raise ValueError(
            f"scheme is {scheme.name!r}, which needs data to run the model on, and {name} has the scheme "
            f"{own.name!r}: quantize the float model, with calibration, or load the checkpoint in a scheme such as "
            "'int8'"
        )


def _in_its_place(layer: QuantLayer, scheme: QuantScheme) -> QuantScheme:
    return scheme if isinstance(layer, LinearLayer) else scheme.for_experts()


def _converted_layer(layer: QuantLayer, scheme: QuantScheme) -> QuantLayer:
    if isinstance(layer, LinearLayer):
        return in_scheme(layer, scheme)
    assert isinstance(layer, QuantExperts)
    made = layer.like_in(scheme)
    values: dict[str, Tensor] = dict(layer.named_parameters(recurse=False))
    for weight in layer.weight_names:
        stacked: dict[str, list[Tensor]] = {}
        for expert in range(layer.num_experts):
            one = in_scheme(layer.linear_of(weight, expert), made.scheme.of(weight))
            for leaf, parameter in one.named_parameters(recurse=False):
                stacked.setdefault(leaf, []).append(parameter.detach())
        for leaf, parts in stacked.items():
            values[f"{weight}_bias" if leaf == "bias" else weight + leaf.removeprefix("weight")] = torch.stack(parts)
    for leaf, _ in list(made.named_parameters(recurse=False)):
        setattr(made, leaf, frozen(values[leaf]))
    return made


def _layer_like(contents: Contents, name: str, module: nn.Module | None, scheme: QuantScheme) -> QuantLayer:
    """A layer with ``scheme`` on meta, in place of ``module``; it has a bias only if that depends on the weight."""
    if module is None:
        N, K = contents.shapes.get(name) or contents.headers[f"{name}.weight"].shape
    elif isinstance(module, LinearLayer):
        N, K = module.out_features, module.in_features
    elif _is_linear(module):
        N, K = linear_weight(module).shape
    else:
        return QuantExperts.like(module, describe_experts(module), scheme)
    # A bias that depends on the weight is there if the float layer has one.
    known = linear_class(contents.manifest.layers[name])
    has_bias = known.folds_bias and getattr(module, "bias", None) is not None
    return meta_linear(scheme, K, N, has_bias, torch.float32)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, LinearLayer) or is_float_linear(module)


def _check(contents: Contents, name: str, layer: QuantLayer, leaves: list[str]) -> None:
    """Raises ``CheckpointError`` unless the checkpoint has the parameters of ``layer``, called ``name``."""
    for leaf in leaves:
        tensor, wanted = contents.headers.get(f"{name}.{leaf}"), layer.stored(leaf)
        if tensor is None:
            raise CheckpointError(f"no file holds {name}.{leaf} of a layer with the scheme {layer.scheme.name!r}")
        if tensor.shape != tuple(wanted.shape) or tensor.dtype is None or not layer.accepts_dtype(leaf, tensor.dtype):
            raise unfit(tensor.path, f"{name}.{leaf}", tensor, f"{wanted.dtype} {list(wanted.shape)}, as the model's")


def _note(
    contents: Contents, name: str, old: QuantLayer, made: QuantLayer, before: list[str], after: list[str]
) -> None:
    def convert(values: dict[str, Tensor]) -> Sequence[Tensor]:
        _take(old, {leaf: values[f"{name}.{leaf}"] for leaf in before})
        converted = _converted_layer(old, made.scheme)
        old.to("meta")
        return [converted.stored(leaf).detach() for leaf in after]

    of = [f"{name}.{leaf}" for leaf in before]
    new = {}
    for leaf in after:
        parameter = made.stored(leaf)
        source = f"{name}.{leaf if leaf in before else made.weight_names[0]}"
        dtype = parameter.dtype
        if leaf in before and old.scheme.of(leaf).weight.is_stored_as(made.scheme.of(leaf).weight):
            found = contents.headers[source].dtype  # is kept if the layer accepts it
            dtype = found if found is not None and made.accepts_dtype(leaf, found) else dtype
        new[f"{name}.{leaf}"] = (source, tuple(parameter.shape), dtype)
    contents.convert_further(new, of, convert)


def _take(layer: QuantLayer, values: dict[str, Tensor]) -> None:
    """Sets these parameters of ``layer``; raises ``ValueError`` for an invalid one."""
    for leaf, value in values.items():
        if leaf in layer.fixed_names and (problem := layer.problem_with(leaf, value)):
            raise ValueError(f"{leaf} {problem}")
        setattr(layer, leaf, frozen(value))


def in_scheme(layer: LinearLayer, scheme: QuantScheme) -> LinearLayer:
    """Converts ``layer`` to ``scheme``, on its device: a layer that stands for the same weight and bias.

    Values stay unchanged where only activations differ. Raises ``ValueError`` for a weight that isn't finite.
    """
    bias = layer.float_bias()
    dtype = torch.float32 if bias is None else bias.dtype
    made = meta_linear(scheme, layer.in_features, layer.out_features, bias is not None, dtype)
    if (values := _kept(layer, made)) is None:
        step = _rows_at_a_time(layer, made)
        amax = None
        if made.needs_amax:
            amax = torch.stack([largest(rows) for rows in _rows(layer, step)]).amax()
        made.start_rows(next(layer.parameters()).device, amax)
        pieces = [made.convert_rows(rows) for rows in _rows(layer, step)]
        values = {leaf: torch.cat([piece.pop(leaf) for piece in pieces]) for leaf in list(pieces[0])}
    for leaf, value in values.items():
        setattr(made, leaf, frozen(value))
    made.take_bias(None if bias is None else bias.detach())
    made.settle()
    made.of_conv1d = layer.of_conv1d
    return made.train(layer.training)


def _kept(layer: LinearLayer, made: LinearLayer) -> dict[str, Tensor] | None:
    """The parameters of ``made`` that mean the same weight as those of ``layer``; None if they can't."""
    schemes = layer.scheme, made.scheme
    if not schemes[0].weight.is_stored_as(schemes[1].weight) or any(
        each.rotates or each.outlier_columns for each in schemes
    ):
        return None
    kept = {}
    for leaf, parameter in made.named_parameters(recurse=False):
        if leaf == "bias":
            continue
        value = layer.stored(leaf).detach()
        value = value if made.accepts_dtype(leaf, value.dtype) else value.to(parameter.dtype)
        if value.numel() != parameter.numel() or made.problem_with(leaf, value := value.reshape(parameter.shape)):
            return None  # a scale below 0, which int8 products don't accept
        kept[leaf] = value
    return kept


def _rows_at_a_time(*layers: LinearLayer) -> int:
    unit = math.lcm(*(layer.rows_in_step for layer in layers))
    return max(1, _PIECE // (max(layers[0].in_features, 1) * unit)) * unit


def _rows(layer: LinearLayer, step: int) -> Iterator[Tensor]:
    """The float rows, ``step`` at a time; for a layer without rows, one empty piece."""
    N = layer.out_features
    for start in range(0, max(N, 1), step):
        yield layer.restore_rows(layer.rows_from(start, min(start + step, N)), torch.float32)
