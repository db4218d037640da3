"""A small float checkpoint of transformers, written once, and copies of it to damage."""

import shutil
from pathlib import Path

import pytest
from families import FAMILIES


@pytest.fixture(scope="session")
def _saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float-llama")
    FAMILIES["llama"]().model.save_pretrained(folder)
    return folder


@pytest.fixture
def llama_folder(_saved_llama: Path, tmp_path: Path) -> Path:
    """A float Llama as ``save_pretrained`` wrote it."""
    return Path(shutil.copytree(_saved_llama, tmp_path / "float-llama"))
