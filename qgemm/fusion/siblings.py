"""Finds layers that read the same input in modules that aren't fused: those that were called with the same tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from qgemm.nn.blocks.merged import why_apart
from qgemm.nn.linear_layer import LinearLayer


class SiblingWatch:
    """Observes the inputs of the quantized layers in each module."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """``modules``: a model's, by name."""
        self._modules = modules
        self._parents: dict[str, list[LinearLayer]] = {}
        for name, module in modules.items():
            own = [child for child in module._modules.values() if isinstance(child, LinearLayer)]
            if len(own) > 1:
                self._parents[name] = own
        self._given: dict[LinearLayer, weakref.ref[Tensor]] = {}
        self._groups: dict[str, list[list[LinearLayer]]] = {name: [] for name in self._parents}

    def hooks(self) -> list[Any]:
        """Handles of hooks on the layers."""
        return [
            layer.register_forward_pre_hook(self._hook(name)) for name, own in self._parents.items() for layer in own
        ]

    def _hook(self, parent: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def see(layer: Any, args: tuple[Any, ...]) -> None:
            if len(args) != 1 or not isinstance(args[0], Tensor) or layer in self._given:
                return
            self._given[layer] = weakref.ref(args[0])
            for group in self._groups[parent]:
                if self._given[group[0]]() is args[0]:
                    group.append(layer)
                    return
            self._groups[parent].append([layer])

        return see

    def found(self) -> Iterator[tuple[str, list[LinearLayer]]]:
        """Layers that can be merged and aren't merged yet, with the name of the module that contains them."""
        for parent, groups in self._groups.items():
            for group in groups:
                if len(group) > 1 and all(layer.merged is None for layer in group) and not why_apart(group):
                    yield parent, group
