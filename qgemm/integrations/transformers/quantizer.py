"""``QGemmQuantizer``: transformers' interface for loading and saving a model with quantized layers."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer

from qgemm.checkpoint.disk import check_regular, reading
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.manifest import QUANT_METHOD
from qgemm.checkpoint.pretrained import built_again
from qgemm.checkpoint.requantize import convert_layers
from qgemm.checkpoint.tensors import split_name
from qgemm.fusion import fuse, unfuse
from qgemm.integrations.transformers.config import QGemmConfig
from qgemm.integrations.transformers.foreign import ForeignLoad, is_foreign
from qgemm.integrations.transformers.quantizing import QuantizeOnLoad, start_quantizing
from qgemm.integrations.transformers.reading import QuantizedLoad
from qgemm.integrations.transformers.renaming import check_files
from qgemm.integrations.transformers.saving import admit, describe, tensors_and_metadata
from qgemm.integrations.transformers.tensor_parallel import cut_layers, go_by, is_cut
from qgemm.model.offloading import carry_hooks, is_offloaded
from qgemm.model.report import drop_reports
from qgemm.nn import LinearLayer, QuantExperts, QuantLayer
from qgemm.nn.attention import close_attention
from qgemm.nn.carry_over import share_hooks
from qgemm.nn.float_experts import describe_experts
from qgemm.nn.quant_layer import float_dtype, has_quant_layers, quant_layers
from qgemm.quantize import quantize


class QGemmQuantizer(HfQuantizer):
    """What ``from_pretrained`` and ``save_pretrained`` call for a model with quantized layers."""

    serialized_names = {"weight": ["weight", "weight_scale"]}  # noqa: RUF012 (as the base class declares it)
    quantization_config: QGemmConfig
    # The model that was loaded, and the parameters that were trainable then.
    _loaded: tuple[weakref.ref[nn.Module], set[str]] | None = None
    # The ``state_dict`` that ``save_pretrained`` was called with; transformers would forget it.
    given_state: Mapping[str, Tensor] | None = None

    def __init__(self, quantization_config: QGemmConfig, **kwargs: Any) -> None:
        """``pre_quantized``, in ``kwargs``: whether the checkpoint is already quantized."""
        super().__init__(quantization_config, **kwargs)
        # Set while a checkpoint is read: one with float weights, or a quantized one.
        self._quantizing: QuantizeOnLoad | None = None
        self._reading: QuantizedLoad | ForeignLoad | None = None
        self._distributed_config: Any = None

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Whether ``save_pretrained`` may be called."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained: gradients pass through the layers to what precedes them."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether ``Trainer`` accepts the model without an adapter: only if the user chose what to train, or nothing.

        As it is loaded, all but the quantized layers is trainable: training that would leave out most weights.
        """
        model = None if self._loaded is None else self._loaded[0]()
        return model is not None and _trainable(model) != self._loaded[1]  # type: ignore[index]

    def __getstate__(self) -> dict[str, Any]:
        """Without the model: a copy of the quantizer belongs to a copy of the model."""
        return {name: value for name, value in vars(self).items() if name != "_loaded"}

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate`` may compile the model by itself."""
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raises ``ValueError`` if weights would be quantized and then stay on disk, which transformers mixes up."""
        if not self.pre_quantized and isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                'device_map puts modules on "disk", where weights can\'t be quantized while they load: quantize and '
                "save the model first, on a machine where it fits, and load that folder with this device_map"
            )

    def update_tp_plan(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Makes transformers accept a checkpoint that it refuses without qgemm; 5.17 passes the config here."""
        admit(config)
        self._distributed_config = getattr(config, "distributed_config", None)
        return config

    update_attn_implementation = update_tp_plan  # 5.18 and later pass it here

    def update_weight_conversions(self, weight_conversions: list[Any], *args: Any) -> list[Any]:
        """The conversions of names: files have the names of the class that was saved, not of original checkpoints."""
        if isinstance(self._reading, QuantizedLoad) and self._reading.renaming is not None:
            return self._reading.renaming.conversions()
        conversions: list[Any] = super().update_weight_conversions(weight_conversions, *args)
        return conversions

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether this weight of a float checkpoint will be quantized."""
        return self._quantizing is not None and param_name in self._quantizing.waiting

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """Bytes per value, for ``device_map="auto"``: for a weight, those after its quantization."""
        if self._quantizing is None or param_name not in self._quantizing.waiting:
            return param.element_size()
        return self._quantizing.element_size(param_name)

    def get_quantize_ops(self) -> ConversionOps:
        """The operation for a weight for which ``param_needs_quantization``."""
        assert self._quantizing is not None
        return self._quantizing

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        files = [Path(file) for file in checkpoint_files or ()]
        for file in files:
            with reading(file):
                check_regular(file)  # transformers would open anything
        if self._distributed_config is not None:
            go_by(model, self._distributed_config)
        if self.quantization_config.foreign or (not self.pre_quantized and is_foreign(files)):
            self._reading = ForeignLoad(model, self.quantization_config, files)
        elif self.pre_quantized:
            if is_foreign(files):
                raise CheckpointError(
                    f"{files[0].parent} is quantized by another library, and the quantization_config in config= is "
                    "qgemm's: take that out of it (del config.quantization_config), and pass "
                    "quantization_config=qgemm.QGemmConfig() to from_pretrained"
                )
            self._reading = QuantizedLoad(model, self.quantization_config, files)
        else:
            check_files(model, files)
            self._quantizing = start_quantizing(model, self.quantization_config)
        _treat_floats_alike(model, is_split=self._distributed_config is not None)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        config = self.quantization_config
        if self._reading is not None:
            self._reading.finish(model)
        elif self._quantizing is not None:
            self._quantizing.finish(model)
        else:
            # Otherwise the batches would be copied with it.
            del model.config.quantization_config
            quantize(model, config.quantization, calibration=config.calibration)
        is_converted = isinstance(self._reading, QuantizedLoad) and _convert(model, config)
        self._reading = self._quantizing = self._distributed_config = None
        cut_layers(model)
        for module in model.modules():
            if isinstance(module, QuantLayer):
                module.requires_grad_(False)  # transformers makes every float parameter trainable, including scales
                module.settle()
        self._loaded = weakref.ref(model), _trainable(model)
        self.pre_quantized = True
        manifest = self.quantization_config.manifest
        if not has_quant_layers(model):
            self.remove_quantization_config(model)  # for a part that stayed in float
            model._weight_conversions = []  # type: ignore[assignment]
            return model
        describe(model, None if manifest is None or is_converted else manifest.save)
        return fuse(model) if config.fuse else model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """What ``save_pretrained`` stores: the same tensors as ``save_quantized``. The config describes them."""
        return tensors_and_metadata(model, self.given_state)

    def dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        """Replaces quantized layers by float ones, in ``dtype``: by default that of the model's float part.

        transformers would use the config's dtype, which ``model.float()`` and the like don't update.
        """
        dequantized: PreTrainedModel = super().dequantize(model, float_dtype(model) if dtype is None else dtype)
        for part in dequantized.modules():
            if isinstance(part, PreTrainedModel):
                # One that was quantized separately has a config of its own.
                self.remove_quantization_config(part)
                admit(part.config)
        return dequantized

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        # A saved config has it as text.
        wanted: torch.dtype | None = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        admit(model.config)
        layers = quant_layers(model)
        if any(layer.shard is not None for layer in layers.values()):
            raise ValueError(
                "this model is split among processes: save it, load it in one process, and dequantize that"
            )
        if offloaded := [name for name, layer in layers.items() if is_offloaded(layer)]:
            raise ValueError(
                f"{offloaded[0]} is offloaded, and only layers in memory can be dequantized: call "
                "accelerate.hooks.remove_hook_from_submodules(model) first, which loads what is offloaded"
            )
        unfuse(model)  # fused layers would keep the quantized ones
        of_model = dict(built_again(model).named_modules(remove_duplicate=False))
        made: dict[nn.Module, nn.Module] = {}
        for name, layer in layers.items():
            if layer not in made:
                if isinstance(layer, LinearLayer):
                    made[layer] = layer.dequantize(wanted)
                else:
                    assert isinstance(layer, QuantExperts)
                    made[layer] = _float_experts(of_model[name], layer, wanted)
                share_hooks(layer, made[layer])
                carry_hooks(layer, made[layer])
            model.set_submodule(name, made[layer])
        close_attention(model)
        drop_reports(model)
        return model


def _treat_floats_alike(model: PreTrainedModel, is_split: bool) -> None:
    """Makes transformers read float tensors as those of a float model, as its later versions do.

    If there is a quantizer, versions up to 5.22 put tensors of any shape into the model, and those up to 5.20 keep the
    dtype of tensors with another name in the files. A wrong shape becomes what it is in a float model: an error, or a
    new tensor.
    ``is_split``: among processes, so that shapes differ.
    """
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in named}

    def mark_tied_weights_as_initialized(loading_info: Any) -> None:  # the first that is called with what was loaded
        del model.mark_tied_weights_as_initialized
        kept = model._get_dtype_plan(model.config.dtype)  # type: ignore[arg-type]
        for name, (shape, dtype) in wanted.items():
            owner, leaf = split_name(name)
            module = model.get_submodule(owner)
            fixed = module.fixed_names if isinstance(module, QuantLayer) else ()
            value = module._parameters.get(leaf, module._buffers.get(leaf))
            if value is None or leaf in fixed:
                continue
            if value.shape != shape and not is_split and not isinstance(module, QuantLayer):
                loading_info.mismatched_keys.add((name, value.shape, shape))
                empty = value.new_empty(shape, device="meta")
                setattr(module, leaf, nn.Parameter(empty) if isinstance(value, nn.Parameter) else empty)
            elif value.is_floating_point() and value.device.type != "meta":
                value.data = value.data.to(next((kept[part] for part in kept if re.search(part, name)), dtype))
        model.mark_tied_weights_as_initialized(loading_info)

    model.mark_tied_weights_as_initialized = mark_tied_weights_as_initialized  # type: ignore[method-assign]


