"""``save_quantized``: writes a quantized model as safetensors, in files that all contain the id of the save.

The files get unused names, and the rename of ``config.json``, which points to them, makes them the checkpoint. So
whatever happens, the folder holds the old checkpoint or the new one.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qgemm.arguments import as_new_folder, check_model
from qgemm.checkpoint import compressed_tensors_writer, gptq_writer
from qgemm.checkpoint.compressed_tensors_groups import QUANT_METHOD as COMPRESSED_TENSORS
from qgemm.checkpoint.disk import making_folder, remove_unfinished, writing
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.gptq import QUANT_METHOD as GPTQ
from qgemm.checkpoint.layout import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    INDEX_FILE,
    REPORT_FILE,
    SAVE_KEY,
    WEIGHTS_KEY,
    are_names_free,
    checkpoint_files,
    name_with_id,
    parse_size,
    split_into_shards,
)
from qgemm.checkpoint.load import find_matching
from qgemm.checkpoint.locking import locked
from qgemm.checkpoint.manifest import QUANT_METHOD, Manifest
from qgemm.checkpoint.pretrained import generation_config, is_pretrained, model_config, part_configs
from qgemm.checkpoint.refusal import FUSIONS_KEY, add_refusal
from qgemm.checkpoint.safetensors_file import DTYPE_CODES, SAVE
from qgemm.checkpoint.safetensors_writer import check_tensor_name, write_safetensors
from qgemm.checkpoint.staging import StagedFiles, remove_files
from qgemm.checkpoint.tensors import BIAS_DTYPES, find_ties, stored_tensors, unwrapped
from qgemm.model.report import QuantReport, stored_report
from qgemm.nn.quant_layer import QuantLayer, quant_layers
from qgemm.warn import warn_user

_OF_OTHERS = {COMPRESSED_TENSORS: compressed_tensors_writer, GPTQ: gptq_writer}


def save_quantized(
    model: nn.Module,
    folder: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    format: str = "qgemm",
) -> None:
    """Writes ``model``, which contains quantized layers, to ``folder``, for ``load_quantized``.

    Every tensor keeps its dtype; tensors that share memory are stored once. The file names are transformers', so a
    tokenizer can be saved into the same folder. ``max_shard_size``: the maximum size of a file, in bytes or as text
    such as ``"5GB"``. ``overwrite``: replace a checkpoint in the folder; otherwise an existing one raises
    ``FileExistsError``. ``format``: ``"qgemm"``; ``"compressed-tensors"``, which transformers and vLLM read too; or
    ``"gptq"``, for ``int4`` and ``int8-weight`` schemes, which GPTQModel and vLLM read. The latter two contain the
    ``state_dict`` and no report.

    The folder holds a complete checkpoint at every moment, the old one or the new one, even if the save is killed or
    the disk is full. One tensor at a time is copied to CPU memory. Only one process at a time can save into a folder: a
    second one gets a ``CheckpointError``.

    Raises ``ValueError`` for an unknown format and for a model that can't be stored: without quantized layers, with
    tensors on meta, with a scale that its layer wouldn't load, or with state that isn't a plain tensor. Warns about a
    transformers model that ``load_quantized`` can't build from its config, such as one of a class of your own or with
    adapters.
    """
    if format not in (formats := (QUANT_METHOD, *_OF_OTHERS)):
        raise ValueError(f"format is {format!r}; it must be one of {formats}")
    check_model(model)
    folder = as_new_folder("folder", folder)
    model = unwrapped(model)
    layers = _layers_of(model)
    tensors = stored_tensors(model)
    _check_can_be_stored(model, tensors)
    _check_layers(layers)
    ties = find_ties(model, tensors)
    save = Save(secrets.token_hex(8))
    if format == QUANT_METHOD:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ties}
        save.report = stored_report(model)
        quantization = Manifest.of(layers, ties).to_dict()
    else:
        tensors = _OF_OTHERS[format].tensors_to_write(model, layers, tensors, ties)
        quantization = _OF_OTHERS[format].quantization_config(model, layers)
    shards = split_into_shards({name: t.nbytes for name, t in tensors.items()}, parse_size(max_shard_size))
    with making_folder(folder), writing(folder), locked(folder):
        old_files = checkpoint_files(folder)
        if old_files and not overwrite:
            raise FileExistsError(f"{folder} already holds {', '.join(old_files)}; pass overwrite=True to replace them")
        remove_unfinished(folder)
        save.has_own_names = not are_names_free(folder, old_files)
        texts = save.text_files(model, quantization, tensors, shards)
        if (generation := texts.pop(GENERATION_CONFIG_FILE, None)) is not None:
            texts[save.pending_generation_config] = generation
        save.publish(folder, tensors, shards, texts)
        if generation is not None:
            os.replace(folder / save.pending_generation_config, folder / GENERATION_CONFIG_FILE)
        kept = {CONFIG_FILE, *(() if generation is None else (GENERATION_CONFIG_FILE,))}
        remove_files(folder, (name for name in old_files if name not in kept))
    if hasattr(model, "peft_config") and any(name.endswith(".base_layer") for name in layers):
        warn_user(
            f"{type(model).__name__} was saved with adapters of PEFT, so it can't be rebuilt from its config alone: "
            "save these with save_pretrained, and the model as it was before, or as PEFT's unload() returns it. Or "
            "merge them: call model.dequantize(), then PEFT's merge_and_unload(), and quantize the result again"
        )
    elif is_pretrained(model):
        _warn_unless_it_loads(model, folder)


def _layers_of(model: nn.Module) -> dict[str, QuantLayer]:
    """The quantized layers of ``model`` by all of their names; raises ``ValueError`` for what can't be saved."""
    layers = quant_layers(model)
    if not layers:
        raise ValueError("model has no quantized layer: quantize it with qgemm.quantize_model first")
    if "" in layers:
        raise ValueError("model is a single quantized layer; put it into a module, such as nn.Sequential, to save it")
    if any(layer.shard is not None for layer in layers.values()):
        raise ValueError("this model is split among processes: call model.save_pretrained(folder) in all of them")
    return layers


