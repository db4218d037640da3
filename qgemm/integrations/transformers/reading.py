"""``QuantizedLoad``: puts quantized layers into a model, into which transformers reads a checkpoint, and checks it."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import PreTrainedModel

from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.matching import quantized_layers
from qgemm.checkpoint.safetensors_file import read_values
from qgemm.checkpoint.tensors import get_tensor, set_tensor, transient_names
from qgemm.integrations.transformers.checkpoint import (
    check_loaded,
    check_stored,
    manifest_for,
    name_in,
    open_files,
)
from qgemm.integrations.transformers.config import QGemmConfig
from qgemm.integrations.transformers.tensor_parallel import is_cut, plan_layers
from qgemm.nn import QuantLayer
from qgemm.nn.attention import opened_attention


class QuantizedLoad:
    """A model while the values of its quantized layers are read from a checkpoint."""

    def __init__(self, model: PreTrainedModel, config: QGemmConfig, files: list[Path]) -> None:
        """``files``: those that transformers reads. The manifest of ``config`` becomes that of ``model``.

        Raises ``CheckpointError`` if the files don't hold what the model needs.
        """
        manifest = config.manifest
        if manifest is None:
            raise CheckpointError(
                "quantization_config in the model's config doesn't say which layers are quantized: the checkpoint is "
                "not qgemm's. For a float model, pass QGemmConfig to from_pretrained instead"
            )
        self._files = open_files(files, manifest)
        in_files, checksums = self._files.stored, self._files.checksums
        same_class = type(model).__name__ in (model.config.architectures or ())
        if not same_class:
            manifest = config.manifest = manifest_for(model, manifest, self._files.config_path)
            self._files.report = None  # it is of the whole model
        with opened_attention(model, manifest.layers):
            layers = quantized_layers(model, manifest.layers, self._files.config_path)
            if is_cut(model):
                plan_layers(model, layers)
            for name, layer in layers.items():
                model.set_submodule(name, layer)
        # What the files hold, by the model's names.
        names = self._names_in_files = {name if same_class else name_in(model, name) or name: name for name in in_files}
        self._stored = {name: in_files[in_file] for name, in_file in names.items()}
        self._checksums = {name: checksums[in_file] for name, in_file in names.items() if in_file in checksums}
        if self._stored:
            check_stored(self._stored, manifest, layers, self._files.config_path)
        # Float buffers that state_dict leaves out are stored too; they are put into place afterwards.
        known = {re.escape(names[name]) for name in transient_names(model) if name in names}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *known}
        self._manifest = manifest

    def finish(self, model: PreTrainedModel) -> None:
        """Checks what was read, and adds what transformers doesn't read; raises ``CheckpointError``."""
        for name in self._manifest.layers:
            layer = model.get_submodule(name)
            assert isinstance(layer, QuantLayer)
            check_loaded(name, layer, self._checksums, self._files.config_path)
        for alias, name in self._manifest.tied.items():
            set_tensor(model, alias, get_tensor(model, name))  # also ties that the model's class doesn't know of
        transient = {self._names_in_files[name]: name for name in transient_names(model) if name in self._stored}
        stored = {name_in_file: self._stored[name] for name_in_file, name in transient.items()}
        for name_in_file, value in read_values(stored, torch.device("cpu")):
            name = transient[name_in_file]
            set_tensor(model, name, value.to(get_tensor(model, name).device))
        if self._files.report is not None:
            model._qgemm_report = self._files.report  # type: ignore[assignment]
        self._files.finish(model)
