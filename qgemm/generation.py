"""``fast_generate`` and ``generate``: the public names of the loop in ``integrations/transformers/generate``.

They are here so that importing qgemm imports no transformers.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def fast_generate(model: Model, enabled: bool = True) -> Model:
    """Makes ``model.generate`` of a model of transformers fast: same arguments, same tokens. Returns the model.

    Raises ``TypeError`` for a model that has no ``generate`` of transformers.
    """
    from qgemm.integrations.transformers import generate as integration

    integration.fast_generate(model, enabled)
    return model


def generate(model: Any, input_ids: Tensor, **prepared: Any) -> Any:
    """The loop for one call: ``model.generate(..., custom_generate=qgemm.generate)``."""
    from qgemm.integrations.transformers import generate as integration

    return integration.generate(model, input_ids, **prepared)
