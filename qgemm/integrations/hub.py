"""No folder of quantized layers that another library's loader would take for float ones.

``from_pretrained`` of ``PyTorchModelHubMixin``, as that of diffusers, builds the float model and copies into it what
the folder has under its names, whatever the dtype, and leaves out the rest: int8 numbers become weights, without scales
and without an error. So ``save_pretrained`` refuses and says what to call. transformers' classes have one of their own,
which knows quantized layers.
"""

from __future__ import annotations

import functools
from typing import Any

from huggingface_hub.hub_mixin import PyTorchModelHubMixin

from qgemm.nn import QuantLayer


def refuse_to_save(cls: type, method: str) -> None:
    """Has ``cls.method`` raise ``ValueError`` for a model with quantized layers."""
    save = getattr(cls, method)
    save = getattr(save, "_saves_floats", save)  # a notebook's autoreload comes here again

    @functools.wraps(save)
    def save_or_refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(module, QuantLayer) for module in self.modules()):
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
