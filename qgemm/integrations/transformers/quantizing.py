"""``QuantizeOnLoad``: quantizes the weights of a float checkpoint one at a time, as transformers reads them.

So memory peaks at the quantized model and one float weight. Errors that can be found before weights are read are raised
then; errors in weights are raised at the end, for all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps

from qgemm.calibration.collect import find_scales
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.tensors import get_tensor, set_tensor, split_name
from qgemm.integrations.transformers.config import QGemmConfig
from qgemm.integrations.transformers.tensor_parallel import is_cut, plan_layers
from qgemm.model.plan import SwapPlan, plan_swaps
from qgemm.model.report import LayerRecord, give_report
from qgemm.model.survey import Layer, is_kept_in_fp32
from qgemm.model.swap import ExpertsSwap, swap
from qgemm.nn import QuantExperts, QuantLayer
from qgemm.nn.attention import opened_attention
from qgemm.nn.float_experts import describe_experts
from qgemm.nn.kinds import meta_linear
from qgemm.nn.linear_layer import linear_weight


def start_quantizing(model: PreTrainedModel, config: QGemmConfig) -> QuantizeOnLoad | None:
    """Plans the quantization of the weights of ``model``, which has no values yet; None if it is first loaded in float.

    Raises ``ValueError`` as ``quantize_model`` does. If the model is split among processes, each process reads and
    quantizes whole weights, and keeps its part of them.
    """
    if is_cut(model) and config.loads_float:
        raise ValueError(
            "distributed_config splits the model among processes, and calibration needs it whole: quantize and save "
            "the model first, and load that folder with this distributed_config"
        )
    with _as_it_will_be(model), opened_attention(model):
        wanted = config.quantization
        plan = plan_swaps(model, wanted.schemes, wanted.skip, wanted.include)
        wanted.check_schemes(plan.schemes_in_use, config.calibration)
        if config.loads_float:
            return None
        plan = find_scales(model, plan, wanted, config.calibration)
        if is_cut(model):
            plan_layers(model, dict(_on_meta(model, plan)), waiting=True)
    return QuantizeOnLoad(model, plan)


class QuantizeOnLoad(ConversionOps):
    """Replaces a float layer by a quantized one as soon as its weights have been read.

    ``waiting``: the layers, by the names of tensors that are still to come.
    """

    def __init__(self, model: PreTrainedModel, plan: SwapPlan) -> None:
        """``plan``: what will become of the layers of ``model``."""
        self._plan = plan
        # Experts with some of their tensors; the records of complete layers; the errors of others.
        self._experts: dict[str, ExpertsSwap] = {}
        self._records: dict[str, LayerRecord] = {}
        self._errors: list[str] = []
        # Files contain the packed weights of an nn.MultiheadAttention, so it is opened only after these have arrived.
        modules = dict(model.named_modules(remove_duplicate=False))
        self._in_attention = [
            layer for layer in plan.chosen if isinstance(modules[split_name(layer.name)[0]], nn.MultiheadAttention)
        ]
        self.waiting: dict[str, Layer] = {
            f"{name}.{leaf}": layer
            for layer in plan.chosen
            if layer not in self._in_attention
            for name in layer.names
            for leaf in (describe_experts(modules[layer.name]).parameters.values() if layer.is_experts else ["weight"])
        }

    def element_size(self, name: str) -> float:
        """Bytes per value, after quantization, of the weight ``name``, which is still to come."""
        return self._plan.scheme_of(self.waiting[name]).weight.format.bits / 8

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        model: nn.Module | None = None,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Quantizes the weights in ``input_dict``, which are named in full, and returns the rest."""
        assert model is not None
        rest = {}
        for name, value in input_dict.items():
            if name in self.waiting:
                self.quantize_weight(model, name, value[0] if isinstance(value, list) else value)
                if missing_keys is not None:
                    missing_keys.discard(name)
            else:
                rest[name] = value
        return rest

    def quantize_weight(self, model: nn.Module, name: str, value: Tensor) -> None:
        """Quantizes the weight ``name``, with this ``value``, and swaps its layer when all of its weights are there."""
        layer, (_, leaf) = self.waiting.pop(name), split_name(name)
        scheme = self._plan.scheme_of(layer)
        if layer.is_experts and layer.name not in self._experts:
            self._experts[layer.name] = ExpertsSwap(model, layer, scheme)
        experts = self._experts.get(layer.name)
        wanted = model.get_parameter(f"{layer.name}.{leaf}").shape if experts is None else experts.waiting[leaf]
        if value.shape != wanted:
            self._errors.append(
                f"{name} has shape {list(value.shape)} in the checkpoint; the model's is {list(wanted)}"
            )
            return
        try:
            if experts is None:
                model.get_submodule(layer.name).weight = nn.Parameter(value, requires_grad=False)
                self._records[layer.name] = swap(model, layer, scheme, self._plan.input_scales.get(layer.name))
            else:
                experts.take(leaf, value)
                if experts.waiting:
                    return
                self._records[layer.name] = self._experts.pop(layer.name).finish()
        except ValueError as error:
            self._errors.append(f"{layer.name}: {error}")
            return
        # Otherwise transformers would initialize them. The bias may still arrive, and is marked then.
        for parameter in model.get_submodule(layer.name).parameters(recurse=False):
            if parameter.device.type != "meta":
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]

    def finish(self, model: PreTrainedModel) -> None:
        """Quantizes the rest and gives ``model`` its report; raises ``CheckpointError`` if a weight is missing."""
        self.waiting |= {f"{layer.name}.weight": layer for layer in self._in_attention}
        with opened_attention(model):
            for name in list(self.waiting):
                # A checkpoint tensor that became several parameters is only passed to the first one's operation.
                if name in self.waiting and getattr(weight := model.get_parameter(name), "_is_hf_initialized", False):
                    self.quantize_weight(model, name, weight.detach())
        missing = [name for name, layer in self.waiting.items() if layer.name not in self._records]
        errors = [*self._errors, *(f"{name} is not in the checkpoint" for name in missing)]
        if errors:
            shown = "; ".join(errors[:5]) + (f"; and {len(errors) - 5} more" if len(errors) > 5 else "")
            raise CheckpointError(
                f"{model.name_or_path or type(model).__name__} can't be quantized while it loads: {shown}. "
                "Repair the checkpoint, or pass these layers in QGemmConfig(skip=[...])"
            )
        give_report(model, self._plan, self._records)


