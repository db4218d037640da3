"""A float checkpoint to quantize."""

import shutil
from pathlib import Path

import pytest
import torch
from families import FAMILIES


@pytest.fixture(scope="session")
def _saved_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("qwen3")
    FAMILIES["qwen3"]().model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def source(_saved_qwen3: Path, tmp_path: Path) -> Path:
    """A Qwen3 in bfloat16, with tied embeddings, in one file; to change."""
    return Path(shutil.copytree(_saved_qwen3, tmp_path / "float"))
