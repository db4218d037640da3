"""``dequantize``: float layers in the places of quantized ones."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from qgemm.checkpoint.pretrained import built_again
from qgemm.integrations.transformers.saving import admit
from qgemm.nn import LinearLayer, QuantExperts
from qgemm.nn.attention import close_attention
from qgemm.nn.float_experts import describe_experts


def dequantize(model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
    """``model`` with the float values of its quantized layers, in ``dtype``, or in that which each layer returns."""
    wanted: torch.dtype | None = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # text in a saved config
    admit(model.config)
    plain = built_again(model)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, LinearLayer):
            model.set_submodule(name, module.dequantize(wanted))
        elif isinstance(module, QuantExperts):
            model.set_submodule(name, _float_experts(plain.get_submodule(name), module, wanted))
    close_attention(model)
    return model


def _float_experts(module: nn.Module, quantized: QuantExperts, dtype: torch.dtype | None) -> nn.Module:
    """``module``, float experts on meta, with the values of ``quantized``."""
    source = describe_experts(module)
    for name, value in quantized.dequantize(dtype).items():
        setattr(module, source.parameters[name], nn.Parameter(source.restore(name, value)))
    if hasattr(quantized, "config"):
        module.config = quantized.config
    return module.train(quantized.training)
