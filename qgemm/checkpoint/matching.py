"""Compares a checkpoint with the model that it will be loaded into: every layer, name, shape and dtype."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import place_of
from qgemm.checkpoint.manifest import Manifest
from qgemm.checkpoint.safetensors_file import StoredTensor
from qgemm.checkpoint.tensors import BIAS_DTYPES, FLOAT_DTYPES, find_module, named_tensors, transient_names
from qgemm.model.selection import listed
from qgemm.nn import LinearLayer, QuantExperts, QuantLayer
from qgemm.nn.carry_over import carry_over
from qgemm.nn.float_experts import UnknownExperts, describe_experts
from qgemm.nn.kinds import meta_linear
from qgemm.nn.linear_layer import is_float_linear, linear_weight
from qgemm.scheme import QuantScheme


def match(
    model: nn.Module,
    manifest: Manifest,
    stored: dict[str, StoredTensor],
    config_path: Path,
    has_buffers: bool = True,
) -> dict[str, QuantLayer]:
    """The layers to put into ``model``, by name, on meta; a module with several names gets one layer. Changes nothing.

    ``has_buffers``: whether ``model`` must have the values of tensors that aren't in the files. Raises
    ``CheckpointError`` unless the model with these layers has exactly the tensors in ``stored``, ties included.
    """
    layers = quantized_layers(model, manifest.layers, config_path)
    manifest.check_sizes(layers, config_path)
    expected, dtypes = _expected_tensors(model, layers)
    transient = transient_names(model)
    _check_ties(expected, manifest.tied, stored, config_path)
    absent = [name for name in expected if name not in stored and name not in manifest.tied]
    _check_names(expected, [name for name in absent if name not in transient], stored, place_of(config_path))
    if has_buffers:
        _check_on_hand(model, {name: expected[name] for name in absent}, place_of(config_path))
    for name, tensor in stored.items():
        wanted = tuple(expected[name].shape)
        if tensor.shape != wanted and not (name in transient and _has_grown(wanted, tensor.shape)):
            raise CheckpointError(
                f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}; the model's is {list(wanted)}"
            )
        if tensor.dtype not in dtypes[name]:
            raise CheckpointError(
                f"{tensor.path}: tensor {name} is {tensor.dtype}; the model's is {expected[name].dtype}"
            )
    for alias, name in manifest.tied.items():
        if stored[name].dtype not in dtypes[alias]:
            raise CheckpointError(
                f"{config_path}: tied says that {alias} is {name}, but that is {stored[name].dtype}; "
                f"the model's is {expected[alias].dtype}"
            )
    for layer_name, layer in layers.items():
        for name in layer.fixed_names:
            full_name = f"{layer_name}.{name}"
            dtype = stored[manifest.tied.get(full_name, full_name)].dtype if full_name in expected else None
            if dtype is not None:
                layer.take_dtype(name, dtype)
    return layers


def _expected_tensors(
    model: nn.Module, layers: dict[str, QuantLayer]
) -> tuple[dict[str, Tensor], dict[str, tuple[torch.dtype, ...]]]:
    """The tensors of ``model`` with ``layers``, and the dtypes that each may have in files."""
    replaced = {f"{name}.{leaf}" for name in layers for leaf in model.get_submodule(name)._parameters}
    expected = {name: tensor for name, tensor in named_tensors(model).items() if name not in replaced}
    # The float part of a model may have any float dtype, and keeps the one in which it was saved.
    dtypes: dict[str, tuple[torch.dtype, ...]] = {
        name: FLOAT_DTYPES if tensor.dtype in FLOAT_DTYPES else (tensor.dtype,) for name, tensor in expected.items()
    }
    for layer_name, layer in layers.items():
        for name, parameter in layer.named_parameters(recurse=False):
            expected[f"{layer_name}.{name}"] = parameter
            accepted = tuple(dtype for dtype in BIAS_DTYPES if layer.accepts_dtype(name, dtype))
            dtypes[f"{layer_name}.{name}"] = accepted or (parameter.dtype,)
    return expected, dtypes


def _has_grown(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    # A transient buffer is a cache, such as a table of positions, which may be longer than in a newly built model. The
    # length of a vector (frequencies, for example) follows from the model's sizes.
    longer = [b > a for a, b in zip(old, new, strict=False) if a != b]
    return len(old) == len(new) > 1 and longer == [True]


def quantized_layers(model: nn.Module, schemes: dict[str, QuantScheme], config_path: Path) -> dict[str, QuantLayer]:
    """The layers that ``schemes`` names, on meta, shaped like the float layers of ``model`` that they replace."""
    made: dict[nn.Module, QuantLayer] = {}
    layers = {}
    for name, scheme in schemes.items():
        module = find_module(model, name)
        if module is None:
            raise CheckpointError(f"{config_path}: layers names {name!r}, which the model doesn't have")
        if module not in made:
            try:
                made[module] = _quantized_like(module, scheme)
                made[module].layer_name = name
                carry_over(module, made[module])
            except (TypeError, ValueError) as error:
                kind = type(module).__name__
                raise CheckpointError(f"{config_path}: layers names {name}, which is a {kind}, {error}") from None
        if made[module].scheme != scheme:
            raise CheckpointError(f"{config_path}: layers gives two schemes to {name}, which has two names")
        layers[name] = made[module]
    return layers


def _quantized_like(module: nn.Module, scheme: QuantScheme) -> QuantLayer:
    if isinstance(module, LinearLayer):
        K, N, has_bias = module.in_features, module.out_features, module.has_bias
    elif is_float_linear(module):
        (N, K), has_bias = linear_weight(module).shape, module.bias is not None
    elif isinstance(module, QuantExperts):
        if module.scheme != scheme:
            raise ValueError(f"already in scheme {module.scheme.name!r} instead of {scheme.name!r}: pass a float model")
        return copy.deepcopy(module).to("meta")
    else:
        try:
            return QuantExperts.like(module, describe_experts(module), scheme)
        except UnknownExperts as error:
            raise TypeError(f"not linear, nor experts that can be quantized: {error}") from None
    return meta_linear(scheme, K, N, has_bias)


def _check_ties(
    expected: dict[str, Tensor], tied: dict[str, str], stored: dict[str, StoredTensor], config_path: Path
) -> None:
    for alias, name in tied.items():
        if alias in stored:
            raise CheckpointError(f"{stored[alias].path} holds tensor {alias}, which {config_path.name} ties to {name}")
        if alias not in expected or name not in stored:
            lacking = f"the model has no {alias}" if alias not in expected else f"no file holds {name}"
            raise CheckpointError(f"{config_path}: tied says that {alias} is {name}, but {lacking}")
        if stored[name].shape != tuple(expected[alias].shape):
            shapes = f"{list(expected[alias].shape)} and {list(stored[name].shape)}"
            raise CheckpointError(f"{config_path}: tied says that {alias} is {name}, but their shapes are {shapes}")


def _check_names(
    expected: dict[str, Tensor], missing: list[str], stored: dict[str, StoredTensor], folder: Path
) -> None:
    if foreign := [name for name in stored if name not in expected]:
        raise CheckpointError(
            f"{stored[foreign[0]].path} holds tensors that the model doesn't have: {listed(foreign, show=str)}"
        )
    if missing:
        raise CheckpointError(f"{folder} lacks tensors of the model: {listed(missing, show=str)}")


def _check_on_hand(model: nn.Module, absent: dict[str, Tensor], folder: Path) -> None:
    if unknown := [name for name, tensor in absent.items() if tensor.device.type == "meta"]:
        raise CheckpointError(
            f"{folder} doesn't hold buffers that the given model has on meta: {listed(unknown, show=str)}; "
            "pass a model that was built on a device with memory"
        )
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.device.type == "meta":
                raise CheckpointError(
                    f"{name or 'the model'} keeps {attribute} on meta, which isn't a buffer and so in no checkpoint; "
                    "register it as a buffer, or pass a model that was built on a device with memory"
                )
