"""``QuantizedLoad``: puts quantized layers into a model for which transformers reads a checkpoint; checks the result.

transformers checks little for a quantized model: some versions don't check shapes, and a missing tensor leaves
uninitialised memory, with a warning. The model may also be of another class than the saved one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qgemm.checkpoint.checksum import checksum, format_checksum
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import CONFIG_FILE, GENERATION_CONFIG_FILE, name_with_id, read_json, save_id
from qgemm.checkpoint.manifest import Manifest
from qgemm.checkpoint.matching import quantized_layers
from qgemm.checkpoint.pretrained import read_generation_config
from qgemm.checkpoint.safetensors_file import (
    SAVE,
    StoredTensor,
    check_save,
    parse_checksums,
    read_header_and_metadata,
    read_values,
)
from qgemm.checkpoint.stored_report import parse_report, read_report, warn_without_report
from qgemm.checkpoint.tensor_file import file_stamp
from qgemm.checkpoint.tensors import forget_ties, get_tensor, is_beyond, set_tensor, transient_names
from qgemm.integrations.transformers.config import QGemmConfig
from qgemm.integrations.transformers.renaming import Renaming
from qgemm.integrations.transformers.tensor_parallel import is_cut, plan_layers
from qgemm.model.report import QuantReport
from qgemm.nn import QuantLayer
from qgemm.nn.attention import opened_attention

Value = TypeVar("Value")


class QuantizedLoad:
    """A model while the values of its quantized layers are read from a checkpoint."""

    def __init__(self, model: PreTrainedModel, config: QGemmConfig, files: list[Path]) -> None:
        """``files``: those that transformers reads. The manifest of ``config`` becomes that of ``model``.

        Raises ``CheckpointError`` if the files don't contain what the model needs.
        """
        manifest = config.manifest
        if manifest is None:
            raise CheckpointError(
                "quantization_config in the model's config doesn't say which layers are quantized: the checkpoint is "
                "not qgemm's. For a float model, pass QGemmConfig to from_pretrained instead"
            )
        self._files = open_files(files, manifest)
        in_files, checksums = self._files.stored, self._files.checksums
        # How names in files differ from the model's; None for the class that was saved.
        self.renaming: Renaming | None = None
        if type(model).__name__ not in (model.config.architectures or ()):
            self.renaming = Renaming.find(model, in_files or [f"{name}.weight" for name in manifest.layers])
            self._files.report = None  # it describes the whole model
        layers, manifest = self._put_layers(model, manifest)
        self._manifest = config.manifest = manifest
        forget_ties(model, layers, manifest.tied)
        # transformers initializes what the files have under another name, which would overwrite a module with both
        # names.
        parameters = dict(model.named_parameters(remove_duplicate=False))
        ties = {alias: name for alias, name in manifest.tied.items() if alias in parameters}
        model.all_tied_weights_keys.update(ties)
        # The tensors in the files, by the model's names.
        names = self._names_in_files = {
            name if self.renaming is None else self.renaming.name_in(model, name) or name: name for name in in_files
        }
        if not layers and (missing := parameters.keys() - names.keys() - model.all_tied_weights_keys.keys()):
            kind = type(model).__name__
            raise CheckpointError(
                f"{self._files.config_path}: {kind} has none of the quantized layers of this checkpoint, whose names "
                f"are others than its own, such as {min(missing)}"
            )
        self._stored = {name: in_files[in_file] for name, in_file in names.items()}
        self._checksums = {name: checksums[in_file] for name, in_file in names.items() if in_file in checksums}
        if self._stored:
            _check_stored(self._stored, manifest, layers, self._files.config_path)
        _keep_dtypes(model, layers)
        # Float buffers that state_dict leaves out are stored too, and are put in place afterwards.
        put_later = {re.escape(min(name, names[name], key=len)) for name in transient_names(model) if name in names}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *put_later}

    def _put_layers(self, model: PreTrainedModel, manifest: Manifest) -> tuple[dict[str, QuantLayer], Manifest]:
        """Puts the layers in ``manifest`` into ``model``, without values; returns them, and the model's manifest."""
        if any(is_beyond(model, name) for name in manifest.layers):
            manifest = _without_last_layers(model, manifest)
            self._files.report = None  # it describes all layers
        may_be_called = list(manifest.layers)
        if self.renaming is not None:
            may_be_called = [candidate for name in manifest.layers for candidate in self.renaming.names(name)]
        with opened_attention(model, may_be_called):
            if self.renaming is not None:
                manifest = _manifest_for(model, self.renaming, manifest)
            layers = quantized_layers(model, manifest.layers, self._files.config_path)
            if is_cut(model):
                plan_layers(model, layers)
            for name, layer in layers.items():
                model.set_submodule(name, layer)
                for parameter in layer.parameters(recurse=False):
                    # What stays on disk is never read, and transformers would draw random numbers for it. A parameter
                    # that no file has is made anew, without this mark.
                    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        return layers, manifest

    def finish(self, model: PreTrainedModel) -> None:
        """Checks what was read, and adds what transformers doesn't read; raises ``CheckpointError``."""
        del model._get_dtype_plan
        for name in self._manifest.layers:
            layer = model.get_submodule(name)
            assert isinstance(layer, QuantLayer)
            _check_loaded(name, layer, self._checksums, self._files.config_path)
        for alias, name in self._manifest.tied.items():
            set_tensor(model, alias, get_tensor(model, name))  # including ties that the model's class doesn't know
        transient = {self._names_in_files[name]: name for name in transient_names(model) if name in self._stored}
        stored = {name_in_file: self._stored[name] for name_in_file, name in transient.items()}
        for name_in_file, value in read_values(stored, torch.device("cpu")):
            name = transient[name_in_file]
            set_tensor(model, name, value.to(get_tensor(model, name).device))
        if self._files.report is not None:
            model._qgemm_report = self._files.report  # type: ignore[assignment]
        self._files.finish(model)


