"""The tables of ``docs/numerics.md``: what they state holds, and the page shows those that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import numerics

PAGE = (Path(__file__).parent.parent / "docs/numerics.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "ROWS", 32)
    monkeypatch.setattr(numerics, "N", 64)
    monkeypatch.setattr(numerics, "K", 256)


def percent(text: str) -> float:
    return float(text.rstrip("%")) / 100


def test_the_page_has_every_table() -> None:
    assert re.findall(r"^`--part (\w+)`$", PAGE, flags=re.MULTILINE) == list(numerics.PARTS)
    for name in ("clipping", "weights", "batches"):
        header, rows = numerics.PARTS[name]()
        assert "| " + " | ".join(header) + " |" in PAGE
        assert all(f"| {row[0]} |" in PAGE for row in rows)


def test_rows_do_not_depend_on_others() -> None:
    _, rows = numerics.batches()
    assert all(row[1] == "0 of 64" for row in rows)


def test_range() -> None:
    rows = {row[0]: row[1:] for row in numerics.magnitudes()[1]}
    assert all(percent(rows[factor][0]) < 0.02 for factor in ("1e-30", "1e-10", "1e+00", "1e+10", "1e+30"))
    assert rows["one NaN"] == rows["one Inf"] == ["others: the same bits", "1 of 32"]
    assert rows["zeros"][0] == "0%"


def test_rotation_and_columns_in_16_bits_take_outliers() -> None:
    header, rows = numerics.distributions()
    worst = dict(zip(header[1:], map(percent, rows[-1][1:]), strict=True))
    assert worst["int8-hadamard"] < worst["int8"]
    assert worst["int8-outliers-16"] < worst["int8"] / 5


def test_the_command_prints_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    numerics.main(["--part", "clipping"])
    assert "| inputs times | int8-static | int8 |" in capsys.readouterr().out