def _trainable(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _convert(model: PreTrainedModel, config: QGemmConfig) -> bool:
    """Converts layers to the scheme that ``config`` asks for, if they differ; returns whether any did."""
    scheme = config.one_scheme()
    if scheme is None or not convert_layers(model, scheme, is_cut(model)):
        return False
    drop_reports(model)  # they describe the former schemes
    return True


def attach_quantizer(model: nn.Module, save: str | None = None) -> None:
    """Makes ``save_pretrained`` of a model with quantized layers write what ``from_pretrained`` can load.

    ``model``: a transformers model, or one that contains some. It gets a copy of its config, whose
    ``quantization_config`` describes it. ``save``: the id of the save from which it was loaded.
    """
    for pretrained in _outermost(model):
        _copy_config(pretrained)
        describe(pretrained, save)
        quantizer = QGemmQuantizer(pretrained.config.quantization_config, pre_quantized=True)
        pretrained.hf_quantizer = quantizer  # type: ignore[assignment]
        pretrained.quantization_method = QUANT_METHOD  # type: ignore[assignment]
        # Not is_quantized: no code for saving or loading reads it, and with it half() and float() would refuse to run.
        for module in pretrained.modules():
            if isinstance(module, PreTrainedModel):
                module.config._is_quantized = True  # then attention doesn't search for an nn.Linear to find the dtype


def _outermost(module: nn.Module) -> Iterator[PreTrainedModel]:
    if isinstance(module, PreTrainedModel):
        if has_quant_layers(module):
            yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _copy_config(model: PreTrainedModel) -> None:
    # As from_pretrained does, because another float model may be built from the same config.
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for key, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                vars(module)[key] = copies.get(id(value), value)


def _float_experts(module: nn.Module, quantized: QuantExperts, dtype: torch.dtype | None) -> nn.Module:
    """``module``, float experts on meta, with values restored from ``quantized``."""
    source = describe_experts(module)
    for name, value in quantized.dequantize(dtype).items():
        setattr(module, source.parameters[name], nn.Parameter(source.restore(name, value)))
    if hasattr(quantized, "config"):
        module.config = quantized.config
    return module.train(quantized.training)
