"""``ForeignLoad``: runs another library's quantized checkpoint through qgemm, in ``from_pretrained``.

transformers reads most of these formats itself, with quantizers that need their libraries. With a ``QGemmConfig``, the
layers are qgemm's instead, and are read as ``load_quantized`` reads them; transformers builds the model, reads the
float tensors, and decides which module goes to which device.

Meanwhile, each quantized layer is inside a separate module in the float layer's place. Otherwise transformers would
load a tensor from the files with the same name as a parameter, but another shape, into it.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from qgemm.checkpoint import formats
from qgemm.checkpoint.contents import check_unheld, read_converted
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.formats import fit_to_model, read_contents
from qgemm.checkpoint.layout import CONFIG_FILE, checkpoint_file, read_json
from qgemm.checkpoint.manifest import QUANT_METHOD
from qgemm.checkpoint.matching import match
from qgemm.checkpoint.tensors import forget_ties, split_name
from qgemm.integrations.transformers.config import QGemmConfig
from qgemm.integrations.transformers.tensor_parallel import is_cut, plan_layers
from qgemm.model.offloading import is_offloaded
from qgemm.nn import QuantLayer
from qgemm.warn import warn_user

_WAITING = "qgemm_waiting"


def is_foreign(files: list[Path]) -> bool:
    """Whether ``files`` belong to a checkpoint quantized by another library, according to its config or tensors."""
    path = files[0].parent / CONFIG_FILE if files else None
    return path is not None and path.is_file() and formats.is_foreign(path.parent, read_json(path))


def prefer_qgemm(merge: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps transformers' ``merge_quantization_configs`` so that it follows a ``QGemmConfig``.

    Unchanged, it refuses one for another library's files, and ignores its settings for qgemm's own.
    """

    @functools.wraps(merge)
    def merge_configs(cls: type, quantization_config: Any, quantization_config_from_args: Any) -> Any:
        stored = quantization_config
        method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
        if isinstance(quantization_config_from_args, QGemmConfig):
            if method != QUANT_METHOD:
                return quantization_config_from_args.for_quantized()
            own = QGemmConfig.from_dict(stored) if isinstance(stored, dict) else stored
            return quantization_config_from_args.for_own(own)
        return merge(cls, quantization_config, quantization_config_from_args)

    return merge_configs


