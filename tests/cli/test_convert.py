"""``qgemm convert``: the same int8 values in another format."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.foreign import logits, same_tensors
from checkpoint.samples import SAMPLES
from checkpoint.test_bitsandbytes import float_model, write_by_layout

import qgemm
from cli.command import run, run_failing, run_json
from qgemm.checkpoint.locking import locked


def test_to_compressed_tensors_and_back(int8_folder: Path, tmp_path: Path) -> None:
    (int8_folder / "tokenizer.json").write_text("{}")
    there, back = tmp_path / "there", tmp_path / "back"
    found = run_json("convert", int8_folder, there, "--to", "compressed-tensors")
    assert (found["from"], found["to"], found["layers"]) == ("qgemm", "compressed-tensors", 14)
    assert found["bytes_after"] == sum(path.stat().st_size for path in there.glob("*.safetensors"))
    assert run_json("inspect", there)["format"] == "compressed-tensors"
    run("convert", there, back, "--to", "qgemm")
    original, again = qgemm.load_quantized(int8_folder), qgemm.load_quantized(back)
    assert same_tensors(original, again)
    assert torch.equal(logits(original), logits(again))
    assert (back / "tokenizer.json").read_text() == "{}"
    # And as the command itself sees it.
    compared = run_json("compare", int8_folder, back, "--tolerance", 0)
    assert compared["same"] == len(compared["layers"])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_from_bitsandbytes(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_by_layout(float_model(name), source)
    run("convert", source, tmp_path / "out", "--to", "qgemm")
    assert torch.equal(logits(qgemm.load_quantized(tmp_path / "out")), logits(qgemm.load_quantized(source)))


def test_into_another_scheme(tmp_path: Path) -> None:
    source = SAMPLES / "gptq-8bit-g128-asym"
    run("convert", source, tmp_path / "out", "--to", "compressed-tensors", "--scheme", "int8")
    wanted = qgemm.load_quantized(source, scheme="int8")
    assert same_tensors(qgemm.load_quantized(tmp_path / "out"), wanted)
    message = run_failing("convert", source, tmp_path / "x", "--to", "qgemm", "--scheme", "int8-static")
    assert "needs data" in message


def test_a_folder_is_replaced_only_when_asked(int8_folder: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(int8_folder, tmp_path / "target"))
    (target / "tokenizer.json").write_text("old")
    (int8_folder / "tokenizer.json").write_text("new")
    assert "pass --overwrite" in run_failing("convert", int8_folder, target, "--to", "qgemm")
    assert len(list(target.glob("*.safetensors"))) == 3
    run("convert", int8_folder, target, "--to", "qgemm", "--overwrite")
    assert len(list(target.glob("*.safetensors"))) == 1
    assert (target / "tokenizer.json").read_text() == "new"
    assert not list(target.glob(".*"))


def test_what_cannot_be_converted(int8_folder: Path, float_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "quantize it with qgemm quantize" in run_failing("convert", float_folder, out, "--to", "qgemm")
    assert "write to another one" in run_failing("convert", int8_folder, int8_folder, "--to", "qgemm", "--overwrite")
    index = int8_folder / "model.safetensors.index.json"
    assert "write to another one" in run_failing("convert", index, int8_folder, "--to", "qgemm", "--overwrite")
    single = next(int8_folder.glob("*.safetensors"))
    assert "is a single file" in run_failing("convert", single, out, "--to", "qgemm")
    message = run_failing("convert", int8_folder, single, "--to", "qgemm")
    assert "is a file: name a folder" in message
    message = run_failing("convert", int8_folder, out, "--to", "gptq")
    assert (
        'GPTQ stores int4 and int8-weight schemes: save it with --to "qgemm", or load or quantize it with ' in message
    )
    assert message.endswith('--scheme "int8-weight"\n')
    qgemm.save_quantized(qgemm.quantize_model(torch.nn.Sequential(torch.nn.Linear(8, 8))), tmp_path / "plain")
    message = run_failing("convert", tmp_path / "plain", out, "--to", "compressed-tensors")
    assert "not describe a transformers model, and the command builds no other: use qgemm in Python" in message
    (int8_folder / "adapter_config.json").write_text(
        "{}"
    )  # without its adapter it would keep transformers from loading
    assert "has an adapter" in run_failing("convert", int8_folder, out, "--to", "qgemm")
    (int8_folder / "adapter_config.json").unlink()
    (int8_folder / "tokenizer.json").symlink_to("/etc/hostname")
    assert "outside of the folder" in run_failing("convert", int8_folder, out, "--to", "qgemm")
    assert "Invalid value" in run("convert", int8_folder, out, "--to", "gguf", exit_code=2).stderr


def test_a_full_disk_is_named(int8_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write does

    monkeypatch.setattr("qgemm.checkpoint.save.write_safetensors", fill)
    message = run_failing("convert", int8_folder, tmp_path / "out", "--to", "qgemm")
    assert message == f"qgemm: {tmp_path / 'out'}: No space left on device\n"
    assert not (tmp_path / "out").exists()


def test_a_second_process_leaves_the_files_of_the_first(
    int8_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (int8_folder / "tokenizer.json").write_text("{}")
    out, save = tmp_path / "out", qgemm.save_quantized
    with ExitStack() as first:

        def save_second(*arguments: Any, **options: Any) -> None:
            first.enter_context(locked(out))  # by a process that has copied the same files
            save(*arguments, **options)

        monkeypatch.setattr(qgemm, "save_quantized", save_second)
        assert "another process is saving" in run_failing("convert", int8_folder, out, "--to", "qgemm")
        assert (out / "tokenizer.json").exists()


def test_what_was_written_is_read_again(int8_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = qgemm.save_quantized

    def save_badly(model: torch.nn.Module, folder: Path, **options: Any) -> None:
        save(model, folder, **options)
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")

    monkeypatch.setattr(qgemm, "save_quantized", save_badly)
    message = run_failing("convert", int8_folder, tmp_path / "out", "--to", "qgemm")
    assert "was written, but has problems" in message


def test_a_model_that_the_format_cannot_hold(tmp_path: Path) -> None:
    model = qgemm.quantize_model(float_model("gpt2"))
    qgemm.save_quantized(model, tmp_path / "gpt2")
    message = run_failing("convert", tmp_path / "gpt2", tmp_path / "out", "--to", "compressed-tensors")
    assert "is a Conv1D" in message
    assert not (tmp_path / "out").exists()
