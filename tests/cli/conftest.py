"""A float Llama and its int8 checkpoint, made once, in folders of a test's own."""

import shutil
from pathlib import Path

import pytest
import torch
from checkpoint.models import tiny_llama

import qgemm


@pytest.fixture(scope="session")
def _llamas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llamas")
    model = tiny_llama().eval()
    model.save_pretrained(folder / "float")
    qgemm.quantize_model(model)
    qgemm.save_quantized(model, folder / "int8", max_shard_size="12KB")
    return folder


@pytest.fixture
def float_folder(_llamas: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_llamas / "float", tmp_path / "float"))


@pytest.fixture
def int8_folder(_llamas: Path, tmp_path: Path) -> Path:
    """In three files and an index, with tied embeddings."""
    return Path(shutil.copytree(_llamas / "int8", tmp_path / "int8"))
