"""The files that go along with the weights, and those that don't."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import BinaryIO

import pytest

from qgemm import CheckpointError, quantize_checkpoint
from qgemm.streaming import convert
from qgemm.streaming.companions import copy_companion, find_companions
from streaming.files import contents


def test_what_is_copied(tmp_path: Path) -> None:
    copied = ("tokenizer.json", "vocab.txt", "spiece.model", "chat_template.jinja", "README.md", "qwen.tiktoken")
    weights = ("model.safetensors", "consolidated.00.pth", "pytorch_model.bin", "pytorch_model.bin.index.json")
    written = ("config.json", "generation_config.json", "model.safetensors.index.json")
    for name in (*copied, *weights, *written, ".gitattributes", "modeling_x.py"):
        (tmp_path / name).touch()
    for folder in ("additional_chat_templates", "onnx"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tool_use.jinja").touch()
    found, code = find_companions(tmp_path)
    assert {str(path) for path in found} == {*copied, "additional_chat_templates/tool_use.jinja"}
    assert code == ["modeling_x.py"]


def test_the_folders_of_what_comes_after_the_model(tmp_path: Path) -> None:
    # As sentence-transformers has them. The last one's path is nobody's folder here.
    modules = [{"path": path} for path in ("", "1_Pooling", "2_Dense", "3_Normalize", "../outside", "2_Dense/deep")]
    (tmp_path / "float").mkdir()
    (tmp_path / "float" / "modules.json").write_text(json.dumps(modules))
    files = ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors")
    for name in (*files, "2_Dense/code.py", "2_Dense/.hidden", "2_Dense/deep/x", "onnx/config.json", "../outside/x"):
        path = tmp_path / "float" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    found, code = find_companions(tmp_path / "float")
    assert {str(path) for path in found} == {"modules.json", *files}
    assert code == ["2_Dense/code.py"]
    for other in ("{", "[1]", "[{}]", "{}"):
        (tmp_path / "float" / "modules.json").write_text(other)
        assert find_companions(tmp_path / "float") == ([Path("modules.json")], [])


def test_a_template_arrives_in_its_folder(source: Path, tmp_path: Path) -> None:
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ x }}")
    quantize_checkpoint(source, tmp_path / "streamed")
    assert (tmp_path / "streamed" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ x }}"


@pytest.mark.parametrize("inside", ["", "additional_chat_templates"])
def test_a_link_that_leads_out(inside: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (source / inside).mkdir(exist_ok=True)
    (source / inside / "notes.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"notes\.jinja is a link to .*secret, outside"):
        quantize_checkpoint(source, tmp_path / "streamed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float", "secret"]


def test_a_folder_that_is_a_link(source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (source / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"additional_chat_templates is a link"):
        quantize_checkpoint(source, tmp_path / "streamed")


def test_a_snapshot_in_the_cache_of_the_hub(source: Path, tmp_path: Path) -> None:
    # Its files are links to blobs, also those in folders.
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "0123", tmp_path / "hub" / "blobs"
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    blobs.mkdir()
    (source / "tokenizer.json").write_text("{}")
    for path in source.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs", path.name))
    (blobs / "tool.jinja").write_text("tool")
    (snapshot / "additional_chat_templates" / "tool.jinja").symlink_to(Path("../../../blobs/tool.jinja"))
    quantize_checkpoint(snapshot, tmp_path / "streamed")
    assert (tmp_path / "streamed" / "additional_chat_templates" / "tool.jinja").read_text() == "tool"
    assert not (tmp_path / "streamed" / "tokenizer.json").is_symlink()
    (tmp_path / "streamed" / "additional_chat_templates" / "tool.jinja").unlink()
    (tmp_path / "streamed" / "additional_chat_templates").rmdir()
    assert "tokenizer.json" in contents(tmp_path / "streamed")


@pytest.mark.parametrize("change", ["longer", "other", "gone"])
def test_a_file_that_is_changed_while_it_is_copied(
    change: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = source / "tokenizer.json"
    path.write_text("a tokenizer")

    def copy(original: Path, target: BinaryIO) -> None:
        if change == "gone":
            original.unlink()
        copy_companion(original, _Meanwhile(target, original))  # type: ignore[arg-type]

    class _Meanwhile:
        def __init__(self, target: BinaryIO, original: Path) -> None:
            self.target, self.original = target, original

        def write(self, piece: bytes) -> None:
            self.target.write(piece)
            self.original.write_text("a tokenizer, but another" if change == "longer" else "A TOKENIZER")

    message = "can't be read" if change == "gone" else "changed while it was copied: try again when"
    with monkeypatch.context() as patched:
        patched.setattr(convert, "copy_companion", copy)
        with pytest.raises(CheckpointError, match=rf"tokenizer\.json {message}"):
            quantize_checkpoint(source, tmp_path / "streamed")
    assert not (tmp_path / "streamed").exists()
    after = path.read_text() if path.exists() else None
    monkeypatch.setattr(convert, "write_shard", None)  # the weights are done, and not made again
    quantize_checkpoint(source, tmp_path / "streamed")
    assert after == (None if change == "gone" else (tmp_path / "streamed" / "tokenizer.json").read_text())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes in folders")
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json"])
def test_a_pipe_in_the_folder(name: str, source: Path, tmp_path: Path) -> None:
    (source / name).unlink(missing_ok=True)
    os.mkfifo(source / name)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is a pipe; only regular files are read"):
        quantize_checkpoint(source, tmp_path / "streamed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float"]
