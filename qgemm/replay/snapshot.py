"""``Snapshot``: notices whether anything that is built into a captured graph of a model was changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from ctypes import string_at
from gc import get_referents
from itertools import chain
from operator import itemgetter
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, nn

Place = tuple[weakref.ref[nn.Module], str]
"""A module and the name of an attribute."""

# What is compared by value. It holds no tensors, so it may be kept alive.
_PLAIN = frozenset((bool, int, float, str, type(None), BuiltinFunctionType, type, torch.dtype, torch.device))
_CONTAINERS = (dict, list, tuple, set)
_TENSORS = ("_parameters", "_buffers")
# The dictionaries of a module whose values a forward reads.
_PARTS = (*_TENSORS, "_modules", "_forward_hooks", "_forward_pre_hooks")
# What modules have from nn.Module: the parts, and what no forward reads.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
# vars(module) takes twice as long, because modules have __getattr__.
_vars: Callable[[nn.Module | None], dict[str, Any]] = nn.Module.__dict__["__dict__"].__get__
MAX_VALUES = 64
"""The maximum length of a list or a dictionary: longer ones are tables, compared by identity only."""


class UnfitModelError(Exception):
    """A model whose forward a graph can't repeat."""


class Snapshot:
    """The state of ``model``, and of ``others``: objects that its modules read, such as a config.

    That is: attributes, compared by value if they are numbers and strings, also in lists and dictionaries, and by
    identity otherwise; for modules, also the class, hooks, and addresses of tensors. Changes inside other objects
    aren't noticed. A snapshot keeps no module and no tensor alive. It has no weak references to tensors either, because
    ``torch.utils.swap_tensors`` refuses tensors with such.

    Objects are compared first, all at once: the same ones have the same values.
    """

    def __init__(self, model: nn.Module, others: Iterable[object] = (), ignored: Iterable[str] = ()) -> None:
        """Takes about 15 us per module. Attributes with the names ``ignored`` may change.

        Raises ``UnfitModelError`` for modules of TorchScript, whose attributes aren't Python's.
        """
        modules = list(model.modules())
        if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
            raise UnfitModelError("it has modules of TorchScript, whose changes nobody would notice")
        self._model = weakref.ref(model)
        self._apart = _OF_MODULES.union(ignored)
        self._others = list({id(other): other for other in others}.values())
        self._take(modules)

    def holds(self) -> bool:
        """Whether nothing has changed since. Takes about 1 us per module; more if an attribute has another object."""
        return self.memory_holds() and self.values_hold()

    def memory_holds(self) -> bool:
        """Whether all tensors are where they were: a graph that reads them may run, if only to be discarded."""
        try:
            return self._memory() == self._addresses
        except (AttributeError, KeyError, TypeError):  # something is gone, or no tensor any more
            return False

    def values_hold(self) -> bool:
        """Whether everything else holds, if memory does."""
        if self._has_same_objects():
            return True
        model = self._model()
        modules = [] if model is None else list(model.modules())
        if [*map(type, modules)] != self._classes or self._values(modules) != self._exact:
            return False
        self._take(modules)
        return True

    def _take(self, modules: list[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._classes = [*map(type, modules)]
        # Keeps plain values, because an object's identity is its own only while the object exists.
        self._exact = self._values(modules)
        self._take_memory(modules)
        owners = self._owners(modules)
        names = [[name for name in each if name not in self._apart] for each in owners]
        for each in names[: len(modules)]:
            each.extend(_PARTS)
        self._readers = [*map(_reader, names)]
        attributes = self._attributes(owners)
        parts = [i for i, name in enumerate(chain.from_iterable(names)) if name in _PARTS]
        small = [i for i in {*range(len(attributes))}.difference(parts) if _is_small(attributes[i])]
        self._parts = _reader(parts)
        self._containers = _reader([i for i in parts if attributes[i]] + small)
        self._dictionaries = _reader([i for i in small if isinstance(attributes[i], dict)])
        self._same = self._state(owners)

    def _take_memory(self, modules: list[nn.Module]) -> None:
        pairs = [*zip(self._modules, map(_vars, modules), strict=True)]
        self._tables = [(module, name) for module, each in pairs for name in _TENSORS if each[name]]
        own = [
            (value, (module, name))
            for module, each in pairs
            for name, value in each.items()
            if name not in self._apart and type(value) not in _PLAIN
        ]
        self._tensors = [place for value, place in own if type(value) is Tensor]
        holders = {id(value): place for value, place in own if _may_hold_tensors(value)}
        self._holders = [*holders.values()]  # of each object one place
        self._addresses = self._memory()

    def _memory(self) -> list[int]:
        """The addresses of tensors, and the identities of objects that may hold others.

        A tensor moves, and stays the same object, by ``.data =``, ``set_``, ``swap_tensors`` and resizing.
        """
        tensors = get_referents(*_read(self._tables)) + _read(self._tensors)
        return [
            *[tensor.data_ptr() for tensor in tensors if tensor is not None],
            *map(id, _read(self._holders)),
        ]

    def _owners(self, modules: Iterable[nn.Module | None]) -> list[dict[str, Any]]:
        """The attributes of modules and others."""
        return [*map(_vars, modules), *map(vars, self._others)]

    def _attributes(self, owners: list[dict[str, Any]]) -> tuple[Any, ...]:
        """The values of attributes that count."""
        return (*chain.from_iterable([read(each) for read, each in zip(self._readers, owners, strict=True)]),)

    def _state(self, owners: list[dict[str, Any]]) -> tuple[bytes, bytes, list[int]]:
        """The identities of attributes and of what is in them, and how much is in each owner and container."""
        attributes = self._attributes(owners)
        containers, dictionaries = self._containers(attributes), self._dictionaries(attributes)
        # What is in the parts, also where nothing was, comes in one call; what is in an object's __dict__ wouldn't.
        in_parts = get_referents(*self._parts(attributes))
        inside = (*chain.from_iterable((*containers, *map(dict.values, dictionaries))), *in_parts)
        return _identities(attributes), _identities(inside), [*map(len, owners), *map(len, containers)]

    def _has_same_objects(self) -> bool:
        modules = [reference() for reference in self._modules]
        if [*map(type, modules)] != self._classes:
            return False
        try:
            return self._state(self._owners(modules)) == self._same
        except (KeyError, TypeError):  # an attribute is gone, or a dictionary is something else
            return False

    def _values(self, modules: list[nn.Module]) -> list[object]:
        return [*map(self._of, self._others), *map(self._of_module, modules)]

    def _of_module(self, module: nn.Module) -> object:
        parts = [vars(module)[name] for name in _PARTS]
        tensors = chain(module._parameters.values(), module._buffers.values())
        addresses = [tensor.data_ptr() for tensor in tensors if tensor is not None]
        return self._of(module), [*chain.from_iterable(parts)], addresses

    def _of(self, owner: object) -> dict[str, object]:
        return {name: _of_value(value) for name, value in vars(owner).items() if name not in self._apart}


def _of_value(value: Any) -> object:
    if not _is_small(value):
        return _of_item(value)
    return [*map(_of_item, value), *(map(_of_item, value.values()) if isinstance(value, dict) else ())]


def _of_item(item: object) -> object:
    return (type(item), item) if type(item) in _PLAIN else id(item)


def _is_small(value: Any) -> bool:
    return isinstance(value, _CONTAINERS) and len(value) <= MAX_VALUES


def _may_hold_tensors(value: object) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, _CONTAINERS) else (value,)
    return any(type(item) not in _PLAIN for item in items)


def _read(places: list[Place]) -> list[Any]:
    return [_vars(module())[name] for module, name in places]


def _reader(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    # Of a single key, itemgetter doesn't make a tuple.
    return itemgetter(*keys) if len(keys) > 1 else lambda each: tuple([each[key] for key in keys])


def _identities(items: tuple[object, ...]) -> bytes:
    """Addresses, which CPython has behind the basic size of a tuple; ``id`` of each takes over ten times as long."""
    return string_at(id(items) + tuple.__basicsize__, len(items) * tuple.__itemsize__)
