"""The quantizer for Hugging Face transformers: makes ``from_pretrained`` and ``save_pretrained`` know qgemm.

- ``QGemmConfig(...)`` as ``quantization_config`` of ``from_pretrained`` quantizes a float checkpoint while it is read:
  each weight is quantized when it arrives, so memory peaks at the quantized model and one float weight. The result is
  that of ``quantize_model``, bit for bit.
- With a recipe, or batches for calibration, the model is loaded in float, and ``quantize_model`` quantizes it at the
  end.
- A folder written by ``save_pretrained`` or ``qgemm.save_quantized`` contains a ``Manifest``; quantized layers are put
  into the model before their values are read.
- For a folder quantized by another library, loaded with a ``QGemmConfig``, the layers run through qgemm.
- transformers loads and saves a part of a quantized model without asking a quantizer: ``parts`` makes it ask.
- ``attach_quantizer`` is for a model that was quantized in place: ``save_pretrained`` then writes the same manifest.

Importing this package registers with transformers, once, the method ``"qgemm"``, an attention of that name, which reads
``KeyValueCache``, and one for continuous batching. Versions 5.17 to 5.24 are supported: where they call things
differently (plans for tensor parallelism, conversions of names), the base class handles it, and a model's cache has the
name that they use (``ARGUMENT`` in ``cache.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    AutoHfQuantizer,
    register_quantization_config,
    register_quantizer,
)

from qgemm.checkpoint.manifest import QUANT_METHOD
from qgemm.checkpoint.pretrained import model_dtype
from qgemm.integrations.transformers import batching
from qgemm.integrations.transformers.attention import attention, mask
from qgemm.integrations.transformers.cache import ATTENTION, KeyValueCache
from qgemm.integrations.transformers.config import QGemmConfig
from qgemm.integrations.transformers.foreign import admit_configs, prefer_qgemm
from qgemm.integrations.transformers.parts import (
    count_as_float,
    dequantize_parts,
    keep_quantized_heads,
    refuse_values,
    save_parts,
    tell_parts,
)
from qgemm.integrations.transformers.quantizer import QGemmQuantizer, attach_quantizer

__all__ = ["KeyValueCache", "QGemmConfig", "QGemmQuantizer", "attach_quantizer"]

# Registering a name twice would raise, and a notebook's autoreload runs this module again.
AUTO_QUANTIZATION_CONFIG_MAPPING.pop(QUANT_METHOD, None)
AUTO_QUANTIZER_MAPPING.pop(QUANT_METHOD, None)
register_quantization_config(QUANT_METHOD)(QGemmConfig)
register_quantizer(QUANT_METHOD)(QGemmQuantizer)
AttentionInterface.register(ATTENTION, attention)
AttentionInterface.register(batching.PAGED_ATTENTION, batching.attention)
AttentionMaskInterface.register(ATTENTION, mask)


def _wrap(owner: type, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps a function of ``owner`` with ``wrapper``, if this version of transformers has it."""
    found = inspect.getattr_static(owner, name, None)
    if isinstance(found, classmethod | staticmethod):
        setattr(owner, name, type(found)(wrapper(found.__func__)))
    elif found is not None:
        setattr(owner, name, wrapper(found))


# The only place where transformers compares a given config with the checkpoint's; it raises if their classes differ.
_wrap(AutoHfQuantizer, "merge_quantization_configs", prefer_qgemm)
_wrap(AutoHfQuantizer, "supports_quant_method", admit_configs)
_wrap(PreTrainedModel, "num_parameters", count_as_float)
# Functions that don't ask a quantizer about a part of a model.
_wrap(PreTrainedConfig, "get_config_dict", tell_parts)
_wrap(PreTrainedModel, "save_pretrained", save_parts)
_wrap(PreTrainedModel, "dequantize", dequantize_parts)
_wrap(PreTrainedModel, "_load_pretrained_model", refuse_values)
_wrap(PreTrainedModel, "resize_token_embeddings", keep_quantized_heads)
# Models cast inputs, masks and caches to this dtype; the first float parameter may be a scale, or a float8 weight.
PreTrainedModel.dtype = property(model_dtype)  # type: ignore
