"""``quantize_checkpoint`` writes what ``from_pretrained``, ``quantize_model``, ``save_quantized`` would, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from models import FAMILIES

import qgemm
from qgemm.streaming import quantize_checkpoint


def in_memory(source: Path, destination: Path, **options: Any) -> None:
    """The same by way of the whole model."""
    shard = {"max_shard_size": options.pop("max_shard_size")} if "max_shard_size" in options else {}
    architecture = transformers.AutoConfig.from_pretrained(source).architectures[0]
    model = getattr(transformers, architecture).from_pretrained(source)
    qgemm.save_quantized(qgemm.quantize_model(model, **options), destination, **shard)


def assert_same_files(one: Path, other: Path) -> None:
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in other.iterdir())
    for path in one.iterdir():
        if path.suffix == ".json":
            assert path.read_text() == (other / path.name).read_text(), path.name
        assert path.read_bytes() == (other / path.name).read_bytes(), path.name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_files_are_those_of_the_whole_model(family: str, tmp_path: Path) -> None:
    FAMILIES[family]().model.save_pretrained(tmp_path / "float")
    in_memory(tmp_path / "float", tmp_path / "whole", max_shard_size="60KB")
    quantize_checkpoint(tmp_path / "float", tmp_path / "streamed", max_shard_size="60KB")
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")
