"""Notifies integrations about quantized models, through functions that they register.

Integrations depend on the code that quantizes and loads models, so that code can't import them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

_LISTENERS: dict[str, Callable[[nn.Module, str | None], object]] = {}


def when_quantized(name: str, action: Callable[[nn.Module, str | None], object]) -> None:
    """Registers ``action(model, save)``, to be called for every model that is quantized or loaded from now on.

    ``save``: the id of the save that it was loaded from. ``name``: of the integration; only its last action counts.
    """
    _LISTENERS[name] = action


def announce_quantized(model: nn.Module, save: str | None = None) -> None:
    """Calls all actions for ``model``, which has quantized layers, loaded from ``save`` unless that is None."""
    for action in _LISTENERS.values():
        action(model, save)
