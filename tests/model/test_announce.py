"""Who is told of quantized models: of those that are quantized in place, and of loaded ones of transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from families import FAMILIES
from torch import nn

import qgemm
from qgemm.model import announce
from qgemm.model.announce import when_quantized


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[nn.Module, str | None]]]:
    """What an integration was told, with the save that a model is of."""
    monkeypatch.setattr(announce, "_LISTENERS", dict(announce._LISTENERS))
    heard: list[tuple[nn.Module, str | None]] = []
    when_quantized("one", lambda *_: pytest.fail("there is a later action of that name"))
    when_quantized("one", lambda model, save: heard.append((model, save)))
    return heard


def test_quantized_and_loaded_models_are_announced(told: list[tuple[nn.Module, str | None]], tmp_path: Path) -> None:
    plain = qgemm.quantize_model(nn.Sequential(nn.Linear(64, 64)))
    assert told.pop() == (plain, None)
    model = qgemm.quantize_model(FAMILIES["llama"]().model)
    assert told.pop() == (model, None)
    qgemm.save_quantized(model, tmp_path / "llama")
    loaded = qgemm.load_quantized(tmp_path / "llama")
    ((announced, save),) = told
    assert announced is loaded
    assert save == loaded.config.quantization_config.manifest.save is not None


def test_an_integration_that_cannot_be_imported_says_so_when_it_is_needed(
    told: list[tuple[nn.Module, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "qgemm.integrations.transformers", None)
    qgemm.quantize_model(nn.Sequential(nn.Linear(64, 64)))
    with pytest.raises(ImportError, match=r"qgemm\.integrations\.transformers"):
        qgemm.quantize_model(nn.Sequential(FAMILIES["llama"]().model))
