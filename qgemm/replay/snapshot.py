"""``Snapshot``: notices whether anything that is built into a captured graph of a model was changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import nn

Attributes = list[dict[str, Any]]

_PLAIN = frozenset((bool, int, float, str, type(None)))
_SEQUENCES = (list, tuple, set)
# What a module has from its class is examined one by one.
_OF_MODULES = frozenset(vars(nn.Module()))
_TENSORS = ("_parameters", "_buffers")
_PARTS = ("_modules", "_forward_hooks", "_forward_pre_hooks")
MAX_VALUES = 64
"""The maximum length of a list or a dictionary: longer ones are tables, compared by identity only."""


class Snapshot:
    """The state of ``model``, and of ``others``: objects that its modules read, such as a config.

    That is: attributes, compared by value if they are numbers and strings, also in lists and dictionaries, and by
    identity otherwise; for modules, also the class, hooks, and addresses of tensors. Changes inside other objects
    aren't noticed. A snapshot keeps no module and no tensor alive.
    """

    def __init__(self, model: nn.Module, others: Iterable[object] = (), ignored: Iterable[str] = ()) -> None:
        """Takes about 15 us per module. Attributes with the names ``ignored`` may change."""
        self._model = weakref.ref(model)
        self._ignored = _OF_MODULES.union(ignored)
        self._others = list({id(other): other for other in others}.values())
        self._take(list(model.modules()))

    def holds(self) -> bool:
        """Whether nothing has changed since. Takes about 1 us per module; more if an attribute has another object."""
        modules = [reference() for reference in self._modules]
        if [*map(type, modules)] == self._classes and self._objects.are_those_of([*modules, *self._others]):
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
        self._objects = _Objects([*modules, *self._others])

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


class _Objects:
    """Which objects the attributes of ``owners`` are, and the addresses of tensors: the same ones have the same values.

    They are found by loops in C, several times as fast as values are compared.
    """

    def __init__(self, owners: Sequence[object]) -> None:
        attributes = [vars(owner) for owner in owners]
        self._readers = [_reader(each) for each in attributes]
        self._tensors = [(i, name) for i, each in enumerate(attributes) for name in _TENSORS if each.get(name)]
        self._dictionaries = [(i, name) for i, each in enumerate(attributes) for name in _PARTS if name in each]
        self._sequences = []
        for i, each in enumerate(attributes):
            for name in each.keys() - _OF_MODULES:
                if isinstance(each[name], dict) and len(each[name]) <= MAX_VALUES:
                    self._dictionaries.append((i, name))
                elif isinstance(each[name], _SEQUENCES) and len(each[name]) <= MAX_VALUES:
                    self._sequences.append((i, name))
        self._identities = [*map(id, values := self._values(attributes))]
        self._sizes = self._lengths(attributes)
        self._item_identities = [*map(id, items := self._items(attributes))]
        self._addresses = self._addresses_of(attributes)
        # An object's identity is its own only while the object exists.
        self._kept = [each for each in (*values, *items) if type(each) in _PLAIN]

    def are_those_of(self, owners: Sequence[object]) -> bool:
        """Whether ``owners``, in the same order, have the same objects."""
        attributes = [vars(owner) for owner in owners]
        try:
            return (
                [*map(id, self._values(attributes))] == self._identities
                # Dictionaries and lists are the same ones, then. What is in them?
                and self._lengths(attributes) == self._sizes
                and [*map(id, self._items(attributes))] == self._item_identities
                and self._addresses_of(attributes) == self._addresses
            )
        except KeyError:  # an attribute is gone
            return False

    def _values(self, attributes: Attributes) -> list[object]:
        return [*chain.from_iterable([read(each) for read, each in zip(self._readers, attributes, strict=True)])]

    def _lengths(self, attributes: Attributes) -> list[int]:
        of_modules = [each[name] for each in attributes for name in _TENSORS if name in each]
        dictionaries = [attributes[i][name] for i, name in self._dictionaries]
        return [*map(len, attributes), *map(len, of_modules), *map(len, dictionaries)]

    def _items(self, attributes: Attributes) -> list[object]:
        dictionaries = [found for i, name in self._dictionaries if (found := attributes[i][name])]
        sequences = [attributes[i][name] for i, name in self._sequences]
        return [*chain.from_iterable((*dictionaries, *map(dict.values, dictionaries), *sequences))]

    def _addresses_of(self, attributes: Attributes) -> list[int]:
        return [
            tensor.data_ptr()
            for i, name in self._tensors
            for tensor in attributes[i][name].values()
            if tensor is not None
        ]


def _reader(attributes: dict[str, Any]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Reads all attributes besides those that every module has from its class, but whether it is in training mode."""
    names = [name for name in attributes if name not in _OF_MODULES or name == "training"]
    return itemgetter(*names, names[0]) if names else lambda _: ()  # of a single name it would read no tuple
