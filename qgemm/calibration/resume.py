"""``ResumeFolder``: the finished blocks of a run, so that a killed run can continue where it stopped.

``run.json`` identifies the run: its recipe, schemes, model and calibration data, by their values or hashes.
``block-00003.safetensors`` contains all tensors of the fourth block once it is quantized, and as metadata the schemes
of its layers and their records for the report. Each file is written completely or not at all.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from qgemm.arguments import as_new_folder
from qgemm.checkpoint.disk import make_folder, remove_unfinished, replacing
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import read_json
from qgemm.checkpoint.matching import quantized_layers
from qgemm.checkpoint.safetensors_file import DTYPE_CODES, read_header, read_metadata, read_values
from qgemm.checkpoint.safetensors_writer import write_safetensors
from qgemm.checkpoint.tensors import get_tensor, named_tensors, set_tensor
from qgemm.model.report import LayerRecord, QuantReport
from qgemm.model.survey import Layer
from qgemm.model.swap import put
from qgemm.nn import LinearLayer, QuantLayer
from qgemm.nn.kinds import meta_linear
from qgemm.nn.quant_layer import frozen
from qgemm.scheme import QuantScheme, resolve_scheme

RUN_FILE = "run.json"
METADATA = "qgemm_block"
_START_OVER = "remove the folder to start over"

# This many values of each tensor of a model are hashed: enough to tell it from a fine-tuned one.
_SAMPLE = 1024


class ResumeFolder:
    """The blocks that a run has finished, in ``folder``."""

    def __init__(self, folder: str | Path, about: Mapping[str, Any]) -> None:
        """``about``: identifies the run, JSON-ready; in an empty folder a new run starts.

        Raises ``ValueError`` if ``folder`` belongs to another run, ``CheckpointError`` if its description is damaged.
        """
        self.folder = as_new_folder("resume_folder", folder)
        make_folder(self.folder)
        remove_unfinished(self.folder)
        path = self.folder / RUN_FILE
        about = json.loads(json.dumps(about))
        if not path.exists():
            if foreign := sorted(each.name for each in self.folder.iterdir()):
                raise ValueError(
                    f"resume_folder: {self.folder} holds {foreign[0]} but no {RUN_FILE}: give an empty folder"
                )
            with replacing(path) as file:
                file.write((json.dumps(about, indent=2) + "\n").encode())
            return
        stored = read_json(path)
        if differing := [key for key in {**stored, **about} if stored.get(key) != about.get(key)]:
            raise ValueError(
                f"resume_folder: {self.folder} holds a run with another {' and another '.join(differing)}: give "
                "another folder, or remove this one"
            )

    def has(self, index: int) -> bool:
        """Whether block ``index`` is finished."""
        return self._path(index).exists()

    def save(self, index: int, name: str, module: nn.Module, records: Iterable[LayerRecord]) -> None:
        """Writes block ``index``, the module ``name``, whose layers are quantized."""
        layers = {each: layer for each, layer in module.named_modules(prefix=name) if isinstance(layer, QuantLayer)}
        tensors = {
            f"{name}.{each}": tensor for each, tensor in named_tensors(module).items() if tensor.dtype in DTYPE_CODES
        }
        about = {
            "schemes": {each: layer.scheme.to_dict() for each, layer in layers.items()},
            "report": QuantReport(tuple(records)).to_dict(),
        }
        with replacing(self._path(index)) as file:
            write_safetensors(file, tensors, lambda written: None, {METADATA: json.dumps(about)})

    def restore(self, index: int, model: nn.Module, layers: Mapping[str, Layer]) -> list[LayerRecord]:
        """Restores block ``index`` in ``model``, as it was saved, and returns its layers' records.

        ``layers``: the model's layers to be quantized, by name. Raises ``CheckpointError`` if the file is damaged.
        """
        path = self._path(index)
        schemes, records = _parse(path, read_metadata(path).get(METADATA))
        if foreign := [name for name in schemes if name not in layers]:
            raise CheckpointError(f"{path} holds {foreign[0]!r}, which this run doesn't quantize: {_START_OVER}")
        stored = read_header(path)
        made = quantized_layers(model, schemes, path)
        # The float layers, which are still in place, tell the devices.
        devices = {name: next(model.get_submodule(name).parameters()).device for name in made}
        values = dict(read_values(stored, torch.device("cpu")))
        for name, layer in made.items():
            if isinstance(layer, LinearLayer) and layer.bias is None and f"{name}.bias" in values:
                # A method has added one: the float layer has none.
                layer = meta_linear(layer.scheme, layer.in_features, layer.out_features, bias=True)
            for leaf in [leaf for leaf, _ in layer.named_parameters(recurse=False)]:
                value = values.pop(f"{name}.{leaf}", None)
                if value is None:
                    raise CheckpointError(f"{path} lacks {name}.{leaf}: {_START_OVER}")
                setattr(layer, leaf, frozen(value.to(devices[name])))
            put(model, layers[name], layer.train(model.get_submodule(name).training))
        for name, value in values.items():
            _restore(model, name, value, path)
        return records

    def _path(self, index: int) -> Path:
        return self.folder / f"block-{index:05d}.safetensors"


def hash_of_model(model: nn.Module) -> str:
    """A hash of the names, shapes and dtypes of a model's tensors, and of a sample of their values."""
    return _hash((name, tensor, max(1, tensor.numel() // _SAMPLE)) for name, tensor in named_tensors(model).items())


def hash_of_data(batches: Iterable[Any]) -> str:
    """A hash of all values in the batches."""
    return _hash((path, leaf, 1) for batch in batches for path, leaf in tree_flatten_with_path(batch)[0])


def _hash(leaves: Iterable[tuple[Any, Any, int]]) -> str:
    """A hash of named leaves: of a tensor, every n-th value, where n is the third item; of others, the value."""
    sum_of = hashlib.blake2b(digest_size=16)
    for name, leaf, stride in leaves:
        if not isinstance(leaf, Tensor):
            sum_of.update(f"{name} {leaf!r}\n".encode())
            continue
        sum_of.update(f"{name} {leaf.dtype} {list(leaf.shape)}\n".encode())
        content = (leaf.detach() if stride == 1 else leaf.detach().flatten()[::stride]).to("cpu").contiguous()
        if content.nbytes:
            sum_of.update((ctypes.c_char * content.nbytes).from_address(content.data_ptr()))
    return sum_of.hexdigest()


def _parse(path: Path, text: str | None) -> tuple[dict[str, QuantScheme], list[LayerRecord]]:
    try:
        about = json.loads(text or "null")
        schemes = {name: resolve_scheme(QuantScheme.from_dict(each)) for name, each in about["schemes"].items()}
        return schemes, list(QuantReport.from_dict(about["report"]).records)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} isn't a block of a run: {error}") from error


def _restore(model: nn.Module, name: str, value: Tensor, path: Path) -> None:
    """Sets a tensor of the model's float part."""
    try:
        old = get_tensor(model, name)
    except AttributeError:
        raise CheckpointError(f"{path} holds {name}, which the model doesn't have: {_START_OVER}") from None
    if (old.shape, old.dtype) == (value.shape, value.dtype):
        old.detach().copy_(value)  # in place, because other modules may share it
    else:
        value = value.to(old.device)
        set_tensor(model, name, nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value)
