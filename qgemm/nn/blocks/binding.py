"""Binds a fused computation to a module: another ``forward`` of the instance; class, place, name and children stay."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

_NAME = "_qgemm_fused"
_BINDING = "_qgemm_binding"
_LIKE_CLASS = "_qgemm_like_class"


class Fused(Protocol):
    """How a module computes."""

    @property
    def forward(self) -> Callable[..., Any]:
        """The function called instead of the class's ``forward``, with the module first. Its name is ``forward``."""

    def separate(self) -> None:
        """Gives all layers whose weights it merged memory of their own again."""


class _Binding:
    """What restores a fused module's methods from a pickle, where a method is its name: that of the class's own.

    It precedes them in the module's attributes, so that the names find what this has set.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module, self._forward = module, forward

    def __reduce__(self) -> Any:
        return _set_methods, (self._module, self._forward)


def bind(module: nn.Module, fused: Fused) -> None:
    """Makes ``module`` compute as ``fused`` says."""
    setattr(module, _NAME, fused)
    vars(module).pop("forward", None)
    _set_methods(module, fused.forward)


def _set_methods(module: nn.Module, forward: Callable[..., Any]) -> _Binding:
    binding = vars(module)[_BINDING] = _Binding(module, forward)
    for function in (forward, _replicate_for_data_parallel):
        vars(module)[function.__name__] = types.MethodType(function, module)
    return binding


def _replicate_for_data_parallel(module: nn.Module) -> nn.Module:
    """As the class's own. The replica isn't fused: its methods would be those of ``module``, on another GPU."""
    replica: nn.Module = type(module)._replicate_for_data_parallel(module)
    for name in (_NAME, _BINDING, "forward", _replicate_for_data_parallel.__name__):
        vars(replica).pop(name, None)
    return replica


def unbind(module: nn.Module) -> None:
    """Makes ``module`` compute as its class does again."""
    fused = fused_of(module)
    if fused is None:
        return
    fused.separate()
    for name in (_NAME, _BINDING, _replicate_for_data_parallel.__name__):
        delattr(module, name)
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
