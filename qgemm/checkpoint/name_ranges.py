"""Names of layers, many in one line: ``model.layers.[0-79].mlp.up_proj`` for those of 80 blocks.

If names differ only in a part, between dots, that is a number, that part becomes a list of ranges in brackets. A part
that itself begins with a bracket gets another one in front.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable

MAX_NAMES = 500_000
"""The maximum number of names that are read, because a line of text could stand for any number."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_SPAN = "[0-9]{1,9}(?:-[0-9]{1,9})?"
_RANGES = re.compile(rf"\[({_SPAN}(?:,{_SPAN})*)\]")


def collapse(names: Iterable[str]) -> list[str]:
    """As few lines as possible for ``names``, each contained once, in the order of each line's first name."""
    rows = [[f"[{part}" if part.startswith("[") else part for part in name.split(".")] for name in names]
    # From the right: names that all experts of a block share are merged first, and then perhaps those of all blocks.
    for place in reversed(range(max(map(len, rows), default=0))):
        groups: dict[tuple[str, ...], list[list[str]]] = {}
        for row in rows:
            is_number = place < len(row) and _NUMBER.fullmatch(row[place])
            key = (*row[:place], "[", *row[place + 1 :]) if is_number else tuple(row)
            groups.setdefault(key, []).append(row)
        rows = [_merged(group, place) for group in groups.values()]
    return [".".join(row) for row in rows]


def _merged(rows: list[list[str]], place: int) -> list[str]:
    first = rows[0]
    if len(rows) == 1:
        return first
    ranges = runs(int(row[place]) for row in rows)
    text = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
    return [*first[:place], f"[{text}]", *first[place + 1 :]]


def runs(numbers: Iterable[int]) -> list[list[int]]:
    """The first and the last of each run of successive numbers, ascending."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def expand(lines: Iterable[str]) -> list[str]:
    """The names from which ``collapse`` made ``lines``; raises ``ValueError`` for other brackets and too many names."""
    names: list[str] = []
    for line in lines:
        parts = [_numbers(part, line) for part in line.split(".")]
        if len(names) + math.prod(map(len, parts)) > MAX_NAMES:
            raise ValueError(f"{line}, and with it over {MAX_NAMES} names")
        names += map(".".join, itertools.product(*parts))
    return names


def _numbers(part: str, line: str) -> list[str]:
    if not part.startswith("["):
        return [part]
    if part.startswith("[["):
        return [part[1:]]
    match = _RANGES.fullmatch(part)
    if match is None:
        raise ValueError(f"{line}, where {part} isn't a list of ranges")
    found: list[str] = []
    for span in match[1].split(","):
        low, _, high = span.partition("-")
        count = int(high or low) - int(low) + 1
        if count < 1 or len(found) + count > MAX_NAMES:
            raise ValueError(f"{line}, where {part} isn't a list of ranges, or a very long one")
        found += map(str, range(int(low), int(low) + count))
    return found
