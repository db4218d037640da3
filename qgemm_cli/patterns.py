"""Shows names with the same pattern in one line: ``model.layers.{0..31}.mlp.up_proj``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from qgemm.checkpoint.name_ranges import runs

Item = TypeVar("Item")

# Longer numbers aren't positions in a list, and Python refuses to parse those of thousands of digits.
_NUMBER = re.compile(r"(?<![^.])\d{1,6}(?![^.])")


def pattern_of(name: str) -> str:
    """``name`` with ``{}`` for each part that is a number."""
    return _NUMBER.sub("{}", name.replace("{", "(").replace("}", ")"))


def alike(items: Iterable[Item], key: Callable[[Item], object]) -> list[list[Item]]:
    """``items`` in groups of the same ``key``, in the order of each group's first one."""
    groups: dict[object, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def collapse(names: Iterable[str]) -> str:
    """Shows names with the same pattern as one: each place has the numbers that occur there."""
    numbers: list[set[int]] = []
    pattern = ""
    for name in names:
        pattern = pattern_of(name)
        found = [int(number) for number in _NUMBER.findall(name)]
        if not numbers:
            numbers = [set() for _ in found]
        for known, number in zip(numbers, found, strict=True):
            known.add(number)
    parts = pattern.split("{}")
    shown = [ranges(known) for known in numbers]
    return parts[0] + "".join(number + part for number, part in zip(shown, parts[1:], strict=True))


def ranges(numbers: Iterable[int]) -> str:
    """``"{0..3,7}"`` for 0, 1, 2, 3 and 7; a single number as it is."""
    distinct = set(numbers)
    shown = [str(low) if low == high else f"{low}..{high}" for low, high in runs(distinct)]
    return shown[0] if len(distinct) == 1 else "{" + ",".join(shown) + "}"


def natural_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts ``layers.2`` before ``layers.10``."""
    return tuple((0, int(part), "") if _NUMBER.fullmatch(part) else (1, 0, part) for part in name.split("."))
