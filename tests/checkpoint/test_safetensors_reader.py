"""What the library reads is read as it does, and what it refuses is refused; no file can end the process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from qgemm.checkpoint import CheckpointError
from qgemm.checkpoint.safetensors_file import DTYPE_CODES, read_header, read_values
from qgemm.checkpoint.safetensors_reader import SafetensorsReader
from qgemm.checkpoint.tensor_file import file_stamp

TENSORS = {
    "halves": torch.randn(11, 3).bfloat16(),
    "bytes": torch.randint(-128, 128, (37, 5), dtype=torch.int8),
    "number": torch.tensor(0.5),
    "nothing": torch.empty(0, 4),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "x.safetensors", {"a": "b"})
    return tmp_path / "x.safetensors"


def test_it_reads_what_the_library_does(path: Path) -> None:
    read = dict(read_values(read_header(path), torch.device("cpu")))
    assert read.keys() == TENSORS.keys()
    for name, tensor in load_file(path).items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name], tensor)
    with SafetensorsReader(path) as reader:
        assert reader.metadata == {"a": "b"}
        assert reader.stamp == file_stamp(path)


def test_every_dtype(tmp_path: Path) -> None:
    tensors = {code: torch.arange(4).to(dtype) for dtype, code in DTYPE_CODES.items()}
    tensors["U64"] = torch.arange(4).to(torch.uint64)  # of which qgemm has none
    save_file(tensors, tmp_path / "x.safetensors")
    stored = read_header(tmp_path / "x.safetensors")
    assert {code: tensor.dtype for code, tensor in stored.items() if code != "U64"} == {
        code: dtype for dtype, code in DTYPE_CODES.items()
    }
    assert stored["U64"].dtype is None
    with pytest.raises(CheckpointError, match="tensor U64 is U64, which qgemm doesn't support"):
        dict(read_values(stored, torch.device("cpu")))


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}


GOOD = json.dumps(entry()).encode()


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"a": NaN}',
        b"[" * 100_000,
        b"\xff\xff",
        json.dumps({"a": 3}),
        json.dumps(entry(dtype="F33")),
        json.dumps(entry(dtype=3)),
        json.dumps(entry(dtype="F64")),
        json.dumps(entry(shape=[2, 3])),
        json.dumps(entry(shape=[-2, -2])),
        json.dumps(entry(shape=[2.0, 2])),
        json.dumps(entry(shape=[True, 4])),
        json.dumps(entry(shape=[2**62, 4])),
        json.dumps(entry(shape=[1] * 1000 + [4])),
        json.dumps(entry(shape=4)),
        json.dumps(entry(data_offsets=[0, 16, 16])),
        json.dumps(entry(data_offsets=[16, 0])),
        json.dumps(entry(data_offsets=[1, 17])),
        json.dumps({**entry(), "b": entry()["a"]}),
        json.dumps({**entry(), "__metadata__": {"a": 1}}),
        json.dumps({**entry(), "__metadata__": 0}),
        json.dumps({**entry(), "\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}),
        GOOD[:-1] + b", " + GOOD[1:],
        b"{}",
    ],
)
def test_headers_that_are_none(header: str | bytes, tmp_path: Path) -> None:
    text = header.encode() if isinstance(header, str) else header
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(CheckpointError, match=r"x\.safetensors is truncated or no safetensors file"):
        SafetensorsReader(path)
    # Of two tensors of a name it takes the second, and has as many dimensions as anyone likes.
    if text.count(b'"a": {"d') < 2 and len(text) < 1000:
        with pytest.raises(SafetensorError):
            load_file(path)


def test_a_file_cut_anywhere(path: Path) -> None:
    whole = path.read_bytes()
    for length in (0, 7, 8, 9, 20, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="is truncated or no safetensors file"):
            SafetensorsReader(path)
    path.write_bytes(b"\xff" * 8 + whole)
    with pytest.raises(CheckpointError, match="its header doesn't end"):
        SafetensorsReader(path)


def test_a_file_that_is_cut_while_it_is_read(path: Path) -> None:
    """Where it is mapped into memory, the process ends by a bus error."""
    save_file({"a": torch.ones(100_000)}, path)
    with SafetensorsReader(path) as reader:
        os.truncate(path, 200_000)
        with pytest.raises(CheckpointError, match="became shorter while it was read"):
            reader.read("a")


def test_a_file_that_is_replaced_while_it_is_read(path: Path) -> None:
    with SafetensorsReader(path) as reader:
        other = path.with_name("other")
        save_file({"halves": torch.zeros(1)}, other)
        os.replace(other, path)
        assert torch.equal(reader.read("halves"), TENSORS["halves"].view(torch.uint8).reshape(-1))
        assert file_stamp(path) != reader.stamp
