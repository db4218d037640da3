"""Who is told of a quantized model: integrations, which give a function for it.

They lie above what quantizes and loads models, and so are never imported there.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

_LISTENERS: dict[str, Callable[[nn.Module, str | None], object]] = {}


def when_quantized(name: str, action: Callable[[nn.Module, str | None], object]) -> None:
    """Has ``action(model, save)`` called for every model that is quantized or loaded from now on.

    ``save``: the id of the save that it was loaded from. ``name``: of the integration, which has one action, the last.
    """
    _LISTENERS[name] = action


def announce_quantized(model: nn.Module, save: str | None = None) -> None:
    """Tells everybody that ``model`` holds quantized layers, which were loaded from ``save`` unless that is None."""
    for action in _LISTENERS.values():
        action(model, save)