def _on_meta(model: PreTrainedModel, plan: SwapPlan) -> Iterator[tuple[str, QuantLayer]]:
    """The layers that ``plan`` will put into ``model``, without values, by each of their names."""
    for layer in plan.chosen:
        module, scheme = model.get_submodule(layer.name), plan.scheme_of(layer)
        if layer.is_experts:
            made: QuantLayer = QuantExperts.like(module, describe_experts(module), scheme)
        else:
            N, K = linear_weight(module).shape
            made = meta_linear(scheme, K, N, module.bias is not None)
        yield from ((name, made) for name in layer.names)


@contextmanager
def _as_it_will_be(model: PreTrainedModel) -> Iterator[None]:
    """Inside, parameters on meta are as they will be after loading: tied, and float32 where they stay so."""
    before = {name: model.get_parameter_or_buffer(name) for name in model.state_dict()}
    plan = model._get_dtype_plan(model.dtype)
    for name, parameter in before.items():
        if isinstance(parameter, nn.Parameter) and is_kept_in_fp32(name, plan):
            set_tensor(model, name, nn.Parameter(parameter.to(torch.float32), parameter.requires_grad))
    for alias, name in model.all_tied_weights_keys.items():
        if alias in before and name in before:
            set_tensor(model, alias, get_tensor(model, name))
    try:
        yield
    finally:
        for name, tensor in before.items():
            set_tensor(model, name, tensor)
