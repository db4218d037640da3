"""diffusers' models: the dtype that pipelines cast latents to, and refusals that say what to call instead.

Their ``save_pretrained`` would write folders that diffusers misreads; ``from_pretrained`` builds no quantized layers.

``ModelMixin.dtype`` is the dtype of the first float parameter, which may be an fp8 weight or a float32 scale. This
module, which ``import qgemm`` imports as soon as diffusers' models are imported, makes it skip these.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin

from qgemm.checkpoint.manifest import QUANT_METHOD
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


class _Refused:
    """What diffusers finds as the config and the quantizer of the method "qgemm": raises ``ValueError``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "from_pretrained of diffusers takes no QGemmConfig: load the float model without quantization_config, and "
            "call qgemm.quantize_model(model, ...), for a pipeline qgemm.quantize_model(pipe.transformer, ...)"
        )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> None:
        raise ValueError(
            "this folder was written by qgemm: load it with qgemm.load_quantized(folder, model=build), where build() "
            "makes the float model"
        )


ModelMixin.dtype = property(_dtype)
refuse_to_save(ModelMixin, "save_pretrained")
with contextlib.suppress(ImportError):  # without a quantizer, diffusers' error lists the methods that it has
    from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

    AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = _Refused
