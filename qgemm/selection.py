"""``select_layers``: which layers of a float model are to be swapped, once what the user wants skipped is out.

``quantize_model`` and ``calibrate`` both ask here, so that what is calibrated is what is swapped.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from qgemm.nn import QuantLayer
from qgemm.survey import Layer, find_layers

Pattern: TypeAlias = "str | re.Pattern[str]"

_MANY = 5


def select_layers(model: nn.Module, skip: Pattern | Iterable[Pattern] | None) -> list[Layer]:
    """Every layer of ``model``; those without a ``reason`` are to be swapped.

    Raises ``ValueError`` if the model is quantized already, a pattern matches no layer, or nothing is to be swapped;
    ``TypeError`` if ``skip`` holds anything but patterns.
    """
    _check_not_quantized(model)
    layers = find_layers(model)
    _apply_skip(layers, skip)
    if all(layer.reason for layer in layers):
        raise ValueError(_nothing_to_swap(model, layers))
    return layers


def listed(names: list[str]) -> str:
    """The first of ``names``, as errors show them, and how many more there are."""
    more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
    return ", ".join(map(repr, names[:_MANY])) + more


def _check_not_quantized(model: nn.Module) -> None:
    kinds = Counter(type(module).__name__ for module in model.modules() if isinstance(module, QuantLayer))
    if kinds:
        counted = " and ".join(f"{count} of its layers are {kind}" for kind, count in kinds.items())
        raise ValueError(
            f"{type(model).__name__} is quantized already: {counted}. "
            "Start from the float model, and say in skip what is to stay in float"
        )


def as_patterns(skip: Pattern | Iterable[Pattern] | None) -> list[Pattern]:
    """What ``skip`` holds, a list; raises ``TypeError`` if that is anything but patterns."""
    if skip is None or isinstance(skip, str | re.Pattern):
        return [] if skip is None else [skip]
    wanted = "names, globs and compiled regular expressions"
    if not isinstance(skip, Iterable):
        raise TypeError(f"skip is {skip!r}; it takes {wanted}, one or several")
    patterns = list(skip)
    for pattern in patterns:
        if not isinstance(pattern, str | re.Pattern):
            raise TypeError(f"skip holds {pattern!r}; it takes {wanted}")
    return patterns


def _apply_skip(layers: list[Layer], skip: Pattern | Iterable[Pattern] | None) -> None:
    for pattern in as_patterns(skip):
        matched = [layer for layer in layers if any(_matches(pattern, name) for name in layer.names)]
        if not matched:
            raise ValueError(_no_match(pattern, layers))
        for layer in matched:
            shown = pattern if isinstance(pattern, str) else pattern.pattern
            layer.reason = layer.reason or f"skip={shown!r}"


def _matches(pattern: Pattern, name: str) -> bool:
    if isinstance(pattern, re.Pattern):
        return pattern.search(name) is not None
    containers = _with_containers(name)
    if any(character in pattern for character in "*?["):
        return any(fnmatchcase(container, pattern) for container in containers)
    return pattern in containers


def _with_containers(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _no_match(pattern: Pattern, layers: list[Layer]) -> str:
    if isinstance(pattern, re.Pattern):
        return f"skip: the regular expression {pattern.pattern!r} is found in no linear layer's name"
    names = sorted({container for layer in layers for name in layer.names for container in _with_containers(name)})
    close = difflib.get_close_matches(pattern, names, n=3)
    hint = f": did you mean {' or '.join(map(repr, close))}?" if close else "; names are as in model.named_modules()"
    return f"skip: {pattern!r} matches no linear layer, nor a module that contains one{hint}"


def _nothing_to_swap(model: nn.Module, layers: list[Layer]) -> str:
    kind = type(model).__name__
    if not layers:
        return f"{kind} has no linear layer, so there is nothing to quantize"
    if layers[0].name == "":
        return f"{kind} is itself one layer, which can't be swapped in place: use QuantLinear.from_linear"
    reasons = Counter(layer.reason for layer in layers)
    listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
    return f"nothing to quantize: all {len(layers)} linear layers of {kind} stay in float ({listed})"
