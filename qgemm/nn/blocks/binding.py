"""What is fused of a module: another ``forward`` of the instance, which keeps its class, place, name and children."""

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
        """What is called in place of the class's ``forward``, with the module first. Its name is ``forward``."""

    def separate(self) -> None:
        """Gives all layers that it multiplies with memory of their own again."""


def bind(module: nn.Module, fused: Fused) -> None:
    """Has ``module`` compute as ``fused`` says."""
    setattr(module, _NAME, fused)
    module.forward = types.MethodType(fused.forward, module)  # type: ignore[method-assign]


def unbind(module: nn.Module) -> None:
    """Has ``module`` compute as its class says."""
    fused = fused_of(module)
    if fused is None:
        return
    fused.separate()
    delattr(module, _NAME)
    if getattr(vars(module).get("forward"), "__func__", None) is fused.forward:
        del module.forward


def fused_of(module: nn.Module) -> Any:
    """How ``module`` computes, if it is fused; else None."""
    return vars(module).get(_NAME)


def mark_like_class(forward: Callable[..., Any]) -> None:
    """Marks a module's own ``forward`` that does what its class's does but for gradients: it needn't be called."""
    vars(forward)[_LIKE_CLASS] = True


def has_own_forward(module: nn.Module) -> bool:
    """Whether ``module`` computes by something else than its class, as far as anybody knows."""
    own = vars(module).get("forward")
    return own is not None and _LIKE_CLASS not in getattr(own, "__dict__", ())
