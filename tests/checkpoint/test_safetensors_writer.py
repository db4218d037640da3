"""Files written in pieces, and checksums of values that come in pieces, are those of whole tensors."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qgemm.checkpoint import safetensors_writer
from qgemm.checkpoint.checksum import RunningChecksum, checksum
from qgemm.checkpoint.safetensors_writer import SafetensorsWriter, write_safetensors

TENSORS = {
    "bytes": torch.randint(-128, 128, (37, 5), dtype=torch.int8),
    "halves": torch.randn(11, 3).bfloat16(),
    "number": torch.tensor(0.5),
    "nothing": torch.empty(0, 4),
}


def test_pieces_in_any_order_make_the_same_file(tmp_path: Path) -> None:
    whole, pieces = io.BytesIO(b"before"), io.BytesIO(b"before")
    for file in (whole, pieces):
        file.seek(6)  # a file may begin elsewhere
    counted: list[int] = []
    write_safetensors(whole, TENSORS, counted.append)
    writer = SafetensorsWriter(pieces, {name: tensor.to("meta") for name, tensor in TENSORS.items()})
    # In turns; 15 and 185 bytes are no whole words.
    writer.write("bytes", TENSORS["bytes"][:3])
    writer.write("halves", TENSORS["halves"][:1])
    writer.write("number", TENSORS["number"])
    writer.write("bytes", TENSORS["bytes"][3:4].t().contiguous().t())  # in other strides
    writer.write("bytes", TENSORS["bytes"][4:])
    writer.write("halves", TENSORS["halves"][1:])
    writer.finish()
    assert pieces.getvalue() == whole.getvalue()
    assert pieces.tell() == whole.tell() == len(whole.getvalue())
    assert sorted(counted) == sorted(tensor.nbytes for tensor in TENSORS.values())
    (tmp_path / "file").write_bytes(whole.getvalue()[6:])
    loaded = load_file(tmp_path / "file")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_a_tensor_that_is_not_whole() -> None:
    writer = SafetensorsWriter(io.BytesIO(), {"a": torch.empty(4, 2, device="meta")})
    writer.write("a", torch.zeros(3, 2))
    with pytest.raises(AssertionError, match="a has fewer values"):
        writer.finish()
    with pytest.raises(AssertionError, match="a has more values"):
        writer.write("a", torch.zeros(2, 2))


@pytest.mark.parametrize("sizes", [(1, 6, 8, 22), (3, 3, 31), (37,), (0, 37), (8, 29)])
def test_a_checksum_of_pieces(sizes: tuple[int, ...]) -> None:
    values = torch.randint(-128, 128, (37,), dtype=torch.int8)
    running = RunningChecksum()
    for piece in values.split(sizes):
        running.add(piece)
    content = bytes(values.view(torch.uint8).tolist())
    words = [int.from_bytes(content[start : start + 8], "little") for start in range(0, len(content), 8)]
    assert running.value == checksum(values) == sum(words) % 2**64


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_a_name_that_no_file_can_hold(name: str) -> None:
    with pytest.raises(ValueError, match=r"a tensor is called .*, which a safetensors file can't hold: rename it"):
        SafetensorsWriter(io.BytesIO(), {name: torch.ones(1)})


def test_a_header_that_no_reader_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_writer, "LARGEST_HEADER", 1000)
    tensors = {f"layers.{i}.weight": torch.ones(1) for i in range(20)}
    with pytest.raises(
        ValueError, match=r"a file of 20 tensors needs .* at most 1000: choose a smaller max_shard_size"
    ):
        SafetensorsWriter(io.BytesIO(), tensors)
    SafetensorsWriter(io.BytesIO(), {"a": torch.ones(1)})
