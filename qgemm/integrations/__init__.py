"""qgemm inside other libraries. Each module here imports its library, so ``register`` only imports it when needed."""

from __future__ import annotations

import functools
import importlib

from torch import nn

from qgemm.checkpoint.pretrained import is_pretrained
from qgemm.integrations.on_import import when_imported
from qgemm.model.announce import when_quantized

# A library's module, and the module here that is imported right after it.
_OF_LIBRARIES = {
    "transformers.modeling_utils": "transformers",
    "torch.utils.flop_counter": "flop_counter",
    "peft": "peft",
    "huggingface_hub.hub_mixin": "hub",
    "diffusers.models.modeling_utils": "diffusers",
}


def register() -> None:
    """Arranges for each integration to be imported right after its library, in whatever order things are imported.

    So ``from_pretrained`` knows the method "qgemm" and LoRA knows QuantLinear. For a version that is too old, the error
    comes when ``QGemmConfig`` is used, or one of its models is quantized or loaded.
    """
    for module, integration in _OF_LIBRARIES.items():
        when_imported(module, functools.partial(importlib.import_module, f"qgemm.integrations.{integration}"))
    when_quantized("transformers", _attach_quantizer)


def _attach_quantizer(model: nn.Module, save: str | None) -> None:
    if any(is_pretrained(module) for module in model.modules()):
        from qgemm.integrations.transformers import attach_quantizer

        attach_quantizer(model, save)
