"""Contexts that change models and modules temporarily: hooks, replaced methods, eval mode, no cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


@contextmanager
def hooked(
    modules: Mapping[str, nn.Module],
    before: Callable[[str, tuple[Any, ...], dict[str, Any]], Any],
    after: Callable[[str, Any], None] | None = None,
    *,
    first: bool = False,
) -> Iterator[None]:
    """Inside, ``before(name, args, kwargs)`` runs before each call of ``modules``, ``after(name, output)`` after it.

    ``first``: before the existing hooks. If ``before`` returns something other than None, it is the new arguments.
    """
    with ExitStack() as stack:
        for name, module in modules.items():
            handle = module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: before(name, args, kwargs), with_kwargs=True, prepend=first
            )
            stack.callback(handle.remove)
            if after is not None:
                handle = module.register_forward_hook(lambda _, __, output, name=name: after(name, output))
                stack.callback(handle.remove)
        yield


@contextmanager
def replaced(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``function`` replaces the module's method ``name``."""
    own = vars(module).get(name)
    setattr(module, name, function)
    try:
        yield
    finally:
        delattr(module, name)
        if own is not None:
            setattr(module, name, own)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside, no module is in training mode; afterwards the former modes are restored, also on replaced modules."""
    training = [name for name, module in model.named_modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        modules = dict(model.named_modules())
        for name in training:
            if name in modules:
                modules[name].training = True


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Inside, transformers models keep no keys and values between calls (``config.use_cache``)."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    using = [config for config in configs.values() if getattr(config, "use_cache", None)]
    for config in using:
        config.use_cache = False
    try:
        yield
    finally:
        for config in using:
            config.use_cache = True
