"""The headers of GGUF files: what the package writes is read as it reads it, and what is broken is refused at once."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFEndian, GGUFReader, GGUFWriter

from checkpoint.gguf_files import entry, random_blocks, setting, text, whole, write_file
from qgemm.checkpoint import CheckpointError
from qgemm.checkpoint.gguf_file import GgufFile, header_of
from qgemm.checkpoint.tensor_file import Place

SETTINGS: dict[str, Any] = {
    **{"context_length": 64, "rope.freq_base": 0.5, "tokenizer.ggml.tokens": ["a", "", "ü"], "a.flag": True},
    **{"general.name": "Ü", "tokenizer.ggml.scores": [0.5, 1.5], "general.alignment": 64},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {
        "a.weight": ("Q4_K", random_blocks("Q4_K", 3, 512)),
        "blk.0.ffn_up_exps.weight": ("Q8_0", random_blocks("Q8_0", 3, 2, 64)),
        "b.bias": np.arange(5, dtype=np.float32),
        "c.weight": np.ones((2, 3), dtype=np.float16),
        "empty": np.ones((0, 3), dtype=np.float32),
    }
    return write_file(tmp_path / "a.gguf", "llama", SETTINGS, tensors)


def test_it_reads_what_the_package_does(path: Path) -> None:
    theirs = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    with GgufFile(path) as file:
        assert file.settings == {
            **{"general.architecture": "llama", "llama.context_length": 64, "llama.rope.freq_base": 0.5},
            **{"llama.a.flag": True, "general.name": "Ü", "general.alignment": 64},
            **{"tokenizer.ggml.tokens": None, "tokenizer.ggml.scores": None},
        }
        names = [f"blk.0.ffn_up_exps.{each}.weight" for each in range(3)]
        assert sorted(file.places) == sorted(["a.weight", "b.bias", "c.weight", "empty", *names])
        assert [file.places[name].shape for name in ("a.weight", "c.weight", "empty", names[0])] == [
            *[(3, 288), (2, 3), (0, 3), (2, 68)]
        ]
        for name in ("a.weight", "b.bias", "c.weight"):
            assert file.read(name).numpy().tobytes() == np.ascontiguousarray(theirs[name].data).tobytes()
        experts = torch.cat([file.read(name) for name in names])
        assert experts.numpy().tobytes() == theirs["blk.0.ffn_up_exps.weight"].data.tobytes()


def test_a_header_without_values(tmp_path: Path) -> None:
    """It has every setting, but long lists are empty, and tensors too."""
    settings = {**SETTINGS, "tokenizer.ggml.merges": [f"a b{each}" for each in range(2000)]}
    path = write_file(tmp_path / "a.gguf", "llama", settings, {"a": np.ones(5, dtype=np.float32)})
    with GgufFile(path) as file:
        (tmp_path / "b.gguf").write_bytes(header_of(file.stored_settings, ["a", "ü"]))
    whole, header = GGUFReader(path), GGUFReader(tmp_path / "b.gguf")
    counts = {"GGUF.tensor_count": 2, "tokenizer.ggml.merges": []}
    names = [name for name in whole.fields if name != "GGUF.version"]
    assert {name: header.fields[name].contents() for name in names} == {
        name: counts.get(name, whole.fields[name].contents()) for name in names
    }
    assert [(tensor.name, tensor.n_elements) for tensor in header.tensors] == [("a", 0), ("ü", 0)]
    with GgufFile(tmp_path / "b.gguf") as file:
        assert [place.shape for place in file.places.values()] == [(0,), (0,)]


def of_setting(kind: int, value: bytes, name: str = "x") -> bytes:
    return whole(setting(name, kind, value), settings=1, tensors=0)


HUGE = struct.pack("<Q", 1 << 60)
BROKEN: dict[str, tuple[bytes, str]] = {
    "another format": (b"GGML" + whole()[4:], "doesn't begin with GGUF"),
    "version 1": (whole(entry(), version=1), "its version is 1"),
    "big-endian": (whole(entry(), version=3 << 24), "it is big-endian"),
    "many tensors": (whole(entry(), tensors=1 << 60), ""),
    "many settings": (whole(settings=1 << 60, tensors=0), ""),
    "a long name": (whole(HUGE), "its header doesn't end"),
    "a long text": (of_setting(8, HUGE), "its header doesn't end"),
    "a long list": (of_setting(9, struct.pack("<I", 4) + HUGE), "its lists have 1152921504606846976 values"),
    "a long list of texts": (of_setting(9, struct.pack("<I", 8) + HUGE), "its lists have 1152921504606846976 values"),
    "lists in a list": (of_setting(9, struct.pack("<IQ", 9, 1) * 1000), "a setting is of type 9"),
    "a setting of no type": (of_setting(13, bytes(8)), "a setting is of type 13"),
    "a name that is no text": (whole(struct.pack("<Q", 2) + b"\xff\xfe" + bytes(64)), "can't decode"),
    "two settings": (whole(setting("x", 0, b"1") * 2, settings=2, tensors=0), "two settings x"),
    "no alignment": (of_setting(4, bytes(4), "general.alignment"), "general.alignment is 0"),
    "odd alignment": (of_setting(4, struct.pack("<I", 12), "general.alignment"), "general.alignment is 12"),
    "a flag as alignment": (of_setting(7, b"\1", "general.alignment"), "general.alignment is True"),
    "far alignment": (
        whole(setting("general.alignment", 4, b"\xf8" * 4), entry(), settings=1),
        "tensor a ends at byte",
    ),
    "two tensors": (whole(entry(), entry(offset=32), tensors=2), "two tensors a"),
    "shared bytes": (whole(entry(shape=(9,)), entry("b", offset=32), tensors=2), "tensor b shares bytes with a"),
    "not aligned": (whole(entry(offset=8)), "tensor a shares bytes with the header, or isn't aligned"),
    "beyond the end": (whole(entry(shape=(1025,))), "tensor a ends at byte"),
    "far away": (whole(entry(offset=1 << 63)), "tensor a ends at byte"),
    "no such type": (whole(entry(kind=4)), "tensor a is of type 4, which isn't known"),
    "broken blocks": (whole(entry(shape=(2, 48), kind=8)), r"tensor a of Q8_0 has the shape \[2, 48\]"),
    "a number in blocks": (whole(entry(shape=(), kind=8)), r"tensor a of Q8_0 has the shape \[\]"),
    "five dimensions": (whole(entry(shape=(1,) * 5)), "tensor a has 5 dimensions"),
    "many dimensions": (whole(text("a") + b"\xff" * 64), "tensor a has 4294967295 dimensions"),
    "a huge tensor": (whole(entry(shape=(1 << 32, 1 << 32))), "has the shape"),
    "empty experts": (whole(entry("a_exps.weight", (1 << 60, 0, 4))), "tensor a_exps.weight has the shape"),
    "an expert twice": (
        whole(entry("a_exps.weight", (1, 1, 4)), entry("a_exps.0.weight", offset=32), tensors=2),
        "two tensors a_exps.0.weight",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_headers(case: str, tmp_path: Path) -> None:
    content, problem = BROKEN[case]
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"a\.gguf is truncated or no GGUF file: .*{problem}"):
        GgufFile(tmp_path / "a.gguf")


def test_many_experts_of_few_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qgemm.checkpoint.gguf_file._MOST_TENSORS", 6)
    path = tmp_path / "a.gguf"
    for experts in (3, 4):
        entries = (entry(f"{name}_exps.weight", (experts, 1, 4), 0, 64 * place) for place, name in enumerate("ab"))
        path.write_bytes(whole(*entries, tensors=2))
        if experts == 3:
            GgufFile(path).close()
    with pytest.raises(CheckpointError, match="it has more than 6 tensors, the weights of experts among them"):
        GgufFile(path)


def test_every_type_of_number(tmp_path: Path) -> None:
    # As ggml's docs/checkpoints/gguf.md lists them: 8 is text, 9 a list.
    numbers = {
        **{0: ("B", 200), 1: ("b", -100), 2: ("H", 60_000), 3: ("h", -30_000), 4: ("I", 1 << 31), 5: ("i", -5)},
        **{6: ("f", 0.5), 7: ("?", True), 10: ("Q", 1 << 63), 11: ("q", -(1 << 40)), 12: ("d", 0.1)},
    }
    settings = (setting(f"x{kind}", kind, struct.pack(f"<{form}", value)) for kind, (form, value) in numbers.items())
    (tmp_path / "a.gguf").write_bytes(whole(*settings, settings=len(numbers), tensors=0))
    with GgufFile(tmp_path / "a.gguf") as file:
        assert file.settings == {f"x{kind}": value for kind, (_, value) in numbers.items()}


def test_a_written_big_endian_file(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "llama", endianess=GGUFEndian.BIG)
    writer.add_tensor("a", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="it is big-endian"):
        GgufFile(tmp_path / "a.gguf")


def test_numbers_and_empty_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(whole(entry("a", ()), entry("b", (0, 32), 8, 32), entry("c", (2, 2), 0, 32), tensors=3))
    with GgufFile(path) as file:
        start = path.stat().st_size - 4096
        assert file.places == {
            "a": Place("F32", (), start, start + 4),
            "b": Place("U8", (0, 34), start + 32, start + 32),
            "c": Place("F32", (2, 2), start + 32, start + 48),
        }
        assert file.read("b").numel() == 0


def test_gates_and_ups_of_experts_that_are_one_tensor(tmp_path: Path) -> None:
    """Gates come first; a tensor whose rows aren't two halves keeps its name."""
    path, start = tmp_path / "a.gguf", "blk.0.ffn_gate_up_exps"
    entries = entry(f"{start}.weight", (2, 6, 32), 8), entry(f"{start}.bias", (2, 6), 0, 416), entry("b", (1,), 0, 480)
    path.write_bytes(whole(*entries, tensors=3))
    with GgufFile(path) as file:
        places = {
            name: (place.shape, place.start - file.places["b"].start + 480) for name, place in file.places.items()
        }
    assert places.pop("b") == ((1,), 480)
    assert places == {
        f"blk.0.ffn_{part}_exps.{expert}.{leaf}": (shape, first + nbytes * (2 * expert + (part == "up")))
        for leaf, shape, first, nbytes in (("weight", (3, 34), 0, 102), ("bias", (3,), 416, 12))
        for expert in range(2)
        for part in ("gate", "up")
    }
    path.write_bytes(whole(entry(f"{start}.weight", (1, 3, 32), 8)))
    with GgufFile(path) as file:
        assert list(file.places) == [f"{start}.0.weight"]


def test_a_file_cut_anywhere(path: Path) -> None:
    content = path.read_bytes()
    with GgufFile(path) as file:
        needed = max(place.stop for place in file.places.values())
    header = content.index(b"empty") + 32
    for length in [*range(header), *range(header, needed, 97), needed - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="is truncated or no GGUF file"):
            GgufFile(path)


def test_changed_bytes(path: Path) -> None:
    """Any byte of the header: the file is refused, or read with all of its tensors inside of it."""
    content = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for position in range(0, content.index(b"empty") + 32, 2):
        changed = bytearray(content)
        changed[position] ^= rng.choice((1, 0x80, 0xFF))
        path.write_bytes(changed)
        try:
            with GgufFile(path) as file:
                assert all(place.stop <= len(content) for place in file.places.values())
        except CheckpointError:
            refused += 1
    assert refused > 50
