"""Refuses to save quantized layers in folders that another library's loader would read as float layers.

``from_pretrained`` of ``PyTorchModelHubMixin``, like diffusers', builds the float model and copies into it the folder's
tensors of the same names, whatever their dtype, and leaves out the rest: int8 numbers would become weights, without
scales and without an error. So ``save_pretrained`` raises an error that says what to call instead. transformers'
classes have a ``save_pretrained`` of their own, which knows quantized layers.
"""

from __future__ import annotations

import functools
from typing import Any

from huggingface_hub.hub_mixin import PyTorchModelHubMixin

from qgemm.nn.quant_layer import has_quant_layers


def refuse_to_save(cls: type, method: str) -> None:
    """Makes ``cls.method`` raise ``ValueError`` for a model with quantized layers."""
    save = getattr(cls, method)
    save = getattr(save, "_saves_floats", save)  # a notebook's autoreload runs this again

    @functools.wraps(save)
    def save_or_refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if has_quant_layers(self):
            name = type(self).__name__
            raise ValueError(
                f"{name} has quantized layers, which {name}.from_pretrained would take for float ones: save it with "
                "qgemm.save_quantized(model, folder), and load it with qgemm.load_quantized(folder, model=build), "
                "where build() makes the float model"
            )
        return save(self, *args, **kwargs)

    save_or_refuse._saves_floats = save  # type: ignore[attr-defined]
    setattr(cls, method, save_or_refuse)


refuse_to_save(PyTorchModelHubMixin, "_save_pretrained")