def admit_configs(supports: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wraps transformers' ``supports_quant_method``: it passes a config without a method, so that ``merge`` raises.

    It also accepts the object in the ``config`` of a quantized model, which may be passed to ``from_pretrained`` again.
    """

    @functools.wraps(supports)
    def supports_method(quantization_config: Any) -> bool:
        if isinstance(quantization_config, QuantizationConfigMixin):
            quantization_config = quantization_config.to_dict()
        names = ("quant_method", "load_in_8bit", "load_in_4bit")
        is_nameless = isinstance(quantization_config, dict) and not any(map(quantization_config.get, names))
        return is_nameless or supports(quantization_config)

    return supports_method


def _check_place(files: list[Path], named: str | None) -> None:
    """Raises ``CheckpointError`` for files outside of the folder ``named``, if that is one, or in several folders.

    transformers follows an index to any path, and the config there would be taken for this model's.
    """
    folders = [Path(os.path.abspath(file.parent)) for file in files]
    wanted = Path(os.path.abspath(named)) if named and os.path.isdir(named) else folders[0]
    for file, folder in zip(files, folders, strict=True):
        if folder != folders[0] or not folder.is_relative_to(wanted):
            raise CheckpointError(f"{file}, which the index names, isn't in the folder {wanted}")


class _Waiting(nn.Module):
    """A module in the place where ``layer`` will be."""

    def __init__(self, layer: QuantLayer) -> None:
        super().__init__()
        self.add_module(_WAITING, layer)

    def __getattr__(self, name: str) -> Any:
        """The layer's attributes that models use during initialization, such as ``weight``, marked as initialized."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(super().__getattr__(_WAITING), name)
        if isinstance(value, Tensor):
            value._is_hf_initialized = True  # type: ignore[attr-defined]
        return value


class _WaitingWeight:
    """Stands for the ``weight`` of ``module``, which is a parameter of another name meanwhile."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        weight = module._parameters.pop("weight")
        module.register_parameter(_WAITING, weight)
        weight._is_hf_initialized = True  # type: ignore[union-attr]
        vars(module)["weight"] = weight

    @property
    def device(self) -> torch.device:
        """The weight's future device."""
        return self._module.get_parameter(_WAITING).device

    def end(self, value: Tensor) -> None:
        """Sets the weight to ``value``."""
        waiting = self._module.get_parameter(_WAITING)
        del vars(self._module)["weight"]
        delattr(self._module, _WAITING)
        self._module.weight = nn.Parameter(value, waiting.requires_grad)


class ForeignLoad:
    """A model while its quantized layers are read from another library's checkpoint."""

    def __init__(self, model: PreTrainedModel, config: QGemmConfig, files: list[Path]) -> None:
        """``files``: those that transformers reads. Puts quantized layers without values into ``model``.

        Raises ``CheckpointError`` for whatever ``load_quantized`` refuses, and for a model of another class than the
        checkpoint's; ``ValueError`` if ``config`` has options that only apply to float models.
        """
        folder = files[0].parent
        _check_place(files, model.name_or_path)
        config_path = checkpoint_file(folder, CONFIG_FILE)
        values = read_json(config_path)
        scheme = config.one_scheme()
        config.check_for_quantized()
        if type(model).__name__ not in (values.get("architectures") or ()):
            raise CheckpointError(
                f"{config_path}: architectures names {values.get('architectures')}, and the model is a "
                f"{type(model).__name__}: load the class that is named, or convert the folder with qgemm convert"
            )
        with torch.device("cpu"):  # transformers builds the model with meta as the default device
            self._contents = read_contents(folder, values, config_path)
        fit_to_model(self._contents, model, config_path, scheme, may_have_fewer_layers=True)
        contents = self._contents
        # transformers recreates the buffers.
        self._layers = match(model, contents.manifest, contents.headers, config_path, has_buffers=False)
        check_unheld(contents)
        for note in contents.notes:
            warn_user(f"{folder}: {note}")
        for name, layer in self._layers.items():
            model.set_submodule(name, _Waiting(layer))
        self._restored = {name: _WaitingWeight(model.get_submodule(name)) for name in contents.restored}
        forget_ties(model, self._layers, contents.manifest.tied)
        if is_cut(model):
            if contents.restored:
                raise ValueError(
                    f"{contents.restored[0]} is restored to float, which works in one process alone: convert the files "
                    "with qgemm convert --to qgemm, and load that folder"
                )
            plan_layers(model, self._layers, waiting=True)  # each process reads whole layers, and keeps its part
        # All names have been checked already.
        model._keys_to_ignore_on_load_missing = {*(model._keys_to_ignore_on_load_missing or ()), rf"\.{_WAITING}(\.|$)"}
        model._keys_to_ignore_on_load_unexpected = {"."}

    def finish(self, model: PreTrainedModel) -> None:
        """Reads the layers' values, each on its device; raises ``CheckpointError`` as ``load_quantized`` does."""
        ours = (*self._layers, *self._restored)
        if offloaded := [name for name in ours if is_offloaded(model.get_submodule(name))]:
            raise ValueError(
                f"device_map offloads {offloaded[0]}, whose values come from another library's files: convert them "
                "with qgemm convert --to qgemm, and load that folder with this device_map"
            )
        owners: dict[str, tuple[QuantLayer, str]] = {}
        by_device: dict[torch.device, list[str]] = defaultdict(list)
        for name, layer in self._layers.items():
            for leaf, parameter in layer.named_parameters(recurse=False):
                owners[f"{name}.{leaf}"] = layer, leaf
                by_device[parameter.device].append(f"{name}.{leaf}")
        for name, weight in self._restored.items():
            by_device[weight.device].append(f"{name}.weight")
        for device, names in by_device.items():
            for target, value in read_converted(self._contents, device, only=set(names)):
                if (restored := self._restored.get(split_name(target.name)[0])) is not None:
                    restored.end(value)
                if target.name not in owners:
                    continue
                layer, leaf = owners[target.name]
                self._contents.check_value(target, layer, leaf, value)
                whole = layer.stored(leaf).detach()
                (whole if target.place is None else whole[target.place]).copy_(value)
        for alias, name in self._contents.manifest.tied.items():
            if split_name(name)[0] in self._restored:
                owner, leaf = split_name(alias)
                setattr(model.get_submodule(owner), leaf, model.get_parameter(name))
        for name, layer in self._layers.items():
            model.set_submodule(name, layer)
        model._keys_to_ignore_on_load_unexpected = type(model)._keys_to_ignore_on_load_unexpected
        model._keys_to_ignore_on_load_missing = type(model)._keys_to_ignore_on_load_missing
