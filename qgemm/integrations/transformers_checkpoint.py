"""A quantized checkpoint beside the model that ``from_pretrained`` builds for it: names, ties, what came of it.

transformers checks little of a quantized model: shapes not at all in some versions, and a tensor that is missing leaves
uninitialised memory, with a warning. The model may also be of another class than the one that was saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from qgemm.checkpoint.checksum import checksum, format_checksum
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.manifest import Manifest
from qgemm.checkpoint.safetensors_file import StoredTensor
from qgemm.checkpoint.tensors import get_tensor
from qgemm.nn import QuantLayer


def name_in(model: PreTrainedModel, name: str) -> str | None:
    """What ``model`` calls a part of the model that was saved: one may be the base model of the other."""
    prefix = f"{model.base_model_prefix}."
    for candidate in (name, name.removeprefix(prefix), prefix + name):
        try:
            if get_tensor(model, candidate) is not None:
                return candidate
        except AttributeError:
            continue
    return None


def manifest_for(model: PreTrainedModel, manifest: Manifest, config_path: Path) -> Manifest:
    """What of ``manifest`` is about ``model``, which is of another class than the model that was saved."""
    layers = {name_in(model, name): scheme for name, scheme in manifest.layers.items()}
    ties = {name_in(model, alias): name_in(model, name) for alias, name in manifest.tied.items()}
    own_layers = {name: scheme for name, scheme in layers.items() if name is not None}
    if not own_layers:
        raise CheckpointError(
            f"{config_path}: {type(model).__name__} has none of the quantized layers of this checkpoint"
        )
    return Manifest(own_layers, {alias: name for alias, name in ties.items() if alias is not None and name is not None})


def check_stored(
    stored: dict[str, StoredTensor], manifest: Manifest, layers: dict[str, QuantLayer], config_path: Path
) -> None:
    """Raises ``CheckpointError`` unless the files hold quantized weights and their scales for each of ``layers``."""
    for name, layer in layers.items():
        for leaf, parameter in layer.named_parameters():
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
            if leaf in layer.fixed_names and tensor.dtype != parameter.dtype:
                raise CheckpointError(
                    f"{tensor.path}: tensor {full_name} is {tensor.dtype}; a quantized layer's is {parameter.dtype}"
                )


def check_loaded(name: str, layer: QuantLayer, checksums: Mapping[str, object], config_path: Path) -> None:
    """Raises ``CheckpointError`` unless every parameter of the layer ``name`` was loaded, with scales above 0.

    Values that are in ``checksums``, by name, are held against theirs. Biases aren't: transformers casts them.
    """
    for leaf, parameter in layer.named_parameters():
        if parameter.device.type == "meta":
            continue  # offloaded
        # A parameter without the mark is uninitialised memory: no tensor went there.
        if not getattr(parameter, "_is_hf_initialized", False) and not hasattr(layer, "_hf_hook"):
            raise CheckpointError(f"{config_path.parent}: {name}.{leaf} was not loaded: the checkpoint is incomplete")
        if problem := layer.problem_with(leaf, parameter.detach()):
            raise CheckpointError(f"{config_path.parent}: {name}.{leaf} {problem}")
        wanted = checksums.get(f"{name}.{leaf}") if leaf in layer.fixed_names else None
        # Of a layer that is cut among processes, nobody has all the values.
        is_whole = type(parameter.detach()) is Tensor
        if wanted is not None and is_whole and format_checksum(checksum(parameter.detach().contiguous())) != wanted:
            raise CheckpointError(
                f"{config_path.parent}: tensor {name}.{leaf} doesn't have the checksum that it was saved with"
            )
