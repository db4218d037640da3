"""Hooks on several modules at a time, and functions in the place of their methods, for the time of a context."""

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
    """Inside, ``before(name, args, kwargs)`` runs ahead of each call of ``modules``, ``after(name, output)`` behind it.

    ``first``: ahead of the hooks that are there. What ``before`` returns, if not None, are new arguments.
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
    """Inside, the module's method of that name is ``function``."""
    own = vars(module).get(name)
    setattr(module, name, function)
    try:
        yield
    finally:
        delattr(module, name)
        if own is not None:
            setattr(module, name, own)
