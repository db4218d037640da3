"""What is written down is read again, to the last digit; what is damaged is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from checkpoint.rewriting import edited

from qgemm import CheckpointError
from qgemm.streaming.journal import Begun, Finished, Journal

JOURNAL = Journal(
    {"scheme": "int8"},
    {"a.safetensors": Finished("12 ab", {"x": 1 / 3, "y": 0.0})},
    {
        name: Begun(name, {"w": (17, "00000000000000ff")}, 3, {"z": 2**0.5}, 4, (math.pi * 1e-9, 1e300 / 3), 123)
        for name in ("b.safetensors", "c.safetensors")
    },
)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    for journal in (JOURNAL, Journal(None, {}, {})):
        journal.write(tmp_path / "journal.json")
        assert Journal.read(tmp_path / "journal.json") == journal
    assert [path.name for path in tmp_path.iterdir()] == ["journal.json"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("finished", {"a": 1}),
        ("finished", {"a": {"fingerprint": "1 a", "errors": {"x": "much"}}}),
        ("begun", []),
        ("begun", {"name": "b"}),
        ("units", -1),
        ("written", {"w": 3}),
        ("squares", [1.0]),
        ("errors", None),
    ],
)
def test_a_journal_that_is_damaged(key: str, value: Any, tmp_path: Path) -> None:
    JOURNAL.write(tmp_path / "journal.json")
    with edited(tmp_path / "journal.json") as values:
        (values if key in values else values["begun"]["c.safetensors"])[key] = value
    with pytest.raises(CheckpointError, match=r"journal\.json is damaged: pass resume=False"):
        Journal.read(tmp_path / "journal.json")
