"""``Snapshot``: notices whether anything that is built into a captured graph of a model was changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from operator import is_, itemgetter
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, nn

Owners = list[dict[str, Any]]

_PLAIN = frozenset((bool, int, float, str, type(None)))
# What holds no tensors, so that it may be kept alive.
_FIXED = _PLAIN | {BuiltinFunctionType, type, torch.dtype, torch.device}
_SEQUENCES = (list, tuple, set)
# What a module has from its class is examined one by one.
_OF_MODULES = frozenset(vars(nn.Module()))
_TENSORS = ("_parameters", "_buffers")
# The dictionaries of a module whose values a forward reads.
_PARTS = itemgetter(*_TENSORS, "_modules", "_forward_hooks", "_forward_pre_hooks")
MAX_VALUES = 64
"""The maximum length of a list or a dictionary: longer ones are tables, compared by identity only."""


class Snapshot:
    """The state of ``model``, and of ``others``: objects that its modules read, such as a config.

    That is: attributes, compared by value if they are numbers and strings, also in lists and dictionaries, and by
    identity otherwise; for modules, also the class, hooks, and addresses of tensors. Changes inside other objects
    aren't noticed. A snapshot keeps no module and no tensor alive.

    Objects are compared first, by loops in C; the same ones have the same values.
    """

    def __init__(self, model: nn.Module, others: Iterable[object] = (), ignored: Iterable[str] = ()) -> None:
        """Takes about 15 us per module. Attributes with the names ``ignored`` may change."""
        self._model = weakref.ref(model)
        self._ignored = _OF_MODULES.union(ignored)
        self._others = list({id(other): other for other in others}.values())
        self._take(list(model.modules()))

    def holds(self) -> bool:
        """Whether nothing has changed since. Takes about 2 us per module; more if an attribute has another object."""
        return self.memory_holds() and self.values_hold()

    def memory_holds(self) -> bool:
        """Whether all tensors are where they were: a graph that reads them may run, if only to be discarded."""
        owners = self._owners()
        return owners is not None and self._addresses_in(owners) == self._addresses

    def values_hold(self) -> bool:
        """Whether everything else holds, if memory does."""
        owners = self._owners()
        if owners is not None and self._has_same_objects(owners):
            return True
        model = self._model()
        if model is None or self._values(now := list(model.modules())) != self._exact:
            return False
        self._take(now)
        return True

    def _take(self, modules: list[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._classes = [*map(type, modules)]
        self._exact = self._values(modules)
        owners = [vars(each) for each in (*modules, *self._others)]
        self._tensors = [(i, name) for i, each in enumerate(owners) for name in _TENSORS if each.get(name)]
        self._objects, self._dictionaries, self._sequences, self._readers = [], [], [], []
        for i, each in enumerate(owners):
            own = [name for name in each if name not in _OF_MODULES or name == "training"]
            fixed = [name for name in own if type(each[name]) in _FIXED]
            self._readers.append(_reader(fixed))
            for name in set(own).difference(fixed):
                self._objects.append((i, name))
                if isinstance(each[name], dict) and len(each[name]) <= MAX_VALUES:
                    self._dictionaries.append((i, name))
                elif isinstance(each[name], _SEQUENCES) and len(each[name]) <= MAX_VALUES:
                    self._sequences.append((i, name))
        self._addresses = self._addresses_in(owners)
        self._found = self._values_in(owners)
        parts = self._parts_in(owners)
        self._sizes = self._sizes_in(owners, parts)
        self._filled = [i for i, each in enumerate(parts) if each]
        items = self._items_in(owners, parts)
        self._items = [*map(id, items)]
        # An object's identity is its own only while the object exists.
        self._kept = [item for item in items if type(item) in _FIXED]

    def _owners(self) -> Owners | None:
        """The attributes of modules and others; None if a module is gone, or has another class."""
        modules = [reference() for reference in self._modules]
        if [*map(type, modules)] != self._classes:
            return None
        return [vars(each) for each in (*modules, *self._others)]

    def _addresses_in(self, owners: Owners) -> list[int]:
        """Of parameters and buffers, and the identities of objects that may hold others."""
        dictionaries = [owners[i][name] for i, name in self._tensors]
        objects = [owners[i].get(name) for i, name in self._objects]
        return [
            *[tensor.data_ptr() for each in dictionaries for tensor in each.values() if tensor is not None],
            *map(id, objects),
            *[each.data_ptr() for each in objects if type(each) is Tensor],
        ]

    def _values_in(self, owners: Owners) -> list[object]:
        """The attributes that hold no tensors."""
        return [*chain.from_iterable([read(each) for read, each in zip(self._readers, owners, strict=True)])]

    def _parts_in(self, owners: Owners) -> list[dict[str, Any]]:
        return [*chain.from_iterable(map(_PARTS, owners[: len(self._modules)]))]

    def _sizes_in(self, owners: Owners, parts: list[dict[str, Any]]) -> list[int]:
        return [*map(len, owners), *map(len, parts)]

    def _items_in(self, owners: Owners, parts: list[dict[str, Any]]) -> list[object]:
        dictionaries = [parts[i] for i in self._filled] + [owners[i][name] for i, name in self._dictionaries]
        sequences = [owners[i][name] for i, name in self._sequences]
        return [*chain.from_iterable((*dictionaries, *map(dict.values, dictionaries), *sequences))]

    def _has_same_objects(self, owners: Owners) -> bool:
        try:
            if not all(map(is_, self._values_in(owners), self._found)):
                return False
        except KeyError:  # an attribute is gone
            return False
        # Dictionaries and lists are the same ones, if memory holds. What is in them?
        parts = self._parts_in(owners)
        return self._sizes_in(owners, parts) == self._sizes and [*map(id, self._items_in(owners, parts))] == self._items

    def _values(self, modules: list[nn.Module]) -> Hashable:
        return (*map(self._of, self._others), *map(self._of_module, modules))

    def _of_module(self, module: nn.Module) -> Hashable:
        return (
            id(type(module)),
            module.training,
            self._of(module),
            *[parameter.data_ptr() for parameter in module._parameters.values() if parameter is not None],
            *[buffer.data_ptr() for buffer in module._buffers.values() if buffer is not None],
            *module._forward_hooks,
            *module._forward_pre_hooks,
        )

    def _of(self, owner: object) -> Hashable:
        return tuple([_of_value(value) for name, value in vars(owner).items() if name not in self._ignored])


def _of_value(value: object) -> Hashable:
    if type(value) in _PLAIN:
        return value  # type: ignore[return-value]
    if isinstance(value, dict) and len(value) <= MAX_VALUES:
        return (*map(_of_item, value), *map(_of_item, value.values()))
    if isinstance(value, _SEQUENCES) and len(value) <= MAX_VALUES:
        return tuple(map(_of_item, value))
    return id(value)


def _of_item(item: object) -> Hashable:
    return item if type(item) in _PLAIN else id(item)  # type: ignore[return-value]


def _reader(names: Sequence[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    return itemgetter(*names, names[0]) if names else lambda _: ()  # of a single name it would read no tuple
