"""GGUF files of llama.cpp: a whole model in one file, or in several parts, with weights of 2 to 8 bits.

Settings in the file describe the model, from which transformers derives a config (``gguf_config.py``), and names are
llama.cpp's own (``gguf_names.py``). Linear layers stay packed, with the values that llama.cpp computes with
(``gguf_types.py``); embeddings become floats.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError, unsupported
from qgemm.checkpoint.float_layers import check_scale
from qgemm.checkpoint.gguf_architectures import NEXT, is_of_next
from qgemm.checkpoint.gguf_config import (
    LONG_FACTORS,
    OWN_CONFIGS,
    ROTARY_FACTORS,
    llama3_scaling,
    longrope_scaling,
    model_config,
)
from qgemm.checkpoint.gguf_deepseek import joined_latents, latents_shape, parts_of_latents
from qgemm.checkpoint.gguf_file import GGUF_SUFFIX, GgufFile, header_of
from qgemm.checkpoint.gguf_gemma4 import GEMMA4_TEXT, factors_of_experts, is_shared, set_rotated_part
from qgemm.checkpoint.gguf_names import EXPERT, ModelNames, RowOrder
from qgemm.checkpoint.gguf_qwen import QWEN3NEXT, order_of_projections, parts_of_projections
from qgemm.checkpoint.gguf_types import BlockType, common_scheme
from qgemm.checkpoint.layout import INDEX_FILE, WEIGHTS_FILE, checkpoint_file
from qgemm.checkpoint.pretrained import is_pretrained
from qgemm.checkpoint.safetensors_file import DTYPES_BY_CODE, StoredTensor, read_values
from qgemm.checkpoint.tensors import find_module, get_tensor, split_name
from qgemm.nn.linear_layer import is_float_linear
from qgemm.scheme import QuantScheme

FORMAT = "gguf"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_EMBEDDING = "token_embd.weight"
# Beside the weight of a layer in NVFP4: numbers that multiply it and, where they are in fp4, its inputs.
_FACTORS = ("scale", "input_scale")
# Encoders of images beside a language model, in files of their own.
_PROJECTOR = "mmproj"


@dataclass(frozen=True)
class GgufModel:
    """A model in GGUF files, of which ``path`` is the first: its tensors, their types by name, and its settings.

    ``stored_settings``, ``lists``: as ``GgufFile`` has them.
    """

    path: Path
    stored: dict[str, StoredTensor]
    types: dict[str, BlockType]
    settings: dict[str, Any]
    stored_settings: list[bytes]
    lists: dict[str, tuple[Any, ...]]

    def config(self, dtype: str) -> dict[str, Any]:
        """The config of the transformers model whose float part is of ``dtype``; raises as ``model_config`` does."""
        names = [name for name in self.stored if EXPERT.fullmatch(name) is None]
        # Of these it takes names for values.
        stored = [each for each in self.stored_settings if b".rope.scaling." not in each]
        takes_lists = self.settings.get("general.architecture") in OWN_CONFIGS
        settings = self.settings | self.lists if takes_lists else self.settings
        config = model_config(self.path, settings, header_of(stored, names), dtype, self.stored)
        if _EMBEDDING in self.stored:
            config["vocab_size"] = self.shape(_EMBEDDING)[0]
        names = [name for name in (ROTARY_FACTORS, *LONG_FACTORS) if name in self.stored]
        factors = dict(read_values({name: self.stored[name] for name in names}, torch.device("cpu")))
        if config["model_type"] == GEMMA4_TEXT:
            set_rotated_part(self.path, config, factors.pop(ROTARY_FACTORS, None))
            if (per_layer := "per_layer_token_embd.weight") in self.stored:
                config["vocab_size_per_layer_input"] = self.shape(per_layer)[0]
        elif (of_llama := factors.pop(ROTARY_FACTORS, None)) is not None:
            config["rope_scaling"] = llama3_scaling(self.path, of_llama, config)
        if factors or config.get("rope_scaling", {}).get("rope_type") == "longrope":
            config |= longrope_scaling(self.path, factors, self.settings)
        return config

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor's values."""
        stored, kind = self.stored[name].shape, self.types[name]
        return (*stored[:-1], stored[-1] // kind.nbytes * kind.values) if kind.is_quantized else stored


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that ``path`` is, or the only one in that folder; None if there is none, or other weights.

    Raises ``CheckpointError`` for a folder with several to choose from.
    """
    if not path.is_dir():
        return path if path.suffix == GGUF_SUFFIX else None
    names = sorted(each.name for each in path.glob(f"*{GGUF_SUFFIX}") if _PROJECTOR not in each.name.lower())
    names = [name for name in names if (part := _PART.fullmatch(name)) is None or int(part[2]) == 1]
    has_others = any(os.path.lexists(path / name) for name in (WEIGHTS_FILE, INDEX_FILE))
    if not names or has_others or next(path.glob("*.safetensors"), None) is not None:
        return None
    if len(names) > 1:
        raise CheckpointError(f"{path} holds {len(names)} models: pass the file of one of them, such as {names[0]}")
    return checkpoint_file(path, names[0])


def read_gguf(path: Path) -> GgufModel:
    """Reads the headers of the file at ``path``, and of the other parts of its model, if it is a first part.

    Raises ``CheckpointError`` if a part is missing or damaged, or if parts don't belong together.
    """
    part = _PART.fullmatch(path.name)
    paths = [path]
    if part is not None:
        count = int(part[3])
        names = [f"{part[1]}-{each:05}-of-{count:05}{GGUF_SUFFIX}" for each in range(1, count + 1)]
        paths = [checkpoint_file(path.parent, name) for name in names]
    found, total = GgufModel(paths[0], {}, {}, {}, [], {}), 0
    for each in paths:
        with GgufFile(each) as file:
            total += file.count
            if not found.settings:
                found.settings.update(file.settings)
                found.lists.update(file.lists)
                found.stored_settings.extend(file.stored_settings)
            for name, place in file.places.items():
                if name in found.stored:
                    raise CheckpointError(f"tensor {name} is in two files, {found.stored[name].path} and {each}")
                dtype = DTYPES_BY_CODE[place.code]
                found.stored[name] = StoredTensor(
                    each, place.shape, dtype, stamp=file.stamp, digest=file.digest, start=place.start
                )
                found.types[name] = file.types[name]
    said = found.settings.get("split.count", 0)
    if said not in (0, len(paths)):
        raise CheckpointError(
            f"{path} is one of {said} parts, whose names end in -00001-of-{said:05}{GGUF_SUFFIX}, ..."
        )
    if (wanted := found.settings.get("split.tensors.count", total)) != total:
        raise CheckpointError(
            f"{path}: its model has {wanted} tensors, and its parts have {total}: get all parts again, from one place"
        )
    return found


def gguf_contents(source: GgufModel, model: nn.Module, config: dict[str, Any]) -> Contents:
    """The contents of ``source`` in the names of ``model``, which ``config`` describes.

    Raises ``CheckpointError`` for a model that isn't of transformers, and for types that aren't read.
    """
    if not is_pretrained(model):
        raise CheckpointError(f"{source.path} is read for models of transformers; this is a {type(model).__name__}")
    names = ModelNames(source.path, source.settings["general.architecture"], model, config)
    contents = Contents.of_files(source.stored)
    for name, kind in source.types.items():
        if kind.is_quantized and kind.decode is None:
            raise unsupported(
                f"{source.stored[name].path}: tensor {name} is of type {kind.name}, which qgemm doesn't read"
            )
        target = names.find(name)
        if _is_unused(name, config, source.settings):
            contents.pass_over(name)
        elif target is not None:
            order = _row_order(source, names, name, target, model)
            if order is None:
                _note_float(contents, source, names, name, target, model)
            else:
                columns = names.column_order(name, *source.shape(name))
                _note_layer(contents, source, name, split_name(target)[0], order, columns)
    if config["model_type"] == GEMMA4_TEXT:
        _note_factors(contents, source, model)
    _note_latents(contents, source, model)
    if names.architecture == QWEN3NEXT:
        _note_projections(contents, source, model, config)
    if not contents.manifest.layers:
        raise CheckpointError(
            f"{source.path} holds no quantized layer: load its floats with transformers' from_pretrained(folder, "
            "gguf_file=...), and call qgemm.quantize_model"
        )
    return contents


def _is_unused(name: str, config: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether the model that ``config`` describes has nothing that is made from the tensor ``name``."""
    if config["model_type"] == GEMMA4_TEXT and is_shared(name, config):
        return True
    architecture = settings["general.architecture"]
    has_next = architecture in OWN_CONFIGS and bool(settings.get(f"{architecture}.{NEXT}"))
    return name in (ROTARY_FACTORS, *LONG_FACTORS) or (has_next and is_of_next(name, config["num_hidden_layers"]))


def _note_latents(contents: Contents, source: GgufModel, model: nn.Module) -> None:
    """Notes that the parts of DeepSeek's ``kv_b_proj`` are one weight in ``model``, in float."""
    for target, names in parts_of_latents(_free(contents, source)).items():
        path = source.stored[names[0]].path
        shape = latents_shape(path, names[0], source.shape(names[0]), source.shape(names[1]))
        _note_joined(contents, source, names, target, shape, model, joined_latents)


def _note_projections(contents: Contents, source: GgufModel, model: nn.Module, config: dict[str, Any]) -> None:
    """Notes that the parts of Qwen3-Next's ``in_proj_qkvz`` are one weight in ``model``, packed if possible."""
    for target, names in parts_of_projections(_free(contents, source)).items():
        kinds = [source.types[name] for name in names]
        shapes, path = [source.shape(name) for name in names], source.stored[names[0]].path
        if any(len(shape) != 2 or shape[1] != shapes[0][1] or shape[1] == 0 for shape in shapes):
            raise CheckpointError(f"{path}: {names[0]} has shape {list(shapes[0])}, and its gate {list(shapes[1])}")
        order = order_of_projections(path, names[0], shapes[0][0] + shapes[1][0], config)
        shape, scheme = (len(order), shapes[0][1]), common_scheme(kinds)
        if scheme is None:
            _note_joined(contents, source, names, target, shape, model, partial(_joined_rows, order))
        else:
            _note_joined_layer(contents, kinds, names, split_name(target)[0], shape, order, scheme)


def _note_joined_layer(
    contents: Contents,
    kinds: list[BlockType],
    names: list[str],
    layer: str,
    shape: tuple[int, int],
    order: Tensor,
    scheme: QuantScheme,
) -> None:
    """Notes that the tensors ``names``, of these ``kinds``, are the weight of ``layer`` together, in this ``scheme``.

    ``order``: that of their rows, one after the other, in the weight.
    """
    made = kinds[0].part_shapes(*shape, scheme)

    def convert(*stored: Tensor) -> Sequence[Tensor]:
        parts = [kind.parts(rows, scheme=scheme) for kind, rows in zip(kinds, stored, strict=True)]
        return [_joined_rows(order, *both) for both in zip(*parts, strict=True) if both[0] is not None]

    contents.convert_together(names, {f"{layer}.{leaf}": (names[0], *about) for leaf, about in made.items()}, convert)
    contents.manifest.layers[layer] = scheme
    contents.shapes[layer] = shape


def _joined_rows(order: Tensor, *parts: Tensor) -> Tensor:
    return torch.cat(parts)[order.to(parts[0].device)]


def _free(contents: Contents, source: GgufModel) -> list[str]:
    """The tensors of the files of which nothing has been noted."""
    return [name for name in source.stored if name in contents.headers]


def _note_joined(
    contents: Contents,
    source: GgufModel,
    names: list[str],
    target: str,
    shape: tuple[int, ...],
    model: nn.Module,
    join: Callable[..., Tensor],
) -> None:
    """Notes that the tensors ``names``, in float32, make the weight ``target`` of ``model`` together, in float."""
    kinds, dtype = [source.types[name] for name in names], next(model.parameters()).dtype

    def convert(*stored: Tensor) -> Sequence[Tensor]:
        parts = [
            kind.dequantize(value, torch.float32) if kind.is_quantized else value.float()
            for kind, value in zip(kinds, stored, strict=True)
        ]
        return (join(*parts).to(dtype),)

    contents.convert_together(names, {target: (names[0], shape, dtype)}, convert)


def _note_factors(contents: Contents, source: GgufModel, model: nn.Module) -> None:
    """Notes that factors of Gemma 4's single experts are a vector in ``model``."""
    dtype = next(model.parameters()).dtype

    def stack(*values: Tensor) -> Sequence[Tensor]:
        return (torch.stack([value.reshape(()) for value in values]).to(dtype),)

    for target, names in factors_of_experts(_free(contents, source)).items():
        contents.convert_together(names, {target: (names[0], (len(names),), dtype)}, stack)


def _row_order(source: GgufModel, names: ModelNames, name: str, target: str, model: nn.Module) -> RowOrder | None:
    """The order of the rows of a weight that stays packed; None for any other tensor."""
    layer, leaf = split_name(target)
    module, shape = find_module(model, layer), source.shape(name)
    if not source.types[name].is_quantized or leaf != "weight" or len(shape) != 2:
        return None
    if not is_float_linear(module) and EXPERT.fullmatch(name) is None:
        return None
    columns = names.column_order(name, *shape)
    is_divided = columns is not None and source.types[name].group_order(columns) is None
    return None if is_divided else names.row_order(name, *shape)


def _note_layer(
    contents: Contents, source: GgufModel, name: str, layer: str, order: RowOrder, columns: Tensor | None
) -> None:
    """Notes that the tensor ``name`` of the files is the weight of ``layer``.

    ``order``: that of its rows in the weight. ``columns``: that of its columns; None if it is the file's.
    """
    kind, (N, K) = source.types[name], source.shape(name)
    shapes = kind.part_shapes(N, K)
    made = {f"{layer}.{leaf}": (name, shape, dtype) for leaf, (shape, dtype) in shapes.items()}
    sources, (factor, of_inputs) = [name], (f"{name.removesuffix('weight')}{leaf}" for leaf in _FACTORS)
    if kind.has_global_scale and factor in source.stored:
        check_scale(contents, factor, (torch.float32,), {(), (1,)})
        sources.append(factor)
        made[f"{layer}.weight_global_scale"] = factor, *shapes["weight_global_scale"]
    if kind.has_global_scale and of_inputs in source.stored:
        contents.pass_over(of_inputs)
        contents.note("activations stay in float, where the file has scales to compute them in fp4")

    def convert(rows: Tensor, given: Tensor | None = None) -> Sequence[Tensor]:
        rows = rows[order if isinstance(order, slice) else order.to(rows.device)]
        own_columns = None if columns is None else columns.to(rows.device)
        return [part for part in kind.parts(rows, given, own_columns) if part is not None]

    contents.convert_together(sources, made, convert)
    contents.manifest.layers[layer] = kind.scheme
    contents.shapes[layer] = N, K


def _note_float(
    contents: Contents, source: GgufModel, names: ModelNames, name: str, target: str, model: nn.Module
) -> None:
    """Notes that the tensor ``name`` of the files is ``target`` of ``model``, in float."""
    kind, shape = source.types[name], source.shape(name)
    changed = names.changed_shape(name, shape)
    try:
        dtype = get_tensor(model, target).dtype
    except AttributeError:  # one of experts, which will be put together
        dtype = next(model.parameters()).dtype

    def convert(value: Tensor) -> Tensor:
        if kind.is_quantized:
            value = kind.dequantize(value, dtype if changed is None else torch.float32)
        return (value if changed is None else names.changed(name, value)).to(dtype)

    contents.convert(target, name, shape if changed is None else changed, convert, dtype)
