"""What docs/cli.md says of the JSON documents is what the commands print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cli.command import run_json
from cli.test_compare import write_tokenizer

DOCUMENT = (Path(__file__).parent.parent.parent / "docs" / "cli.md").read_text(encoding="utf-8")
FREE = {"dtypes", "tied", "us", "error", "spread", "speedup"}  # whose keys are dtypes or tensors


def keys_of(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    if not isinstance(value, dict):
        return set()
    return set(value).union(*(keys_of(part) for key, part in value.items() if key not in FREE))


def documented_keys(command: str) -> set[str]:
    section = DOCUMENT.split(f"\n## {command}\n")[1].split("\n## ")[0]
    table = section.split("\n| key | holds |\n")[1].split("\n\n")[0]
    return set(re.findall(r"`(\w+)`", table))


@pytest.mark.parametrize("command", ["inspect", "quantize", "convert", "compare", "bench"])
def test_every_key_is_documented(command: str, float_folder: Path, int8_folder: Path, tmp_path: Path) -> None:
    write_tokenizer(float_folder)
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f g h")
    arguments: dict[str, tuple[object, ...]] = {
        "inspect": (int8_folder,),
        "quantize": (float_folder, tmp_path / "out"),
        "convert": (int8_folder, tmp_path / "out", "--to", "compressed-tensors"),
        "compare": (float_folder, int8_folder, "--text", text),
        "bench": ("--shape", "8x8", "--m", "1", "--device", "cpu", "--quick"),
    }
    missing = keys_of(run_json(command, *arguments[command])) - documented_keys(command)
    assert not missing
