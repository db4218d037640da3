"""Checkpoints of the compressed-tensors library (LLM Compressor, vLLM): finds the quantized layers and their groups.

The files tell which layers are quantized: those with a ``weight_scale``. The config's groups tell what the numbers
mean; a layer belongs to the group that its tensors fit. Targets only decide between groups that a layer fits equally
well. Only names, classes, and the patterns that qgemm writes for experts are used: other regular expressions come from
untrusted files and are not evaluated.

``compressed_tensors_groups.py`` parses groups, ``compressed_tensors_layers.py`` reads single layers, and
``compressed_tensors_writer.py`` writes such files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qgemm.checkpoint.cache_scales import leave_to_cache
from qgemm.checkpoint.compressed_tensors_groups import (
    QUANT_METHOD,
    SUPPORTED,
    Group,
    Unsupported,
    parse_group,
    target_of_experts,
)
from qgemm.checkpoint.compressed_tensors_layers import LEAVES, Layer, note_layer, problem_with
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError, unsupported
from qgemm.checkpoint.safetensors_file import StoredTensor, read_values, unfit
from qgemm.checkpoint.tensors import split_name

__all__ = ["QUANT_METHOD", "read"]

NO_ORDER = "actorder is 'group', but layers have no weight_g_idx: their columns are taken to be in order"


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of a checkpoint from its ``quantization_config`` and stored tensors.

    ``weight_shape`` and ``weight_g_idx``, which aren't weights, are read here already, because headers don't contain
    the shape. Raises ``CheckpointError``, naming group and layer, for anything that qgemm can't compute.
    """
    groups = _parse_groups(quantization, stored, config_path)
    contents = Contents.of_files(stored)
    for layer in _find_layers(stored):
        group = _group_of(layer, groups, config_path)
        note_layer(contents, layer, group)
        if group.note:
            contents.note(group.note)
        if group.orders_columns and "weight_g_idx" not in layer.tensors:
            contents.note(NO_ORDER)
    if quantization.get("kv_cache_scheme"):
        leave_to_cache(contents, quantization)
    return contents


def _find_layers(stored: dict[str, StoredTensor]) -> list[Layer]:
    """The quantized layers, in the order of the files."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        layer, leaf = split_name(name)
        if leaf in LEAVES:
            found.setdefault(layer, {})[leaf] = tensor
    quantized = {name: own for name, own in found.items() if "weight_scale" in own or "weight_packed" in own}
    for name, own in found.items():
        if name not in quantized and (lone := next((each for each in own if each != "weight"), None)) is not None:
            article = "an" if lone.startswith("input") else "a"
            raise CheckpointError(f"{own[lone].path}: {name} has {article} {lone} but no weight_scale")
    return _with_shapes(quantized)


def _with_shapes(found: dict[str, dict[str, StoredTensor]]) -> list[Layer]:
    """The layers, with the values of their ``weight_shape`` and ``weight_g_idx``."""
    described = {"weight_shape": "int64, [2]", "weight_g_idx": "int32, [K]"}
    wanted = {f"{name}.{leaf}": own[leaf] for name, own in found.items() for leaf in described if leaf in own}
    for name, tensor in wanted.items():
        leaf = split_name(name)[1]
        fits = len(tensor.shape) == 1 and (leaf != "weight_shape" or tensor.shape == (2,))
        if tensor.dtype not in (torch.int64, torch.int32) or not fits:
            raise unfit(tensor.path, name, tensor, described[leaf])
    values = dict(read_values(wanted, torch.device("cpu")))
    layers = []
    for name, own in found.items():
        shape, g_idx = None, values.get(f"{name}.weight_g_idx")
        if (sizes := values.get(f"{name}.weight_shape")) is not None:
            shape = int(sizes[0]), int(sizes[1])
            if min(shape) < 0:
                raise CheckpointError(f"{own['weight_shape'].path}: {name}.weight_shape is {list(shape)}")
        if g_idx is not None and bool((g_idx == -1).all()):
            g_idx = None
        if g_idx is not None and (shape is None or g_idx.shape != shape[1:] or "weight_packed" not in own):
            path = own["weight_g_idx"].path
            raise CheckpointError(f"{path}: {name}.weight_g_idx has {len(g_idx)} columns, which isn't the weight's K")
        layers.append(Layer(name, own, shape, None if g_idx is None else g_idx.long()))
    return layers


def _group_of(layer: Layer, groups: list[Group], config_path: Path) -> Group:
    problems = {group.name: problem_with(layer, group) for group in groups}
    fitting = [group for group in groups if not problems[group.name]]
    path = next(iter(layer.tensors.values())).path
    if not fitting:
        if len(groups) == 1:
            raise CheckpointError(f"{path}: {problems[groups[0].name]}")
        listed = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise CheckpointError(f"{path}: layer {layer.name} fits none of the groups in {config_path.name}: {listed}")
    if len({(group.scheme, group.note) for group in fitting}) == 1:
        return fitting[0]
    experts, _, number = layer.name.rpartition(".")[0].rpartition(".")
    exact = [layer.name, *([target_of_experts(experts)] if number.isdecimal() else [])]
    for targets in (*exact, "Linear"):
        named = [group for group in fitting if targets in group.targets]
        others = [group for group in fitting if group not in named]
        is_clear = targets in exact or not any(target.startswith("re:") for group in others for target in group.targets)
        if len(named) == 1 and is_clear:
            return named[0]
    names = " and ".join(group.name for group in fitting)
    raise CheckpointError(
        f"{config_path}: layer {layer.name} fits {names} alike, and qgemm evaluates no regular expressions in targets; "
        "write the names of the layers there"
    )


def _parse_groups(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> list[Group]:
    """Parses the groups; raises ``CheckpointError`` if qgemm can't compute one."""
    status = quantization.get("quantization_status")
    if status not in ("compressed", "frozen"):  # older files are compressed although they say frozen
        raise CheckpointError(
            f"{config_path}: quantization_status is {status!r}; only 'compressed' files hold quantized values"
        )
    sparsity = quantization.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") != "dense"):
        raise unsupported(f"{config_path}: it has a sparsity_config, which qgemm doesn't read")
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{config_path}: config_groups must be an object of groups")
    parsed = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise CheckpointError(f"{config_path}: config_groups.{name} must be an object")
        try:
            parsed.append(parse_group(name, group, quantization.get("format")))
        except Unsupported as problem:
            layer = _layer_with(problem.leaves, len(groups) == 1, stored)
            where = f"config_groups.{name}" + (f", such as layer {layer}," if layer else "")
            raise unsupported(f"{config_path}: {where} {problem}; {SUPPORTED}") from None
    return parsed


def _layer_with(leaves: tuple[str, ...], is_only: bool, stored: dict[str, StoredTensor]) -> str | None:
    """A layer quantized in this way, if the files show one."""
    for name in stored:
        layer, leaf = split_name(name)
        if leaf in leaves or (is_only and leaf in ("weight_scale", "weight_packed")):
            return layer
    return None
