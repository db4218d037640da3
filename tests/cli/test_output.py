"""Tables on terminals of any width: every column is there, and no line is longer than the terminal is wide."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.command import run
from qgemm_cli import output
from qgemm_cli.output import print_table

Terminal = Callable[[int], None]

BENCH = (
    ("layers", "count", "N x K", "M", "int8", "bf16", "fp32", "bf16 / int8", "fp32 / int8", "spread"),
    ("attention.output.dense and 4 more", "25", "384 x 384", "32", "81.3", "37.8", "79.8", "0.46", "0.98", "3 %"),
    ("all of them", "37", "", "32", "3,663.1", "2,144.9", "5,804.8", "0.59", "1.58", "12 %"),
)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Makes standard output a terminal of so many columns."""

    def of(width: int) -> None:
        make = lambda: output._Output(highlight=False, force_terminal=True, width=width, no_color=True)  # noqa: E731
        monkeypatch.setattr(output, "_console", make)

    return of


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def joined(text: str) -> str:
    """Without white space, so that what was folded is whole again where nothing stands beside it."""
    return "".join(plain(text).split())


@pytest.mark.parametrize("width", [300, 120, 100, 80, 60, 40, 20])
def test_no_column_is_lost(width: int, terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    header, *rows = BENCH
    terminal(width)
    print_table(header, rows, right=(1, *range(3, 10)))
    shown = plain(capsys.readouterr().out)
    assert max(map(len, shown.splitlines())) <= width
    for row in rows:
        for cell in row[1:]:
            assert cell in shown, cell
    for word in " ".join(header[1:]).split():
        assert word in shown
    assert joined(rows[1][0]) in joined(shown)


def test_a_table_that_fits_has_a_line_for_each_row(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    header, *rows = BENCH
    for width, lines in ((300, 2), (80, 4)):
        terminal(width)
        print_table(header, rows, right=(1, *range(3, 10)))
        shown = plain(capsys.readouterr().out)
        body = shown.split("\n")[-10:]
        assert sum(bool(line.strip()) for line in body) >= lines
        row = next(line for line in shown.splitlines() if "81.3" in line)
        # In one line, in order.
        places = [row.index(cell) for cell in rows[0][3:]]
        assert places == sorted(places)


def test_a_narrow_terminal_gets_a_block_for_each_row(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    header, *rows = BENCH
    terminal(40)
    print_table(header, rows, right=(1, *range(3, 10)))
    lines = plain(capsys.readouterr().out).splitlines()
    start = next(index for index, line in enumerate(lines) if "attention.output" in line)
    block = [line.strip() for line in lines[start + 1 : start + 10]]
    assert {"count: 25", "N x K: 384 x 384", "M: 32", "bf16 / int8: 0.46"} <= set(block)
    assert not any(line.startswith("N x K:") for line in map(str.strip, lines[start + 10 :]))  # of the empty cell


@pytest.mark.parametrize("width", [80, 40])
def test_commands_show_all_of_their_columns(
    width: int, terminal: Terminal, float_folder: Path, int8_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qgemm_cli.commands.bench.copy_count", lambda size, device: 2)
    terminal(width)
    for arguments, columns in (
        (("compare", float_folder, int8_folder), "count A B mean largest error difference float32 int8"),
        (("bench", int8_folder, "--m", "1", "--device", "cpu", "--quick"), "N x K M int8 bf16 fp32 / spread"),
        (("inspect", int8_folder), "count kind stored as shape bytes"),
    ):
        shown = plain(run(*arguments).stdout)
        assert max(map(len, shown.splitlines())) <= width
        for word in columns.split():
            assert re.search(rf"(^|\s){re.escape(word)}(:|\s|$)", shown), word
