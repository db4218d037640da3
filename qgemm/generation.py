"""``fast_generate`` and ``generate``: public names for the loop in ``integrations/transformers/generate``.

They are defined here so that importing qgemm doesn't import transformers.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def fast_generate(model: Model, enabled: bool = True, *, cache_dtype: torch.dtype | None = None) -> Model:
    """Makes ``model.generate`` of a transformers model fast, with the same arguments and tokens; returns ``model``.

    ``model.generate_batch`` and ``transformers serve --continuous-batching`` get attention that reads keys in place,
    without a copy, and needs no mask, unless a flash attention is installed or chosen.

    ``cache_dtype=torch.int8`` keeps keys and values in int8, in half the memory. ``enabled=False`` restores the
    original ``generate`` and frees the caches and CUDA graphs kept between calls.

    Raises ``TypeError`` for a model without transformers' ``generate``, ``ValueError`` for a dtype that
    ``KeyValueCache`` doesn't support.
    """
    try:
        from qgemm.integrations.transformers import generate as integration
    except ImportError as error:
        raise ImportError(
            f'fast_generate needs transformers 5.17 or later: pip install "transformers>=5.17" ({error})'
        ) from error
    integration.fast_generate(model, enabled, cache_dtype)
    return model


def generate(model: Any, input_ids: Tensor, *, cache_dtype: torch.dtype | None = None, **prepared: Any) -> Any:
    """Runs the loop of ``fast_generate`` for one call: ``model.generate(..., custom_generate=qgemm.generate)``.

    ``model.generate`` then also accepts ``cache_dtype``. transformers calls this function with arguments that it has
    prepared; a direct call raises ``TypeError``.
    """
    if "generation_config" not in prepared:
        raise TypeError(
            "qgemm.generate is for transformers to call: model.generate(input_ids, custom_generate=qgemm.generate)"
        )
    from qgemm.integrations.transformers import generate as integration

    return integration.generate(model, input_ids, cache_dtype, **prepared)
