"""Checkpoints in folders: float ones to quantize, quantized ones to compare."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import transformers
from checkpoint.rewriting import contents
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import qgemm
from qgemm.streaming.journal import Begun
from qgemm.streaming.workspace import Workspace


def quantize_whole(source: Path, destination: Path, max_shard_size: int | str = "5GB", **options: Any) -> nn.Module:
    """What ``quantize_checkpoint`` should write, by way of the whole model; returns the model."""
    architecture = transformers.AutoConfig.from_pretrained(source).architectures[0]
    model = getattr(transformers, architecture).from_pretrained(source)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*experts.*")
        qgemm.save_quantized(qgemm.quantize_model(model, **options), destination, max_shard_size=max_shard_size)
    return model


def assert_same_files(one: Path, other: Path) -> None:
    ours, theirs = contents(one), contents(other)
    assert sorted(ours) == sorted(theirs)
    if (name := "config.json") in ours:
        assert ours[name].decode() == theirs[name].decode()  # whose difference can be read
    assert [name for name in ours if ours[name] != theirs[name]] == []


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Puts tensors into a checkpoint of one file, or takes them out. Dots in names are written as two underscores."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    for name, value in changes.items():
        stored[name.replace("__", ".")] = value
    save_file({name: value for name, value in stored.items() if value is not None}, path, metadata={"format": "pt"})


class Stopped(Exception):
    """Ends a run of ``quantize_checkpoint`` before its time."""


def stop_after(notes: int, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException] = Stopped) -> None:
    """Lets the next run end, by ``stop``, once it has noted so often how far a file is."""
    left = [notes]
    note_begun = Workspace.note_begun

    def note(self: Workspace, begun: Begun, file: Any) -> None:
        note_begun(self, begun, file)
        left[0] -= 1
        if not left[0]:
            raise stop

    monkeypatch.setattr(Workspace, "note_begun", note)
