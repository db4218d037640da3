"""``save_quantized``: writes a quantized model as safetensors, in files that are whole or don't load."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qgemm.arguments import as_new_folder, check_model
from qgemm.checkpoint import compressed_tensors
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    INDEX_FILE,
    checkpoint_files,
    parse_size,
    split_into_shards,
)
from qgemm.checkpoint.load import find_matching
from qgemm.checkpoint.manifest import QUANT_METHOD, Manifest
from qgemm.checkpoint.pretrained import generation_config, is_pretrained, model_config
from qgemm.checkpoint.safetensors_file import DTYPE_CODES
from qgemm.checkpoint.safetensors_writer import check_tensor_name, write_safetensors
from qgemm.checkpoint.staging import StagedFiles
from qgemm.checkpoint.tensors import BIAS_DTYPES, find_ties, stored_tensors
from qgemm.nn import QuantLayer


def save_quantized(
    model: nn.Module,
    folder: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    format: str = "qgemm",
) -> None:
    """Writes ``model``, which holds quantized layers, to ``folder``, for ``load_quantized``.

    Every tensor keeps its dtype; tensors that are one in memory are stored once. The files are named as transformers
    names them, so a tokenizer can be saved beside them. ``max_shard_size``: how large a file may be, in bytes or as
    text like ``"5GB"``. ``overwrite``: replace a checkpoint that the folder already holds; without it, that raises
    ``FileExistsError``. ``format``: ``"qgemm"``, or ``"compressed-tensors"``, which transformers and vLLM read too; it
    holds what ``state_dict`` does, and no report.

    All files are written under temporary names first and moved into place at the end, so an interrupted save never
    leaves a folder that loads but is wrong. One tensor at a time is copied to CPU memory.

    Raises ``ValueError`` for an unknown format and for a model that can't be stored: with no quantized layer, with
    tensors on meta, with a scale that isn't finite and above 0, or with state that isn't a plain tensor. Warns of a
    transformers model that ``load_quantized`` can't build from its config, such as one of a class of your own.
    """
    if format not in (QUANT_METHOD, compressed_tensors.QUANT_METHOD):
        raise ValueError(f'format is {format!r}; it must be "{QUANT_METHOD}" or "{compressed_tensors.QUANT_METHOD}"')
    check_model(model)
    folder = as_new_folder("folder", folder)
    model = getattr(model, "_orig_mod", model)  # the model inside of what torch.compile returned
    modules = model.named_modules(remove_duplicate=False)
    layers = {name: module for name, module in modules if isinstance(module, QuantLayer)}
    if not layers:
        raise ValueError("model has no quantized layer: quantize it with qgemm.quantize_model first")
    if "" in layers:
        raise ValueError("model is a single quantized layer; put it into a module, such as nn.Sequential, to save it")
    tensors = stored_tensors(model)
    _check_can_be_stored(model, tensors)
    _check_layers(layers)
    ties = find_ties(tensors)
    if format == QUANT_METHOD:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ties}
        report = getattr(model, "_qgemm_report", None)
        schemes = {name: layer.scheme for name, layer in layers.items()}
        quantization = Manifest(schemes, ties, None if report is None else report.to_dict()).to_dict()
    else:
        tensors = compressed_tensors.tensors_to_write(model, layers, tensors, ties)
        quantization = compressed_tensors.quantization_config(model, layers)
    shards = split_into_shards({name: t.nbytes for name, t in tensors.items()}, parse_size(max_shard_size))
    texts = text_files(model, quantization, tensors, shards)
    folder.mkdir(parents=True, exist_ok=True)
    old_files = checkpoint_files(folder)
    if old_files and not overwrite:
        raise FileExistsError(f"{folder} already holds {', '.join(old_files)}; pass overwrite=True to replace them")
    staged = StagedFiles(folder)
    try:
        with _progress(tensors.values()) as progress:
            for file_name, names in shards.items():
                with staged.create(file_name) as file:
                    write_safetensors(file, {name: tensors[name] for name in names}, progress.update)
        for file_name, text in texts.items():
            with staged.create(file_name) as file:
                file.write(text)
        # Without a config nothing loads, so it goes first and comes last.
        staged.publish(last=CONFIG_FILE, stale=old_files)
    finally:
        staged.discard()
    if is_pretrained(model):
        _warn_unless_it_loads(model, folder)


def text_files(
    model: nn.Module, quantization: dict[str, Any], tensors: dict[str, Tensor], shards: dict[str, list[str]]
) -> dict[str, bytes]:
    """The JSON files of a checkpoint of ``model``, by name: its config, and the others where there is need of them.

    ``quantization``: the ``quantization_config``. Of ``tensors``, which ``shards`` puts into files, only sizes count.
    """
    texts = {CONFIG_FILE: _json({**model_config(model), "quantization_config": quantization})}
    if (generation := generation_config(model)) is not None:
        texts[GENERATION_CONFIG_FILE] = _json(generation)
    if len(shards) > 1:
        texts[INDEX_FILE] = _json(_index(tensors, shards))
    return texts


def _check_can_be_stored(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(f"{name or 'model'} keeps extra state that isn't tensors, which safetensors can't hold")
    for name, tensor in tensors.items():
        check_tensor_name(name)
        if tensor.device.type == "meta":
            raise ValueError(
                f"{name} is on meta, without values: load it, or bring an offloaded model back, to save it"
            )
        if type(tensor.detach()) is not Tensor or tensor.layout != torch.strided or tensor.dtype not in DTYPE_CODES:
            raise ValueError(
                f"{name} is a {type(tensor.detach()).__name__} of {tensor.dtype} in layout {tensor.layout}; "
                "only plain dense tensors of real numbers can be saved"
            )


def _check_layers(layers: dict[str, QuantLayer]) -> None:
    for name, layer in layers.items():
        for leaf, parameter in layer.named_parameters():
            if leaf not in layer.fixed_names and parameter.dtype not in BIAS_DTYPES:
                raise ValueError(
                    f"{name}.{leaf} is {parameter.dtype}, which no quantized layer computes with: call model.float()"
                )
            if problem := layer.problem_with(leaf, parameter.detach()):
                raise ValueError(f"{name}.{leaf} {problem}; it was never set, or damaged")


def _warn_unless_it_loads(model: nn.Module, folder: Path) -> None:
    # A model of one's own, or one that was changed after it was built. Better said now than when it is needed.
    try:
        find_matching(folder)
    except CheckpointError as error:
        warnings.warn(
            f"{type(model).__name__} is saved, but its config alone doesn't build it again: {error}. "
            "To load it, pass the float model, or a function that builds it, as load_quantized(..., model=)",
            stacklevel=3,
        )


def _index(tensors: dict[str, Tensor], shards: dict[str, list[str]]) -> dict[str, Any]:
    return {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file_name for file_name, names in shards.items() for name in names},
    }


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _progress(tensors: Iterable[Tensor]) -> tqdm[Any]:
    total = sum(tensor.nbytes for tensor in tensors)
    return tqdm(total=total, desc="save", unit="B", unit_scale=True, disable=None)
