"""Chooses the layers of a float model to be swapped, and their schemes: ``select_layers``, ``apply_schemes``.

``quantize_model`` and ``calibrate`` both use it, so that the calibrated layers are those that get swapped. Patterns
name layers in the same way everywhere: the name of a layer, or of a module that contains layers; with ``*``, ``?`` or
``[`` in it, a glob over such names, in which ``*`` matches dots too; or a regular expression, compiled or as text after
``re:``, which may match any part of a layer's name.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from qgemm.model.survey import Layer, find_layers
from qgemm.nn import QuantLayer
from qgemm.scheme import QuantScheme, resolve_scheme

Pattern: TypeAlias = "str | re.Pattern[str]"
Patterns: TypeAlias = "Pattern | Iterable[Pattern] | None"
SchemeChoice: TypeAlias = "str | QuantScheme | Mapping[Pattern, str | QuantScheme | None]"

_MANY = 5
_REGULAR_EXPRESSION = "re:"


def select_layers(model: nn.Module, skip: Patterns, include: Patterns = None) -> list[Layer]:
    """Every layer of ``model``; those without a ``reason`` are to be swapped.

    ``include`` overrides what stays in float by default; layers that ``skip`` matches stay in float even so.

    Raises ``ValueError`` if the model is already quantized, if a pattern matches no layer, if an ``include`` pattern
    matches only layers that stay in float anyway, or if nothing is to be swapped; ``TypeError`` if either contains
    anything but patterns.
    """
    _check_not_quantized(model)
    layers = find_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layer, so there is nothing to quantize")
    included = list(_matches_of("include", as_patterns("include", include), layers))
    for _, matched in included:
        for layer in matched:
            layer.reason = layer.obstacle
    for shown, matched in _matches_of("skip", as_patterns("skip", skip), layers):
        _leave(matched, f"skip={shown!r}")
    for shown, matched in included:
        if all(layer.reason for layer in matched):
            raise ValueError(f"include: {shown!r} matches only layers that can't be quantized: {_reasons(matched)}")
    _check_something_to_swap(model, layers)
    return layers


def resolve_schemes(scheme: SchemeChoice) -> dict[Pattern, QuantScheme | None]:
    """The scheme for each pattern, in order, None for float; a single scheme applies to every layer.

    Raises ``ValueError`` for an unknown scheme and for a mapping without schemes, ``TypeError`` for anything else.
    """
    if not isinstance(scheme, Mapping):
        return {"*": resolve_scheme(scheme)}
    if not scheme:
        raise ValueError('scheme is an empty mapping: give patterns their schemes, as {"*.mlp.*": "int4", "*": "int8"}')
    patterns = as_patterns("scheme", list(scheme))
    chosen = (None if each is None else resolve_scheme(each) for each in scheme.values())
    return dict(zip(patterns, chosen, strict=True))


def apply_schemes(
    model: nn.Module, layers: list[Layer], schemes: Mapping[Pattern, QuantScheme | None]
) -> dict[str, QuantScheme]:
    """The scheme of each layer to be swapped, by name: that of the first pattern that matches it.

    Layers whose scheme is None, and those that no pattern matches, get a ``reason``. Experts get
    ``QuantScheme.for_experts``.

    Raises ``ValueError`` if a pattern matches no layer, or only layers that earlier patterns match, or if nothing is
    left to swap.
    """
    chosen: dict[str, QuantScheme] = {}
    waiting = {layer.name: layer for layer in layers}
    for scheme, (shown, matched) in zip(schemes.values(), _matches_of("scheme", list(schemes), layers), strict=True):
        own = [layer for layer in matched if waiting.pop(layer.name, None)]
        if not own:
            raise ValueError(
                f"scheme: {shown!r} comes after patterns that match all of its layers, and the first match wins: put "
                "it before them"
            )
        if scheme is None:
            _leave(own, f"scheme={{{shown!r}: None}}")
        else:
            chosen.update({each.name: each.scheme_for(scheme) for each in own if not each.reason})
    _leave(list(waiting.values()), "no pattern of scheme matches it")
    _check_something_to_swap(model, layers)
    return chosen


def listed(names: Sequence[object], many: int = _MANY, show: Callable[[object], str] = repr) -> str:
    """The first of ``names``, in the form for errors, and how many more there are."""
    more = f" and {len(names) - many} more" if len(names) > many else ""
    return ", ".join(map(show, names[:many])) + more


def _check_not_quantized(model: nn.Module) -> None:
    kinds = Counter(type(module).__name__ for module in model.modules() if isinstance(module, QuantLayer))
    if kinds:
        counted = " and ".join(
            f"{count} of its layers {'is' if count == 1 else 'are'} {kind}" for kind, count in kinds.items()
        )
        raise ValueError(
            f"{type(model).__name__} is quantized already: {counted}. "
            "Start from the float model, and pass in skip what must stay in float"
        )


def as_patterns(argument: str, given: Patterns) -> list[Pattern]:
    """The patterns in ``given``, the value of ``argument``, as a list; ``"re:..."`` is compiled.

    Raises ``TypeError`` for anything but patterns, ``ValueError`` for an invalid regular expression.
    """
    wanted = "names, globs and regular expressions"
    if given is None or isinstance(given, str | re.Pattern):
        given = [] if given is None else [given]
    elif not isinstance(given, Iterable):
        raise TypeError(f"{argument} is {given!r}; it takes {wanted}, one or several")
    patterns = []
    for pattern in given:
        if not isinstance(pattern, str | re.Pattern):
            raise TypeError(f"{argument} holds {pattern!r}; it takes {wanted}")
        if isinstance(pattern, str) and pattern.startswith(_REGULAR_EXPRESSION):
            try:
                pattern = re.compile(pattern.removeprefix(_REGULAR_EXPRESSION))
            except re.error as error:
                raise ValueError(f"{argument}: {pattern!r} isn't a valid regular expression: {error}") from error
        patterns.append(pattern)
    return patterns


def shown_pattern(pattern: Pattern) -> str:
    """A pattern as text that ``as_patterns`` accepts."""
    if isinstance(pattern, str):
        return pattern
    given = pattern.flags & ~re.compile(pattern.pattern).flags
    flags = "".join(letter for letter in "aimsx" if given & getattr(re, letter.upper()))
    return _REGULAR_EXPRESSION + (f"(?{flags})" if flags else "") + pattern.pattern


def _matches_of(argument: str, patterns: list[Pattern], layers: list[Layer]) -> Iterator[tuple[str, list[Layer]]]:
    """Each pattern of ``argument``, in the form for errors, with the layers that it matches, at least one."""
    for pattern in patterns:
        matched = [layer for layer in layers if any(_matches(pattern, name) for name in layer.names)]
        if not matched:
            raise ValueError(_no_match(argument, pattern, layers))
        yield pattern if isinstance(pattern, str) else pattern.pattern, matched


def _leave(layers: list[Layer], reason: str) -> None:
    for layer in layers:
        if not layer.reason:
            layer.reason, layer.is_wish = reason, True


def _matches(pattern: Pattern, name: str) -> bool:
    if isinstance(pattern, re.Pattern):
        return pattern.search(name) is not None
    containers = _with_containers(name)
    if pattern in containers:
        return True
    return any(character in pattern for character in "*?[") and any(fnmatchcase(each, pattern) for each in containers)


def _with_containers(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _no_match(argument: str, pattern: Pattern, layers: list[Layer]) -> str:
    if isinstance(pattern, re.Pattern):
        return f"{argument}: the regular expression {pattern.pattern!r} matches no linear layer's name"
    names = sorted({container for layer in layers for name in layer.names for container in _with_containers(name)})

    def as_glob(glob: str) -> list[str]:  # other libraries match parts of names
        return [glob] if pattern and any(fnmatchcase(name, glob) for name in names) else []

    close = as_glob(f"*.{pattern}") or difflib.get_close_matches(pattern, names, n=3) or as_glob(f"*{pattern}*")
    hint = f": did you mean {' or '.join(map(repr, close))}?" if close else "; names are as in model.named_modules()"
    return f"{argument}: {pattern!r} matches no linear layer, nor a module that contains one{hint}"


def _check_something_to_swap(model: nn.Module, layers: list[Layer]) -> None:
    if not all(layer.reason for layer in layers):
        return
    can_be_included = any(not layer.obstacle and not layer.is_wish for layer in layers)
    way_out = "; include=[...] overrules what stays by default" if can_be_included else ""
    raise ValueError(
        f"nothing to quantize: all {len(layers)} linear layers of {type(model).__name__} stay in float "
        f"({_reasons(layers)}){way_out}"
    )


def _reasons(layers: list[Layer]) -> str:
    reasons = Counter(layer.reason for layer in layers)
    return "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
