"""A tiny checkpoint converted by one process and by two: both times, and files that are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import conversion
from benchmarks.conversion import Seconds, measure, table
from benchmarks.models.shapes import ModelShape

SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
TINY = ModelShape("tiny", "LlamaConfig", 2, {**SIZES, **HEADS})


@pytest.mark.complete
def test_a_pair(tmp_path: Path) -> None:
    found = measure(tmp_path, TINY, 2, workers=2, pairs=1, shard_size="200KB", device="cpu")
    assert [each.workers for each in found] == [1, 2]
    assert all(0 < each.call < each.whole for each in found)
    assert len(list((tmp_path / "float").glob("*.safetensors"))) == 5  # two layers, embeddings, the last norm, the head


def test_files_that_differ_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(source: Path, destination: Path, workers: int, shard_size: str, device: str) -> Seconds:
        destination.mkdir()
        (destination / "model.safetensors").write_bytes(bytes([workers]))
        return Seconds(workers, 1.0, 2.0)

    monkeypatch.setattr(conversion, "convert", convert)
    with pytest.raises(ValueError, match="2 processes wrote other files than one"):
        measure(tmp_path, TINY, 1, workers=2, pairs=1, shard_size="1MB", device="cpu")


def test_the_table() -> None:
    header, rows = table([Seconds(1, 16.0, 20.0), Seconds(2, 8.0, 12.5)], 2)
    assert len(header) == len(rows[0])
    assert rows == [["16.0 s", "8.0 s", "2.00", "20.0 s", "12.5 s", "1.60"]]
