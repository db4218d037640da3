"""Binds a fused computation to a module: another ``forward`` of the instance; class, place, name and children stay."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

_NAME = "_qgemm_fused"
_LIKE_CLASS = "_qgemm_like_class"


class Fused(Protocol):
    """How a module computes."""

    @property
    def forward(self) -> Callable[..., Any]:
        """The function called instead of the class's ``forward``, with the module first. Its name is ``forward``."""

    def separate(self) -> None:
        """Gives all layers whose weights it merged memory of their own again."""


def bind(module: nn.Module, fused: Fused) -> None:
    """Makes ``module`` compute as ``fused`` says."""
    setattr(module, _NAME, fused)
    module.forward = types.MethodType(fused.forward, module)  # type: ignore[method-assign]


def unbind(module: nn.Module) -> None:
    """Makes ``module`` compute as its class does again."""
    fused = fused_of(module)
    if fused is None:
        return
    fused.separate()
    delattr(module, _NAME)
    if getattr(vars(module).get("forward"), "__func__", None) is fused.forward:
        del module.forward


def fused_of(module: nn.Module) -> Any:
    """The object that computes for ``module`` if it is fused; else None."""
    return vars(module).get(_NAME)


def mark_like_class(forward: Callable[..., Any]) -> None:
    """Marks a module's own ``forward`` that computes what its class's does except for gradients: it may be bypassed."""
    vars(forward)[_LIKE_CLASS] = True


def has_own_forward(module: nn.Module) -> bool:
    """Whether ``module`` has a ``forward`` that may compute something else than its class does."""
    own = vars(module).get("forward")
    return own is not None and _LIKE_CLASS not in getattr(own, "__dict__", ())
