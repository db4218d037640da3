"""Reading rows of tensors, sources that are none, and those that are changed while they are read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.rewriting import edited
from safetensors.torch import load_file, save_file

from qgemm import CheckpointError, load_quantized, quantize_checkpoint
from qgemm.streaming import convert
from qgemm.streaming import source as source_module
from qgemm.streaming.shards import write_shard
from qgemm.streaming.source import open_source
from streaming.files import assert_same_files, quantize_whole

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


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no such advice")
@pytest.mark.parametrize("free", [0, 99, 10**9], ids=["unknown", "little", "much"])
def test_what_was_read_of_a_large_checkpoint_is_forgotten(
    free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    forgotten = []
    monkeypatch.setattr(source_module, "free_memory", lambda device: free)
    monkeypatch.setattr(
        os, "posix_fadvise", lambda file, start, count, advice: forgotten.append((start, count, advice))
    )
    with open_source(tmp_path) as source:
        assert torch.equal(source.read_rows("matrix", 2, 5), TENSORS["matrix"][2:5])
        start = source.tensors["matrix"].start + 2 * 10
    assert forgotten == ([(start, 3 * 10, os.POSIX_FADV_DONTNEED)] if free == 99 else [])


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"matrix": torch.randn(700, 500)}, path)
    with open_source(tmp_path) as source:
        source.read_rows("matrix", 0, 1)
        os.truncate(path, path.stat().st_size - 40)
        with pytest.raises(CheckpointError, match=r"model\.safetensors became shorter"):
            source.read_rows("matrix", 600, 700)


def test_a_file_that_is_cut(source: Path, tmp_path: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        quantize_checkpoint(source, tmp_path / "streamed")


def test_a_pickle(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a pickle.*convert it to safetensors"):
        quantize_checkpoint(source, tmp_path / "streamed")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "model-Q4_K_M.gguf",
            r"holds model-Q4_K_M\.gguf, and no .*: qgemm\.load_quantized reads GGUF files .* Start from the model",
        ),
        ("model.onnx", r"holds model\.onnx, and no .*: qgemm reads safetensors files alone"),
        (
            "model.fp16.safetensors",
            r"holds model\.fp16\.safetensors, and neither .*rename it to model\.safetensors",
        ),
        ("adapter_config.json", r"an adapter of PEFT: merge it into its model"),
        ("model_index.json", r"a pipeline of diffusers: take the folder of a part"),
        ("modules.json", r"sentence-transformers: take the folder of its first module"),
        ("snapshots/", r"a download of the Hugging Face hub: take the folder in its folder snapshots"),
    ],
)
def test_a_folder_of_something_else(name: str, message: str, source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").unlink()
    (source / "training_args.bin").touch()  # a pickle, which trainers leave beside an adapter
    if message.startswith("holds"):
        (source / "training_args.bin").unlink()
    (source / name).mkdir() if name.endswith("/") else (source / name).touch()
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(source, tmp_path / "streamed")


def test_a_pointer_of_git_lfs(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"a pointer of Git LFS, without values; fetch those with git lfs pull"):
        quantize_checkpoint(source, tmp_path / "streamed")


def test_an_index_with_a_name_of_its_own(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Which the config gives. What else lies there isn't this model's.
    (source / "model.safetensors").rename(source / "other.safetensors")
    names = load_file(source / "other.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "other.safetensors")}
    (source / "other.safetensors.index.json").write_text(json.dumps(index))
    (source / "pytorch_model.bin").touch()
    with edited(source / "config.json") as config:
        config["transformers_weights"] = "other.safetensors.index.json"

    def touch_then_write(*args: Any) -> Any:
        os.utime(source / "other.safetensors.index.json")
        return write_shard(*args)

    with monkeypatch.context() as patched:
        patched.setattr(convert, "write_shard", touch_then_write)
        with pytest.raises(
            CheckpointError, match=r"changed while it was read: other\.safetensors\.index\.json was writ"
        ):
            quantize_checkpoint(source, tmp_path / "streamed")
    quantize_whole(source, tmp_path / "whole")
    quantize_checkpoint(source, tmp_path / "streamed", resume=False)
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")
    load_quantized(tmp_path / "streamed")


def test_a_name_on_the_hub(source: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"org/model is not a folder.*first: hf download org/model --local-dir model"
    ):
        quantize_checkpoint("org/model", tmp_path / "streamed")
    for path, message in ((tmp_path / "nowhere", "is not a folder"), (source / "model.safetensors", "is a file")):
        with pytest.raises(CheckpointError, match=f"{message}; give the folder of a float model$"):
            quantize_checkpoint(path, tmp_path / "streamed")


def test_values_come_from_the_file_whose_header_was_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    with open_source(tmp_path) as source:
        os.replace(shutil.copy(path, tmp_path / "other"), path)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is another file now: it was changed while"):
            source.read_rows("matrix", 0, 7)


@pytest.mark.parametrize("change", ["shape", "offsets", "name", "dtype"])
def test_a_file_that_takes_the_place_of_the_one_that_was_checked(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After the look at it that checks the header and says where values lie.
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    old, new = {
        "shape": (b"[7,5]", b"[5,7]"),
        "offsets": (b"[484,554]", b"[484,954]"),
        "name": (b'"matrix"', b'"metrix"'),
        "dtype": (b'"BF16"', b'"FP16"'),
    }[change]
    assert old in path.read_bytes()

    def read_headers(folder: Path, config: dict[str, Any]) -> Any:
        found = original(folder, config)
        path.write_bytes(path.read_bytes().replace(old, new))
        os.utime(path, ns=(0, 0))  # clocks of file systems are coarse
        return found

    original = source_module.read_headers
    monkeypatch.setattr(source_module, "read_headers", read_headers)
    with (
        open_source(tmp_path) as source,
        pytest.raises(CheckpointError, match=r"model\.safetensors was written to: it was changed while it was read"),
    ):
        source.read_rows("matrix", 0, 7)


def write_again(folder: Path) -> None:
    """In place, another value; the size and the header are the same."""
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x3f")


def put_another(folder: Path) -> None:
    """All that is known of the file stays the same, but that it is another one."""
    path = folder / "model.safetensors"
    status = path.stat()
    shutil.copy(path, folder.parent / "other")
    os.replace(folder.parent / "other", path)
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))


def rename_a_tensor(folder: Path) -> None:
    """The size and the time stay the same."""
    path = folder / "model.safetensors"
    status = path.stat()
    with path.open("r+b") as file:
        content = file.read()
        file.seek(0)
        file.write(content.replace(b"layers.0.mlp.up_proj.weight", b"layers.0.mlp.UP_proj.weight"))
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))


def touch(folder: Path) -> None:
    os.utime(folder / "model.safetensors")


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)


def remove(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def edit_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))  # of the same length


def drop_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()


def add_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (write_again, r"model\.safetensors was written to"),
    (touch, r"model\.safetensors was written to"),
    (put_another, r"model\.safetensors is another file now"),
    (rename_a_tensor, r"model\.safetensors has another header now"),
    (cut, r"model\.safetensors has 1,000 bytes now, and had [\d,]+"),
    (remove, r"model\.safetensors is gone"),
    (edit_config, r"config\.json was written to"),
    (drop_generation_config, r"generation_config\.json is gone"),
    (add_index, r"model\.safetensors\.index\.json is there now"),
]


@pytest.mark.slow(quick=["at a file"])
@pytest.mark.parametrize("at", [2, -1], ids=["at a file", "at the end"])
@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_source_that_is_changed_meanwhile(
    change: Callable[[Path], None],
    message: str,
    at: int,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def change_then_write(file: Any, *args: Any) -> Any:
        calls.append(file.name)
        if len(calls) == (at if at > 0 else int(file.name[-17:-12])):  # "...-00001-of-00011.safetensors"
            change(source)
        return write_shard(file, *args)

    with monkeypatch.context() as patched:
        patched.setattr(convert, "write_shard", change_then_write)
        with pytest.raises(CheckpointError, match=rf"float was changed while it was read: {message}.*Nothing was publ"):
            quantize_checkpoint(source, tmp_path / "streamed", max_shard_size="10KB")
    assert not (tmp_path / "streamed").exists()
    if change in (remove, cut, add_index, rename_a_tensor):
        return  # it is no checkpoint any more
    # What was made of the old one isn't mixed with the new one.
    with pytest.raises(CheckpointError, match=r"holds another, unfinished run"):
        quantize_checkpoint(source, tmp_path / "streamed", max_shard_size="10KB")
    quantize_whole(source, tmp_path / "whole", max_shard_size="10KB")
    quantize_checkpoint(source, tmp_path / "streamed", max_shard_size="10KB", resume=False)
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")