@dataclass
class _LoadedFiles:
    """The files from which transformers loads a model, all from one save. ``open_files`` opens them.

    ``stored`` and ``checksums`` are indexed by the names in the files.
    """

    config_path: Path
    manifest: Manifest
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    checksums: dict[str, object] = field(default_factory=dict)
    report: QuantReport | None = None
    # The generation config's path until its save is finished, and the previous one, which transformers may read
    # instead.
    _pending: Path | None = None
    _stale: Any = None

    def finish(self, model: PreTrainedModel) -> None:
        """Raises ``CheckpointError`` if a save took place while transformers read; completes a save that was killed.

        transformers opens files by name, so it may have opened others than those opened here.
        """
        for path, stamp in {tensor.path: tensor.stamp for tensor in self.stored.values()}.items():
            if file_stamp(path) != stamp:
                raise CheckpointError(f"{path} was replaced while it was loaded: load it again")
        if self.stored and self.config_path.exists():
            if save_id(read_json(self.config_path), self.config_path) != self.manifest.save:
                raise CheckpointError(f"{self.config_path} was replaced while the model was loaded: load it again")
        if self._pending is not None and self._stale in (None, model.generation_config):
            path = self._pending if self._pending.exists() else self.config_path.with_name(GENERATION_CONFIG_FILE)
            model.generation_config = read_generation_config(path)


def open_files(files: list[Path], manifest: Manifest) -> _LoadedFiles:
    """Reads the headers of ``files``; raises ``CheckpointError`` unless they are from the save in ``manifest``."""
    folder = files[0].parent if files else Path()
    opened = _LoadedFiles(folder / CONFIG_FILE, manifest)
    weights = [file for file in files if file.suffix == ".safetensors"]
    for file in weights:
        tensors, metadata = read_header_and_metadata(file)
        check_save(file, metadata.get(SAVE), manifest.save)
        opened.stored.update(tensors)
        opened.checksums.update(parse_checksums(file, metadata) or {})
    try:
        if (report := read_report(folder, manifest, weights)) is not None:
            opened.report = parse_report(report, manifest, folder)
    except FileNotFoundError:
        warn_without_report(folder, manifest.report)
    if manifest.save is not None:
        pending = folder / name_with_id(GENERATION_CONFIG_FILE, manifest.save)
        if os.path.isfile(pending):
            opened._pending, standard = pending, folder / GENERATION_CONFIG_FILE
            opened._stale = read_generation_config(standard) if standard.exists() else None
    return opened


