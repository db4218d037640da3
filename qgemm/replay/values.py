"""Arguments and outputs of a forward, as their tensors and the rest: what a graph is captured for, and what it gives.

Only what can be taken apart without loss counts: tensors, numbers, strings, None and the like, and tuples, lists and
dictionaries of these, also named tuples and the outputs of transformers and diffusers. Others, a cache for example,
have state that a graph would build in.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = frozenset(
    (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice)
    + (torch.dtype, torch.device, torch.layout, torch.memory_format)
)


class UnfitValueError(TypeError):
    """A value that is neither a tensor nor fixed."""


class _Place(int):
    """Where a tensor of a structure lies in the list of its tensors."""


def take_apart(value: Any, tensors: list[Tensor]) -> Any:
    """Appends all tensors of ``value`` to ``tensors``; returns its structure, for ``put_together``.

    Raises ``UnfitValueError`` for values of other kinds.
    """
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if kind in _PLAIN or isinstance(value, enum.Enum):
        return value
    if kind is tuple or kind is list:
        return kind([take_apart(item, tensors) for item in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value._make([take_apart(item, tensors) for item in value])  # type: ignore[attr-defined]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        # A copy, which keeps the class. As outputs of transformers and diffusers, it may have its items as attributes.
        structure = copy.copy(value)
        for key, item in value.items():
            structure[key] = take_apart(item, tensors)
        return structure
    raise UnfitValueError(f"{kind.__module__}.{kind.__qualname__}")


def put_together(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """The value of ``structure``, which ``take_apart`` made, with other ``tensors``."""
    kind = type(structure)
    if kind is _Place:
        return tensors[structure]
    if kind is tuple or kind is list:
        return kind([put_together(item, tensors) for item in structure])
    if isinstance(structure, tuple):
        return structure._make([put_together(item, tensors) for item in structure])  # type: ignore[attr-defined]
    if isinstance(structure, dict):
        value = copy.copy(structure)
        for key, item in structure.items():
            value[key] = put_together(item, tensors)
        return value
    return structure


def form_of(structure: Any) -> Hashable:
    """The same for structures with the same kinds and values, whatever their tensors are."""
    kind = type(structure)
    if isinstance(structure, tuple | list):
        return kind, *map(form_of, structure)
    if isinstance(structure, dict):
        return kind, *structure, *map(form_of, structure.values())
    if kind is slice:
        return kind, structure.start, structure.stop, structure.step
    return kind, structure