@dataclass
class Save:
    """The files of one save, which all contain its ``id``.

    ``has_own_names``: whether the id is also in their names. ``report``: the model's, if it should be stored.
    """

    id: str
    has_own_names: bool = False
    report: QuantReport | None = None

    def name(self, file_name: str) -> str:
        """The name of the file ``file_name`` in this save."""
        return name_with_id(file_name, self.id) if self.has_own_names else file_name

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of each file with tensors."""
        return {SAVE: self.id}

    @property
    def pending_generation_config(self) -> str:
        """The name of the generation config until its ``config.json`` is in place."""
        return name_with_id(GENERATION_CONFIG_FILE, self.id)

    def publish(
        self, folder: Path, tensors: dict[str, Tensor], shards: dict[str, list[str]], texts: dict[str, bytes]
    ) -> None:
        """Writes files with ``tensors``, those of each of ``shards``, and with ``texts``, and puts them in place."""
        staged = StagedFiles(folder)
        try:
            total = sum(tensor.nbytes for tensor in tensors.values())
            with tqdm(total=total, desc="save", unit="B", unit_scale=True, disable=None) as progress:
                for file_name, names in shards.items():
                    with staged.create(self.name(file_name)) as file:
                        write_safetensors(file, {n: tensors[n] for n in names}, progress.update, self.metadata)
            for file_name, text in texts.items():
                with staged.create(file_name) as file:
                    file.write(text)
            staged.publish(last=CONFIG_FILE)
        finally:
            staged.discard()

    def text_files(
        self,
        model: nn.Module,
        quantization: dict[str, Any],
        tensors: dict[str, Tensor],
        shards: dict[str, list[str]],
    ) -> dict[str, bytes]:
        """The JSON files of a checkpoint of ``model``, by name: its config, and others if they are needed.

        ``quantization``: the ``quantization_config``. Only the sizes of ``tensors``, which ``shards`` divides into
        files, matter.
        """
        texts: dict[str, bytes] = {}
        config = {**model_config(model), "quantization_config": {**quantization, SAVE_KEY: self.id}}
        if self.report is not None:
            config["quantization_config"]["report"] = self.name(REPORT_FILE)
            texts[self.name(REPORT_FILE)] = _json({SAVE_KEY: self.id, "report": self.report.to_dict()})
        if is_pretrained(model) and quantization["quant_method"] == QUANT_METHOD:
            for path in ((), *part_configs(model)):
                own = functools.reduce(dict.__getitem__, path, config)
                own[FUSIONS_KEY] = add_refusal(own.get(FUSIONS_KEY))
        if self.has_own_names or len(shards) > 1:
            texts[self.name(INDEX_FILE)] = _json(self._index(tensors, shards))
        if self.has_own_names:
            config[WEIGHTS_KEY] = self.name(INDEX_FILE)
        if (generation := generation_config(model)) is not None:
            texts[GENERATION_CONFIG_FILE] = _json(generation)
        return {CONFIG_FILE: _json(config), **texts}

    def _index(self, tensors: dict[str, Tensor], shards: dict[str, list[str]]) -> dict[str, Any]:
        return {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values()), **self.metadata},
            "weight_map": {name: self.name(file_name) for file_name, names in shards.items() for name in names},
        }


def _check_can_be_stored(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                f"{name or 'model'} keeps extra state, which safetensors can't hold: keep it in buffers instead"
            )
    for name, tensor in tensors.items():
        check_tensor_name(name)
        if tensor.device.type == "meta":
            raise ValueError(
                f"{name} is on meta, without values: load it, or bring an offloaded model back, to save it"
            )
        if type(tensor.detach()) is not Tensor or tensor.layout != torch.strided or tensor.dtype not in DTYPE_CODES:
            raise ValueError(
                f"{name} is a {type(tensor.detach()).__name__} of {tensor.dtype} in layout {tensor.layout}; "
                "only plain dense tensors of real numbers can be saved: convert it first"
            )


def _check_layers(layers: dict[str, QuantLayer]) -> None:
    for name, layer in layers.items():
        layer.state_dict()  # raises if the model is only partly quantized
        for leaf, parameter in layer.named_parameters(recurse=False):
            if leaf not in layer.fixed_names and parameter.dtype not in BIAS_DTYPES:
                raise ValueError(
                    f"{name}.{leaf} is {parameter.dtype}, which no quantized layer computes with: call model.float()"
                )
            if problem := layer.problem_with(leaf, parameter.detach()):
                raise ValueError(
                    f"{name}.{leaf} {problem}; it was never set, or is damaged: load it, or quantize the layer again"
                )


def _warn_unless_it_loads(model: nn.Module, folder: Path) -> None:
    # For a user's own model, or one changed after it was built: better to warn now than when it is needed.
    try:
        find_matching(folder)
    except CheckpointError as error:
        warn_user(
            f"{type(model).__name__} was saved, but can't be rebuilt from its config alone: {error}. "
            "To load it, pass the float model, or a function that builds it, as load_quantized(..., model=)"
        )


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
