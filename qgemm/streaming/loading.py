"""The float model as transformers would load it: on meta, with the source of each of its tensors.

Cases in which ``from_pretrained`` continues with a warning are refused: a missing tensor, which it would initialize,
and a tensor that has no place in the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qgemm.checkpoint.errors import CheckpointError, UnknownModel
from qgemm.checkpoint.layout import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    check_no_adapter,
    checkpoint_file,
    read_json,
    stated_settings,
)
from qgemm.checkpoint.pretrained import BuildLimits, build_pretrained, dtype_of, read_generation_config
from qgemm.checkpoint.recognition import recognize
from qgemm.checkpoint.tensors import get_tensor, set_tensor
from qgemm.model.selection import listed
from qgemm.streaming.conversions import find_tensors
from qgemm.streaming.float_tensors import FloatTensor, built_float
from qgemm.streaming.source import Source


@dataclass(frozen=True)
class FloatModel:
    """``model``: a transformers model on meta, as it would be after loading, and its ``tensors`` by name."""

    model: nn.Module
    tensors: dict[str, FloatTensor]


def plan_loading(source: Source, drop: Iterable[str]) -> FloatModel:
    """The model in ``source``, and the sources of its tensors; reads no values, except of tensors that may be tied.

    ``drop``: globs of tensors that may be left out. Raises ``CheckpointError``, naming the tensors, if transformers
    would initialize some, or have no place for others, or if shapes differ.
    """
    model = _build(source)
    tensors, unplaced = find_tensors(model, source)
    _check_unplaced(model, unplaced, drop, source)
    _tie(model, tensors)
    _add_built(model, tensors, source)
    return FloatModel(model, tensors)


def _build(source: Source) -> Any:
    path = checkpoint_file(source.folder, CONFIG_FILE)
    config = read_json(path)
    check_no_adapter(source.folder)
    for key, stated in stated_settings(config):
        if stated:
            raise CheckpointError(
                f"{path} has a {key}: this checkpoint is quantized already. Start from the float checkpoint"
            )
    dtype = dtype_of(source.folder, config, source.tensors)
    try:
        model: Any = build_pretrained({**config, "dtype": dtype}, path, source.tensors)
    except UnknownModel as error:
        raise CheckpointError(
            f"{error.why}: load the float model in Python, and call qgemm.quantize_model and qgemm.save_quantized"
        ) from error
    _set_dtype(model, dtype)
    if model.can_generate():
        model.generation_config = _generation_config(source.folder)
    return model.eval()


def _generation_config(folder: Path) -> Any:
    from transformers import GenerationConfig

    if (folder / GENERATION_CONFIG_FILE).exists():
        return read_generation_config(checkpoint_file(folder, GENERATION_CONFIG_FILE))
    # Older checkpoints have generation settings in the model's config.
    return GenerationConfig.from_pretrained(
        str(folder), config_file_name=CONFIG_FILE, _from_model_config=True, local_files_only=True
    )


def _set_dtype(model: Any, dtype: str) -> None:
    value = getattr(torch, dtype)
    model.config.dtype = value
    for key in model.config.sub_configs:
        if (part := getattr(model.config, key)) is not None:
            part.dtype = value


def _check_unplaced(model: Any, unplaced: list[str], drop: Iterable[str], source: Source) -> None:
    # As in transformers: buffers that used to be stored.
    ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    globs = list(drop)
    foreign = [name for name in unplaced if not any(re.search(pattern, name) for pattern in ignored)]
    # Values that look like floats, such as fp8, would be different weights without their scales.
    if foreign and (found := recognize(source.tensors)) is not None:
        raise CheckpointError(
            f"{source.folder} is quantized already, by its tensors ({found.format}), such as {foreign[0]}. Start from "
            "the float checkpoint"
        )
    if left := [name for name in foreign if not any(fnmatchcase(name, glob) for glob in globs)]:
        raise CheckpointError(
            f"{source.folder} holds tensors that {type(model).__name__} doesn't have: {listed(left, show=str)}. "
            "To ignore them, pass their names, or globs, in drop"
        )


def _tie(model: Any, tensors: dict[str, FloatTensor]) -> None:
    """Ties what is tied after loading; if both tensors are in the files, only if they are equal."""
    for alias, name in list(model.all_tied_weights_keys.items()):
        parameter = get_tensor(model, alias)
        set_tensor(model, alias, nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad))
        if alias in tensors and name in tensors:
            if _are_equal(tensors[alias], tensors[name]):
                del tensors[alias]
            else:
                del model.all_tied_weights_keys[alias]
    for name, old in model.state_dict(keep_vars=True).items():
        if name in tensors:
            new = torch.empty(old.shape, dtype=tensors[name].dtype, device="meta")
            set_tensor(model, name, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
    model.tie_weights(missing_keys=set(model.state_dict()) - set(tensors), recompute_mapping=False)


def _are_equal(one: FloatTensor, other: FloatTensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return all(
        torch.equal(one.rows(start, stop), other.rows(start, stop))
        for start, stop in one.spans(max(1, one.row_count // 32))
    )


def _add_built(model: Any, tensors: dict[str, FloatTensor], source: Source) -> None:
    """Adds tensors that are in no file, computed as ``from_pretrained`` does after loading the rest: mostly buffers.

    Raises ``CheckpointError`` for missing parameters, unless the model's class says that they may be missing.
    """
    limits = BuildLimits(source.tensors)
    buffers = model.named_buffers(remove_duplicate=False)
    built = {name: buffer.clone() for name, buffer in buffers if name not in tensors}
    for name in _missing(model, tensors, source.folder):
        old = get_tensor(model, name)
        limits.count_bytes(old.nbytes)
        built[name] = nn.Parameter(torch.empty_like(old, device="cpu"), old.requires_grad)
    for value in model.state_dict(keep_vars=True).values():
        value._is_hf_initialized = True
    for name, value in built.items():
        set_tensor(model, name, value)
    for module in model.modules():
        module._is_hf_initialized = False
    with torch.device("cpu"):
        model.initialize_weights()
    tensors.update((name, built_float(get_tensor(model, name).detach())) for name in built)


def _missing(model: Any, tensors: dict[str, FloatTensor], folder: Path) -> list[str]:
    in_files = {id(get_tensor(model, name)) for name in tensors}
    parameters = model.named_parameters(remove_duplicate=False)
    missing = [name for name, parameter in parameters if id(parameter) not in in_files]
    computed = [f"({pattern})" for pattern in model._keys_to_ignore_on_load_missing or ()]
    left = [name for name in missing if not computed or not re.search("|".join(computed), name)]
    if left:
        raise CheckpointError(
            f"{folder} lacks tensors of {type(model).__name__}, which transformers would fill with random numbers: "
            f"{listed(left, show=str)}"
        )
    return missing
