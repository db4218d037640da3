"""``fast_generate`` and ``generate``: the public names of the loop in ``integrations/transformers/generate``.

They are here so that importing qgemm imports no transformers.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def fast_generate(model: Model, enabled: bool = True, *, cache_dtype: torch.dtype | None = None) -> Model:
    """Makes ``model.generate`` of a transformers model fast, with the same arguments and tokens; returns ``model``.

    ``model.generate_batch`` and ``transformers serve --continuous-batching`` get attention that reads keys where they
    lie and needs no mask, unless a flash attention is installed or chosen.

    ``cache_dtype=torch.int8`` keeps keys and values in int8, in half the memory. ``enabled=False`` restores the
    original ``generate`` and frees the caches and CUDA graphs that were kept between calls.

    Raises ``TypeError`` for a model that has no ``generate`` of transformers, ``ValueError`` for a dtype that a
    ``KeyValueCache`` can't have.
    """
    try:
        from qgemm.integrations.transformers import generate as integration
    except ImportError as error:
        raise ImportError(
            f'fast_generate needs transformers 5.17 or later: pip install "transformers>=5.17" ({error})'
        ) from error
    integration.fast_generate(model, enabled, cache_dtype)
    return model


def generate(model: Any, input_ids: Tensor, cache_dtype: torch.dtype | None = None, **prepared: Any) -> Any:
    """The loop of ``fast_generate`` for one call: ``model.generate(..., custom_generate=qgemm.generate)``.

    ``model.generate`` then also accepts ``cache_dtype``. This function is for transformers to call, with the arguments
    that it has prepared; raises ``TypeError`` for a direct call.
    """
    if "generation_config" not in prepared:
        raise TypeError(
            "qgemm.generate is for transformers to call: model.generate(input_ids, custom_generate=qgemm.generate)"
        )
    from qgemm.integrations.transformers import generate as integration

    return integration.generate(model, input_ids, cache_dtype, **prepared)
