"""A command's output: tables as text, one JSON document for programs, and names that are safe to show."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

_LEAST_WIDTH = 16  # of a text column that is at least as wide; text is folded down to this first
_WIDTH_OF_A_PIPE = 1000  # files and pipes have no width: nothing is cut for them


def printable(text: str, limit: int = 120) -> str:
    """``text`` with what would control a terminal, such as escape sequences, spelled out; a long text is cut inside."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}...{text[-half:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_json(document: dict[str, Any]) -> None:
    """Prints one JSON document to standard output; NaN and infinities, which JSON lacks, become null."""
    print(json.dumps(_finite(document), indent=2, allow_nan=False), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_lines(lines: Iterable[str]) -> None:
    """Prints plain lines to standard output, wrapped at a terminal's width."""
    console = _console()
    for line in lines:
        console.print(Text(line))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int]) -> None:
    """Prints a table to standard output; ``right``: the columns that are aligned to the right.

    If a terminal is too narrow, text is folded, but numbers never are; if that isn't enough, each row becomes a block
    of lines: its first cell, followed by the others with their columns' names.
    """
    console, numeric = _console(), set(right)
    cells = [list(row) for row in rows]
    natural = [max(map(cell_len, (name, *texts))) for name, *texts in zip(columns, *cells, strict=True)]
    least = []
    for index, (name, *texts) in enumerate(zip(columns, *cells, strict=True)):
        widest = max(map(cell_len, texts), default=0)
        words = max(map(cell_len, name.split()), default=0)
        least.append(max(words, widest if index in numeric else min(widest, _LEAST_WIDTH)))
    for gap in (3, 1):
        room = console.width - 2 - gap * (len(columns) - 1)
        if sum(natural if gap > 1 else least) <= room:
            break
    else:
        for line in _blocks(columns, cells):
            console.print(line)
        return
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1 if gap > 1 else 0),
        pad_edge=False,
    )
    for index, (name, width) in enumerate(zip(columns, _shrunk(natural, least, room), strict=True)):
        table.add_column(name, justify="right" if index in numeric else "left", overflow="fold", width=width)
    for row in cells:
        table.add_row(*map(Text, row))  # Text, because names in brackets aren't markup
    console.print(table)


def _shrunk(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths that fit into ``room``: the widest column shrinks first, and none falls below its minimum."""
    widths = list(natural)
    while sum(widths) > room:
        widths[max((i for i in range(len(widths)) if widths[i] > least[i]), key=widths.__getitem__)] -= 1
    return widths


def _blocks(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[Text]:
    yield Text()
    for first, *others in rows:
        yield Text(first, style="bold")
        yield from (Text(f"  {name}: {cell}") for name, cell in zip(columns[1:], others, strict=True) if cell)
        yield Text()


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise  # Rich would exit with 1, which means problems found


def _console() -> Console:
    console = _Output(highlight=False)
    return console if console.is_terminal else _Output(highlight=False, width=_WIDTH_OF_A_PIPE)


@contextmanager
def progress_bar(title: str, total: float, shown: bool) -> Iterator[Callable[[float], object]]:
    """Shows a bar on standard error while the block runs, if ``shown`` and if that is a terminal.

    Yields the function that advances it by how much more is finished.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda amount: progress.update(task, advance=amount)


@contextmanager
def bars_on_a_terminal() -> Iterator[None]:
    """Inside, transformers shows progress bars only on a terminal, as qgemm does."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    if was_on and not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
