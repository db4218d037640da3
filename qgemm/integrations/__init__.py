"""qgemm inside of other libraries. Each module imports its library as it is imported, so none is imported at once."""

from __future__ import annotations

import functools
import importlib

from torch import nn

from qgemm.checkpoint.pretrained import is_pretrained
from qgemm.integrations.on_import import when_imported
from qgemm.model.announce import when_quantized

# What is imported, and the module here that is imported then.
_OF_LIBRARIES = {
    "transformers.modeling_utils": "transformers",
    "torch.utils.flop_counter": "flop_counter",
    "peft": "peft",
    "huggingface_hub.hub_mixin": "hub",
    "diffusers.models.modeling_utils": "diffusers",
}


def register() -> None:
    """Has each integration imported right after its library, in whatever order things are imported.

    So ``from_pretrained`` knows the method "qgemm" and LoRA knows QuantLinear. Too old a version is told so when
    ``QGemmConfig`` is asked for, or one of its models is quantized or loaded.
    """
    for module, integration in _OF_LIBRARIES.items():
        when_imported(module, functools.partial(importlib.import_module, f"qgemm.integrations.{integration}"))
    when_quantized("transformers", _attach_quantizer)


def _attach_quantizer(model: nn.Module, save: str | None) -> None:
    if any(is_pretrained(module) for module in model.modules()):
        from qgemm.integrations.transformers import attach_quantizer

        attach_quantizer(model, save)
