"""The files that go along with the weights, and those that don't."""

from __future__ import annotations

from pathlib import Path

import pytest

from qgemm import CheckpointError, quantize_checkpoint
from qgemm.streaming.companions import find_companions
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
