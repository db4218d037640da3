"""Which layers of a quantized model get an adapter of PEFT: ``"all-linear"``, and what is refused beforehand.

PEFT replaces ``target_modules="all-linear"`` by names in one function, which looks for ``nn.Linear``. Every tuner calls
it before it changes the model, so here it also finds quantized layers, and raises for tuners and ``modules_to_save``
that can't work on them: PEFT itself raises a ``KeyError`` for some and trains nothing with others.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from peft import PeftType
from peft.tuners import tuners_utils
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import nn
from transformers import PreTrainedModel

from qgemm.nn import LinearLayer, QuantExperts
from qgemm.nn.quant_layer import QuantLayer, has_quant_layers

_RESOLVE = "_maybe_include_all_linear_layers"


def register_targets() -> None:
    """Extends PEFT's function in every module that has imported it; a version without it stays as it is."""
    resolve = getattr(tuners_utils, _RESOLVE, None)
    if resolve is None:
        return
    resolve = getattr(resolve, "__wrapped__", resolve)  # a notebook's autoreload runs this again

    @functools.wraps(resolve)
    def resolve_targets(peft_config: Any, model: nn.Module) -> Any:
        targets = getattr(peft_config, "target_modules", None)
        is_all = isinstance(targets, str) and targets.lower() == "all-linear"
        peft_config = resolve(peft_config, model)
        if is_all:
            peft_config.target_modules |= _linear_names(model)
        _check_targets(peft_config, model)
        _check_saved(peft_config, model)
        return peft_config

    for name, module in list(sys.modules.items()):
        if name.startswith("peft.") and _RESOLVE in vars(module):
            setattr(module, _RESOLVE, resolve_targets)


def _linear_names(model: nn.Module) -> set[str]:
    """The quantized layers that PEFT would choose if they were float: no output head, and none below an adapter."""
    left_out = {part for layer in model.modules() if isinstance(layer, BaseTunerLayer) for part in layer.modules()}
    if isinstance(model, PreTrainedModel):
        left_out.add(model.get_output_embeddings())
    return {
        name
        for name, layer in model.named_modules()
        if name and isinstance(layer, LinearLayer) and layer not in left_out
    }


def refusal_of_experts(experts: QuantExperts) -> str:
    """Why they can't have an adapter: PEFT would round it as the weights are."""
    return (
        f"an adapter can't be put on {type(experts).__name__}, whose weights are in {experts.scheme.name}: "
        "name the layers around the experts in target_modules, and no parameter of experts in target_parameters"
    )


def _check_targets(peft_config: Any, model: nn.Module) -> None:
    ends = tuple(f".{end}" for end in getattr(peft_config, "target_parameters", None) or ())
    for name, module in model.named_modules():
        layer = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        if not isinstance(layer, QuantLayer):
            continue
        is_target = getattr(peft_config, "target_modules", None) and check_target_module_exists(peft_config, name)
        if peft_config.peft_type == PeftType.LORA:  # its linear layers raise by themselves
            has_target = any(f".{name}.{parameter}".endswith(ends) for parameter, _ in layer.named_parameters())
            if isinstance(layer, QuantExperts) and (is_target or has_target):
                raise ValueError(refusal_of_experts(layer))
        elif is_target:
            kind = getattr(peft_config.peft_type, "value", peft_config.peft_type)
            raise ValueError(
                f"{kind} can't adapt {name}, which is quantized ({layer.scheme.name}); on quantized layers only LoRA "
                "and its variant DoRA work: use LoraConfig, or adapt the float model that model.dequantize() restores"
            )


def _check_saved(peft_config: Any, model: nn.Module) -> None:
    saved = getattr(peft_config, "modules_to_save", None) or ()
    for name, module in model.named_modules():
        asked = next((end for end in saved if name.endswith(end)), None)
        if asked is not None and has_quant_layers(module):
            raise ValueError(
                f"modules_to_save names {asked!r}, but {name} is quantized and can't be trained as a whole: leave it "
                "in float (skip=... in quantize_model), or name its layers in target_modules"
            )
