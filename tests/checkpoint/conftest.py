"""A quantized model and its checkpoint, made once, for tests that damage copies of it."""

import shutil
from pathlib import Path

import pytest
import torch

from checkpoint.models import swap_linears, tiny_llama
from qgemm.checkpoint import save_quantized


@pytest.fixture(scope="session")
def _saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    # Small enough for three files and more: a tensor can then be in a wrong one.
    save_quantized(swap_linears(tiny_llama()), folder, max_shard_size="10KB")
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    return folder


@pytest.fixture
def llama_folder(_saved_llama: Path, tmp_path: Path) -> Path:
    """A sharded checkpoint of a Llama with tied embeddings, to damage."""
    return Path(shutil.copytree(_saved_llama, tmp_path / "llama"))