def _manifest_for(model: PreTrainedModel, renaming: Renaming, manifest: Manifest) -> Manifest:
    """The part of ``manifest`` about ``model``, whose class differs from that of the saved model."""

    def own(by_name: Mapping[str, Value]) -> dict[str, Value]:
        named = ((renaming.name_in(model, name), value) for name, value in by_name.items())
        return {name: value for name, value in named if name is not None}

    ties = {alias: renaming.name_in(model, name) for alias, name in own(manifest.tied).items()}
    own_ties = {alias: name for alias, name in ties.items() if name is not None}
    return Manifest(own(manifest.layers), own_ties, manifest.save, in_features=own(manifest.in_features))


def _without_last_layers(model: PreTrainedModel, manifest: Manifest) -> Manifest:
    """The part of ``manifest`` about a model with fewer layers; transformers lists the tensors that it leaves out."""

    def own(by_name: Mapping[str, Value]) -> dict[str, Value]:
        return {name: value for name, value in by_name.items() if not is_beyond(model, name)}

    return replace(
        manifest, layers=own(manifest.layers), tied=own(manifest.tied), in_features=own(manifest.in_features)
    )


def _check_stored(
    stored: dict[str, StoredTensor], manifest: Manifest, layers: dict[str, QuantLayer], config_path: Path
) -> None:
    manifest.check_sizes(layers, config_path)
    for name, layer in layers.items():
        for leaf, parameter in list(layer.named_parameters(recurse=False)):
            full_name = manifest.tied.get(f"{name}.{leaf}", f"{name}.{leaf}")
            tensor = stored.get(full_name)
            if tensor is None:
                raise CheckpointError(
                    f"{config_path.parent} lacks tensor {full_name} of a quantized layer: the checkpoint is "
                    "incomplete; save or download it again"
                )
            if tensor.shape != tuple(parameter.shape):
                shapes = f"{list(tensor.shape)}; the model's is {list(parameter.shape)}"
                raise CheckpointError(f"{tensor.path}: tensor {full_name} has shape {shapes}")
            if leaf in layer.fixed_names and tensor.dtype is not None:
                if not layer.accepts_dtype(leaf, tensor.dtype):
                    raise CheckpointError(
                        f"{tensor.path}: tensor {full_name} is {tensor.dtype}; a quantized layer's is {parameter.dtype}"
                    )
                layer.take_dtype(leaf, tensor.dtype)


def _keep_dtypes(model: PreTrainedModel, layers: Mapping[str, QuantLayer]) -> None:
    """Makes transformers read values and scales in their own dtype, also of a layer that the class keeps in float32."""

    def plan(dtype: torch.dtype) -> dict[str, torch.dtype]:
        kept = type(model)._get_dtype_plan(model, dtype)
        own: dict[str, torch.dtype] = {}
        for name, layer in layers.items():
            if any(re.search(part, name) for part in kept):
                fixed = ((leaf, layer.stored(leaf)) for leaf in layer.fixed_names)
                own |= {f"^{re.escape(name)}[.]{leaf}$": value.dtype for leaf, value in fixed if value is not None}
        return {**own, **kept}  # what matches from the beginning of a name precedes what matches a part of it

    model._get_dtype_plan = plan  # type: ignore[method-assign]


def _check_loaded(name: str, layer: QuantLayer, checksums: Mapping[str, object], config_path: Path) -> None:
    """Raises ``CheckpointError`` unless every parameter of the layer ``name`` was loaded, with valid values.

    Values that are in ``checksums``, by name, are compared with them. Biases aren't: transformers casts them.
    """
    for leaf, parameter in layer.named_parameters(recurse=False):
        if parameter.device.type == "meta":
            continue  # offloaded
        # A parameter without the mark is uninitialised memory: no tensor was loaded into it.
        if not getattr(parameter, "_is_hf_initialized", False) and not hasattr(layer, "_hf_hook"):
            raise CheckpointError(
                f"{config_path.parent}: {name}.{leaf} was not loaded: the checkpoint is incomplete; "
                "save or download it again"
            )
        value: Any = parameter.detach()
        is_whole = type(value) is Tensor  # if a layer is split among processes, no process has all the values
        if problem := layer.problem_with(leaf, value if is_whole else value.to_local()):
            raise CheckpointError(f"{config_path.parent}: {name}.{leaf} {problem}")
        wanted = checksums.get(f"{name}.{leaf}") if leaf in layer.fixed_names else None
        if wanted is not None and is_whole and format_checksum(checksum(value.contiguous())) != wanted:
            raise CheckpointError(
                f"{config_path.parent}: tensor {name}.{leaf} doesn't have the checksum that it was saved with: "
                "copy or download it again"
            )
