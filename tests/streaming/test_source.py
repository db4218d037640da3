"""Reading rows of tensors, and sources that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qgemm import CheckpointError, quantize_checkpoint
from qgemm.streaming.source import open_source

TENSORS = {
    "matrix": torch.randn(7, 5).bfloat16(),
    "number": torch.tensor(3.5),
    "mask": torch.tensor([True, False, True]),
    "cube": torch.arange(60).reshape(3, 4, 5),
    "nothing": torch.empty(0, 4),
}


def test_rows_are_those_of_the_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with open_source(tmp_path) as source:
        assert set(source.tensors) == set(TENSORS)
        for name, tensor in TENSORS.items():
            rows = len(tensor) if tensor.ndim else 1
            whole = source.read_rows(name, 0, rows)
            assert torch.equal(whole, tensor)
            assert whole.dtype == tensor.dtype
        assert torch.equal(source.read_rows("matrix", 2, 5), TENSORS["matrix"][2:5])
        assert torch.equal(source.read_rows("cube", 1, 2), TENSORS["cube"][1:2])


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    with open_source(tmp_path) as source:
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(CheckpointError, match=r"model\.safetensors became shorter"):
            source.read_rows("matrix", 0, 7)  # the last of them in the file: neither booleans nor 0 values


def test_a_file_that_is_cut(source: Path, tmp_path: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        quantize_checkpoint(source, tmp_path / "streamed")


def test_a_pickle(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a pickle.*convert it to safetensors"):
        quantize_checkpoint(source, tmp_path / "streamed")


def test_a_name_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"org/model is no folder.*first: hf download org/model --local-dir model"
    ):
        quantize_checkpoint("org/model", tmp_path / "streamed")
