"""diffusers' models: the dtype that pipelines cast latents to, and a refusal to save folders that it would misread.

``ModelMixin.dtype`` is the dtype of the first float parameter, which may be an fp8 weight or a float32 scale. This
module, which ``import qgemm`` imports as soon as diffusers' models are imported, makes it skip these.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin

from qgemm.integrations.hub import refuse_to_save
from qgemm.nn import QuantLayer

_dtype_of_floats = ModelMixin.dtype.fget
_dtype_of_floats = getattr(_dtype_of_floats, "__wrapped__", _dtype_of_floats)  # after a notebook's autoreload


@functools.wraps(_dtype_of_floats)
def _dtype(self: Any) -> torch.dtype:
    """The dtype of the first float parameter that is neither a quantized weight nor a scale."""
    kept = self._keep_in_fp32_modules or ()
    after_quantized = False
    for name, module in self.named_modules():
        fixed = module.fixed_names if isinstance(module, QuantLayer) else ()
        after_quantized |= bool(fixed)
        for key, parameter in module._parameters.items():
            if parameter is None or key in fixed or any(part in f"{name}.{key}" for part in kept):
                continue
            if parameter.is_floating_point():
                dtype: torch.dtype = parameter.dtype if after_quantized else _dtype_of_floats(self)
                return dtype
    return _dtype_of_floats(self)  # type: ignore[no-any-return]


ModelMixin.dtype = property(_dtype)
refuse_to_save(ModelMixin, "save_pretrained")
