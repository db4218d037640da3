"""The quantizer of Hugging Face transformers: ``from_pretrained`` and ``save_pretrained`` know qgemm.

- ``QGemmConfig(...)`` as ``quantization_config`` of ``from_pretrained`` quantizes a float checkpoint as it is read:
  each weight is quantized when it arrives, so memory peaks at the quantized model and one float weight. The result is
  that of ``quantize_model``, bit for bit.
- With a recipe or batches for calibration it is loaded in float, and quantized by ``quantize_model`` at the end.
- A folder that ``save_pretrained`` or ``qgemm.save_quantized`` wrote holds a ``Manifest``; quantized layers
  are put into the model before the int8 values are read into them.
- ``attach_quantizer`` is for a model that was quantized in place: ``save_pretrained`` then writes that manifest.

Importing this module registers the method ``"qgemm"`` with transformers, once. Versions 5.17 to 5.23 are served: what
they call differently (plans for tensor parallelism, conversions of names) is left to the base class.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from qgemm.arguments import as_scales, shown
from qgemm.calibration.collect import NO_BATCH, check_batches
from qgemm.calibration.method import Method
from qgemm.calibration.recipe import Recipe
from qgemm.calibration.result import Calibration
from qgemm.checkpoint.checksum import checksum, format_checksum
from qgemm.checkpoint.disk import check_regular
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import CONFIG_FILE, WEIGHTS_KEY
from qgemm.checkpoint.manifest import QUANT_METHOD, Manifest
from qgemm.checkpoint.matching import quantized_layers
from qgemm.checkpoint.pretrained import parameters_on_meta
from qgemm.checkpoint.refusal import FUSIONS_KEY, add_refusal, drop_refusal
from qgemm.checkpoint.safetensors_file import CHECKSUMS, SAVE, StoredTensor, read_values
from qgemm.checkpoint.stored_report import REPORT
from qgemm.checkpoint.tensors import find_ties, get_tensor, set_tensor, split_name, stored_tensors, transient_names
from qgemm.integrations.tensor_parallel import is_cut, plan_layers
from qgemm.integrations.transformers_checkpoint import (
    LoadedFiles,
    check_loaded,
    check_stored,
    manifest_for,
    name_in,
    open_files,
)
from qgemm.model.report import LayerRecord, QuantReport
from qgemm.model.selection import Patterns, SchemeChoice, as_patterns, resolve_schemes, shown_pattern
from qgemm.model.survey import Layer
from qgemm.model.swap import ExpertsSwap, swap
from qgemm.nn import LinearLayer, QuantExperts, QuantLayer, linear_class
from qgemm.nn.attention import close_attention, opened_attention
from qgemm.nn.float_experts import describe_experts
from qgemm.quantize import SwapPlan, check_on_batches, make_report, plan_swaps, quantize_model, warn_of_coverage

# Registering a name twice raises, and a notebook's autoreload runs this module again.
AUTO_QUANTIZATION_CONFIG_MAPPING.pop(QUANT_METHOD, None)
AUTO_QUANTIZER_MAPPING.pop(QUANT_METHOD, None)


@register_quantization_config(QUANT_METHOD)
class QGemmConfig(QuantizationConfigMixin):
    """``quantization_config`` for ``from_pretrained``: how to quantize a float model as it is loaded.

    All arguments are those of ``qgemm.quantize_model``. With ``recipe``, or batches as ``calibration``, the model is
    loaded in float, where the device map puts it, and then quantized on these batches, which must be there too. Else
    each weight is quantized as it is read. Once a model is quantized, its ``config.quantization_config`` has
    ``manifest`` instead, which says what was done to every layer. Batches are stored nowhere.
    """

    def __init__(
        self,
        scheme: SchemeChoice = "int8",
        *,
        skip: Patterns = None,
        include: Patterns = None,
        input_scales: Mapping[str, float | Tensor] | None = None,
        recipe: Recipe | Sequence[Method] | None = None,
        calibration: Calibration | Iterable[Any] | None = None,
    ) -> None:
        """Raises ``ValueError`` for an unknown scheme, or one that can't be applied as a model loads.

        Raises ``TypeError`` and ``ValueError`` as ``quantize_model`` for a recipe or a calibration that is none.
        """
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]
        self.schemes = resolve_schemes(scheme)
        self.recipe = recipe if recipe is None or isinstance(recipe, Recipe) else Recipe(recipe)
        if calibration is not None and not isinstance(calibration, Calibration):
            check_batches(calibration)
            calibration = list(calibration)
            if not calibration:
                raise ValueError(NO_BATCH)
        self.calibration = calibration
        if input_scales is not None and (calibration is not None or recipe is not None):
            raise ValueError("input_scales say what the scales are, and so do a recipe and calibration: pass one")
        if self.recipe is not None and isinstance(calibration, Calibration):
            raise ValueError("calibration is what was seen before, but a recipe runs on the data itself: pass batches")
        for each in self.schemes.values():
            if each is not None and linear_class(each).folds_bias and not self.loads_float:
                # A bias may come before its weight, or after.
                raise ValueError(
                    f"scheme {each.name!r} changes biases, which can't be done as weights are read: pass batches as "
                    "calibration, for which the model is loaded in float first"
                )
        self.skip, self.include = as_patterns("skip", skip), as_patterns("include", include)
        self.input_scales = as_scales(input_scales)
        self.manifest: Manifest | None = None

    @property
    def loads_float(self) -> bool:
        """Whether the model is loaded in float, and quantized once it is there."""
        return self.recipe is not None or isinstance(self.calibration, list)

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> QGemmConfig:
        """The config of a model that is quantized."""
        config = cls()
        config.manifest = manifest
        return config

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """What ``to_dict`` gave, or ``config.json`` of a quantized model holds; raises ``CheckpointError``."""
        if not isinstance(config_dict, Mapping):
            raise TypeError(f"config_dict is {shown(config_dict)}; it must be what to_dict gave")
        if "format_version" in config_dict or "layers" in config_dict:
            config = cls.from_manifest(Manifest.from_config({"quantization_config": config_dict}, Path(CONFIG_FILE)))
        else:
            values = {key: value for key, value in config_dict.items() if key != "quant_method"}
            try:
                if isinstance(values.get("scheme"), list):
                    values["scheme"] = dict(values["scheme"])
                if values.get("recipe") is not None:
                    values["recipe"] = Recipe.from_dict(values["recipe"])
                config = cls(**values)
            except (ValueError, TypeError, AttributeError) as error:
                raise CheckpointError(f"quantization_config is none of qgemm's: {error}") from error
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values: those of ``manifest`` once there is one; before, without ``calibration``."""
        if self.manifest is not None:
            return self.manifest.to_dict()
        scales = None if self.input_scales is None else {k: float(v) for k, v in self.input_scales.items()}
        # Pairs, since their order counts, which JSON promises of lists alone.
        schemes = [[shown_pattern(pattern), each and each.name] for pattern, each in self.schemes.items()]
        return {
            "quant_method": QUANT_METHOD,
            "scheme": schemes[0][1] if [pattern for pattern, _ in schemes] == ["*"] and schemes[0][1] else schemes,
            "skip": [shown_pattern(pattern) for pattern in self.skip],
            "include": [shown_pattern(pattern) for pattern in self.include],
            "input_scales": scales,
            "recipe": None if self.recipe is None else self.recipe.to_dict(),
        }

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """``dict(config)`` is ``config.to_dict()``."""
        return iter(self.to_dict().items())

    def to_json_string(self, use_diff: bool = True) -> str:
        """``to_dict`` as text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


class _QuantizeOnLoad(ConversionOps):
    """Puts a quantized layer in a float one's place as soon as its weights have been read."""

    def __init__(self, quantizer: QGemmQuantizer) -> None:
        self.quantizer = quantizer

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        model: nn.Module | None = None,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Quantizes the weights among ``input_dict``, tensors by full names, and hands on the rest."""
        assert model is not None
        rest = {}
        for name, value in input_dict.items():
            if name in self.quantizer.waiting:
                tensor = value[0] if isinstance(value, list) else value
                self.quantizer.quantize_weight(model, name, tensor)
                if missing_keys is not None:
                    missing_keys.discard(name)
            else:
                rest[name] = value
        return rest


@register_quantizer(QUANT_METHOD)
class QGemmQuantizer(HfQuantizer):
    """What ``from_pretrained`` and ``save_pretrained`` ask about a model with quantized layers."""

    serialized_names = {"weight": ["weight", "weight_scale"]}  # noqa: RUF012 (as the base class declares it)
    quantization_config: QGemmConfig

    def __init__(self, quantization_config: QGemmConfig, **kwargs: Any) -> None:
        """``pre_quantized``, among ``kwargs``: whether the checkpoint is quantized already."""
        super().__init__(quantization_config, **kwargs)
        # While a float checkpoint is read: its layers by the names of the tensors that have to come, experts of which
        # some have, and what became of layers that are complete.
        self.waiting: dict[str, Layer] = {}
        self._plan: SwapPlan | None = None
        self._in_attention: list[Layer] = []
        self._experts: dict[str, ExpertsSwap] = {}
        self._records: dict[str, LayerRecord] = {}
        self._errors: list[str] = []
        # While a quantized one is read: its files; what they hold and their checksums, by the model's names; theirs, by
        # the model's; its config.
        self._files: LoadedFiles | None = None
        self._stored: dict[str, StoredTensor] = {}
        self._names_in_files: dict[str, str] = {}
        self._checksums: dict[str, object] = {}
        self._config_path = Path(CONFIG_FILE)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Whether ``save_pretrained`` may be called."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can train: gradients go through the layers to what lies before them."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate`` may compile the model by itself."""
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raises ``ValueError`` if weights are to be quantized and then stay on disk, which transformers mixes up."""
        if not self.pre_quantized and isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                'device_map puts modules on "disk", where weights can\'t be quantized as they load: quantize and save '
                "the model first, on a machine where it fits, and load that folder with this device_map"
            )

    def update_tp_plan(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Lets transformers go on with a checkpoint that it refuses without qgemm; 5.17 shows the config here."""
        _drop_refusal(config)
        return config

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """The same; 5.18 and later show the config here."""
        _drop_refusal(config)
        return config

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether this weight of a float checkpoint is to be quantized."""
        return param_name in self.waiting

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """Bytes per value, by which ``device_map="auto"`` counts: those of a weight once it has arrived."""
        if param_name not in self.waiting:
            return param.element_size()
        assert self._plan is not None
        return self._plan.scheme_of(self.waiting[param_name]).weight.format.bits / 8

    def get_quantize_ops(self) -> ConversionOps:
        """What is done with a weight for which ``param_needs_quantization``."""
        return _QuantizeOnLoad(self)

    def quantize_weight(self, model: nn.Module, name: str, value: Tensor) -> None:
        """Quantizes the weight called ``name``, which is ``value``, and its layer with it once that has all of its."""
        assert self._plan is not None
        layer = self.waiting.pop(name)
        if layer.is_experts:
            self._take_of_experts(model, layer, name, value)
            return
        linear = model.get_submodule(layer.name)
        wanted = list(linear.weight.shape)  # type: ignore[union-attr,arg-type]
        if list(value.shape) != wanted:
            self._errors.append(f"{name} has shape {list(value.shape)} in the checkpoint; the model's is {wanted}")
            return
        linear.weight = nn.Parameter(value, requires_grad=False)
        try:
            scale = self._plan.input_scales.get(layer.name)
            self._records[layer.name] = swap(model, layer, self._plan.scheme_of(layer), scale)
        except ValueError as error:
            self._errors.append(f"{layer.name}: {error}")
            return
        _mark_as_loaded(model.get_submodule(layer.name))

    def _take_of_experts(self, model: nn.Module, layer: Layer, name: str, value: Tensor) -> None:
        assert self._plan is not None
        if layer.name not in self._experts:
            self._experts[layer.name] = ExpertsSwap(model, layer, self._plan.scheme_of(layer))
        experts = self._experts[layer.name]
        _, leaf = split_name(name)
        if value.shape != experts.waiting[leaf]:
            wanted = list(experts.waiting[leaf])
            self._errors.append(f"{name} has shape {list(value.shape)} in the checkpoint; the model's is {wanted}")
            return
        try:
            experts.take(leaf, value)
        except ValueError as error:
            self._errors.append(f"{layer.name}: {error}")
            return
        if not experts.waiting:
            self._records[layer.name] = self._experts.pop(layer.name).finish()
            _mark_as_loaded(model.get_submodule(layer.name))

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        files = [Path(file) for file in checkpoint_files or ()]
        for file in files:
            check_regular(file)  # transformers opens whatever is there
        if self.pre_quantized:
            self._prepare_quantized(model, files)
            return
        if is_cut(model):
            raise ValueError(
                "distributed_config cuts the model among processes, each of which would find other scales for its part "
                "of a weight: quantize and save the model first, and load that folder with this distributed_config"
            )
        config = self.quantization_config
        seen = config.calibration if isinstance(config.calibration, Calibration) else None
        with _as_it_will_be(model), opened_attention(model):
            if config.loads_float:
                batches = config.calibration is not None
                check_on_batches(model, config.schemes, config.skip, config.include, config.recipe, batches)
                return
            self._plan = plan_swaps(model, config.schemes, config.skip, config.include, config.input_scales, seen)
        # Files have the packed weights of an nn.MultiheadAttention, so it is opened once those are there.
        modules = dict(model.named_modules(remove_duplicate=False))
        self._in_attention = [
            layer
            for layer in self._plan.chosen
            if isinstance(modules[split_name(layer.name)[0]], nn.MultiheadAttention)
        ]
        self.waiting = {
            f"{name}.{leaf}": layer
            for layer in self._plan.chosen
            if layer not in self._in_attention
            for name in layer.names
            for leaf in (_tensors_of_experts(model, layer) if layer.is_experts else ("weight",))
        }

    def _prepare_quantized(self, model: PreTrainedModel, files: list[Path]) -> None:
        manifest = self.quantization_config.manifest
        if manifest is None:
            raise CheckpointError(
                "quantization_config in the model's config doesn't say which layers are quantized: the checkpoint is "
                "not one of qgemm. For a float model, pass QGemmConfig to from_pretrained instead"
            )
        self._files = open_files(files, manifest)
        self._config_path, in_files, checksums = self._files.config_path, self._files.stored, self._files.checksums
        same_class = type(model).__name__ in (model.config.architectures or ())
        if not same_class:
            manifest = self.quantization_config.manifest = manifest_for(model, manifest, self._config_path)
            self._files.report = None  # it is of the whole model
        with opened_attention(model, manifest.layers):
            layers = quantized_layers(model, manifest.layers, self._config_path)
            if is_cut(model):
                plan_layers(model, layers)
            for name, layer in layers.items():
                parent, leaf = split_name(name)
                setattr(model.get_submodule(parent), leaf, layer)
        self._names_in_files = {name if same_class else name_in(model, name) or name: name for name in in_files}
        self._stored = {name: in_files[name_in_file] for name, name_in_file in self._names_in_files.items()}
        names = self._names_in_files
        self._checksums = {name: checksums[in_file] for name, in_file in names.items() if in_file in checksums}
        if self._stored:
            check_stored(self._stored, manifest, layers, self._config_path)
        # Float buffers that state_dict leaves out are stored too; they are put into place afterwards.
        known = {re.escape(self._names_in_files[name]) for name in transient_names(model) if name in self._stored}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *known}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        config = self.quantization_config
        if self.pre_quantized:
            self._finish_quantized(model)
        elif config.loads_float:
            # Or the batches would be copied with it.
            del model.config.quantization_config
            settings: dict[str, Any] = {"skip": config.skip, "include": config.include, "recipe": config.recipe}
            quantize_model(model, config.schemes, calibration=config.calibration, **settings)
        else:
            self._finish_quantizing(model)
        for module in model.modules():
            if isinstance(module, QuantLayer):
                module.requires_grad_(False)  # transformers makes every float parameter trainable, scales too
        self.pre_quantized = True
        manifest = self.quantization_config.manifest
        _describe(model, None if manifest is None else manifest.save)
        return model

    def _finish_quantizing(self, model: PreTrainedModel) -> None:
        assert self._plan is not None
        self.waiting |= {f"{layer.name}.weight": layer for layer in self._in_attention}
        with opened_attention(model):
            for name in list(self.waiting):
                # One checkpoint tensor that became several parameters is given to the first one's operation only.
                if name in self.waiting and getattr(weight := model.get_parameter(name), "_is_hf_initialized", False):
                    self.quantize_weight(model, name, weight.detach())
        missing = [name for name, layer in self.waiting.items() if layer.name not in self._records]
        errors = [*self._errors, *(f"{name} is not in the checkpoint" for name in missing)]
        if errors:
            shown = "; ".join(errors[:5]) + (f"; and {len(errors) - 5} more" if len(errors) > 5 else "")
            raise CheckpointError(
                f"{model.name_or_path or type(model).__name__} can't be quantized as it loads: {shown}. "
                "Mend the checkpoint, or pass these layers in QGemmConfig(skip=[...])"
            )
        model._qgemm_report = make_report(self._plan, self._records)  # type: ignore[assignment]
        warn_of_coverage(self._plan.layers, stacklevel=2)
        self.waiting, self._plan, self._records = {}, None, {}

    def _finish_quantized(self, model: PreTrainedModel) -> None:
        manifest = self.quantization_config.manifest
        assert manifest is not None
        assert self._files is not None
        for name in manifest.layers:
            layer = model.get_submodule(name)
            assert isinstance(layer, QuantLayer)
            check_loaded(name, layer, self._checksums, self._config_path)
        for alias, name in manifest.tied.items():
            set_tensor(model, alias, get_tensor(model, name))  # also ties that the model's class doesn't know of
        transient = {self._names_in_files[name]: name for name in transient_names(model) if name in self._stored}
        stored = {name_in_file: self._stored[name] for name_in_file, name in transient.items()}
        for name_in_file, value in read_values(stored, torch.device("cpu")):
            name = transient[name_in_file]
            set_tensor(model, name, value.to(get_tensor(model, name).device))
        if self._files.report is not None:
            model._qgemm_report = self._files.report  # type: ignore[assignment]
        self._files.finish(model)
        self._files, self._stored, self._names_in_files, self._checksums = None, {}, {}, {}

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """What ``save_pretrained`` is to store: the tensors that ``save_quantized`` does. The config describes them."""
        is_adapter = getattr(model, "_hf_peft_config_loaded", False)  # of which alone the files are; no config is
        metadata = {} if is_adapter else {SAVE: secrets.token_hex(8)}
        _describe(model, metadata.get(SAVE))
        report: QuantReport | None = getattr(model, "_qgemm_report", None)
        if report is not None and not is_adapter:
            metadata[REPORT] = json.dumps(report.to_dict())
        tensors = stored_tensors(model)
        if any(tensor.device.type == "meta" for tensor in tensors.values()):
            return None, metadata  # offloaded: transformers fetches them one at a time
        ties = find_ties(tensors)
        stored = {name: tensor.detach() for name, tensor in tensors.items() if name not in ties}
        # Not of parts, which transformers has yet to put together.
        if not is_adapter and all(type(tensor) is Tensor for tensor in stored.values()):
            # Every file gets all of them, since nothing here knows which tensor goes where.
            sums = {name: format_checksum(checksum(tensor.contiguous())) for name, tensor in stored.items()}
            metadata[CHECKSUMS] = json.dumps(sums)
        return stored, metadata

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        if isinstance(dtype, str):  # the config's own, once the model was saved
            return self._dequantize(model, getattr(torch, dtype))
        _drop_refusal(model.config)
        with parameters_on_meta():
            plain = type(model)(copy.deepcopy(model.config))
        for name, module in list(model.named_modules(remove_duplicate=False)):
            parent, leaf = split_name(name)
            if isinstance(module, LinearLayer):
                setattr(model.get_submodule(parent), leaf, module.dequantize(dtype))
            elif isinstance(module, QuantExperts):
                floats = _float_experts(plain.get_submodule(name), module, dtype)
                setattr(model.get_submodule(parent), leaf, floats)
        close_attention(model)
        return model


def _tensors_of_experts(model: nn.Module, layer: Layer) -> Iterable[str]:
    return describe_experts(model.get_submodule(layer.name)).parameters.values()


def _float_experts(module: nn.Module, quantized: QuantExperts, dtype: torch.dtype | None) -> nn.Module:
    """``module``, float experts on meta, with the values of ``quantized``."""
    source = describe_experts(module)
    for name, value in quantized.dequantize(dtype).items():
        setattr(module, source.parameters[name], nn.Parameter(source.restore(name, value)))
    if hasattr(quantized, "config"):
        module.config = quantized.config
    return module.train(quantized.training)


def attach_quantizer(model: nn.Module, save: str | None = None) -> None:
    """Makes ``save_pretrained`` of a model with quantized layers write what ``from_pretrained`` can load.

    ``model`` is a transformers model, or holds some. It gets a config of its own, whose ``quantization_config``
    describes it. ``save``: the id of the save that it was loaded from.
    """
    for pretrained in _outermost(model):
        _copy_config(pretrained)
        _describe(pretrained, save)
        quantizer = QGemmQuantizer(pretrained.config.quantization_config, pre_quantized=True)
        pretrained.hf_quantizer = quantizer  # type: ignore[assignment]
        pretrained.quantization_method = QUANT_METHOD  # type: ignore[assignment]
        # Not is_quantized: nothing that saves or loads looks at it, and with it half() and float() refuse to run.
        for module in pretrained.modules():
            if isinstance(module, PreTrainedModel):
                module.config._is_quantized = True  # then attention doesn't look for an nn.Linear to learn the dtype


def _outermost(module: nn.Module) -> Iterator[PreTrainedModel]:
    if isinstance(module, PreTrainedModel):
        if any(isinstance(part, QuantLayer) for part in module.modules()):
            yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _copy_config(model: PreTrainedModel) -> None:
    # As from_pretrained does: a float model may yet be built from the config that this one was built from.
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for key, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                vars(module)[key] = copies.get(id(value), value)


def _describe(model: PreTrainedModel, save: str | None) -> None:
    """Says in the config of ``model`` what is quantized in it now, and in which save its values are."""
    layers = {n: m.scheme for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, QuantLayer)}
    tensors = stored_tensors(model)
    ties = find_ties(tensors)
    ties.update(  # of tensors that are offloaded, which have no address
        (alias, name)
        for alias, name in model.all_tied_weights_keys.items()
        if alias in tensors and name in tensors and tensors[alias].device.type == "meta"
    )
    config = QGemmConfig.from_manifest(Manifest(layers, ties, save))
    model.config.quantization_config = config
    model.config.fusion_config = add_refusal(getattr(model.config, FUSIONS_KEY, None))
    vars(model.config).pop(WEIGHTS_KEY, None)  # of the folder that it came from
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        quantizer.quantization_config = config
    # Stored under the model's own names. Those of the original checkpoint may stand for parts of a fused weight, and
    # nothing would take an int8 weight apart together with its scales.
    model._weight_conversions = []  # type: ignore[assignment]
    # All of them: load_quantized builds a model without values, so that those that building makes aren't there.
    model._keys_to_ignore_on_save = None  # type: ignore[assignment]


def _drop_refusal(config: PreTrainedConfig) -> None:
    if (fusions := drop_refusal(vars(config).pop(FUSIONS_KEY, None))) is not None:
        config.fusion_config = fusions


@contextmanager
def _as_it_will_be(model: PreTrainedModel) -> Iterator[None]:
    """Parameters on meta as they will be once loaded, for a look at the model: tied, and float32 where they stay so."""
    before = {name: model.get_parameter_or_buffer(name) for name in model.state_dict()}
    plan = model._get_dtype_plan(model.dtype)
    for name, parameter in before.items():
        if isinstance(parameter, nn.Parameter) and any(re.search(rf"(^|\.){kept}(\.|$)", name) for kept in plan):
            set_tensor(model, name, nn.Parameter(parameter.to(torch.float32), parameter.requires_grad))
    for alias, name in model.all_tied_weights_keys.items():
        if alias in before and name in before:
            set_tensor(model, alias, get_tensor(model, name))
    try:
        yield
    finally:
        for name, tensor in before.items():
            set_tensor(model, name, tensor)


def _mark_as_loaded(layer: nn.Module) -> None:
    # Else transformers would initialise them. The bias may still come, and is marked then.
    for parameter in layer.parameters(recurse=False):
        if parameter.device.type != "meta":
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
