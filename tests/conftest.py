"""Kernel tests run compiled where there is a GPU, and in Triton's interpreter elsewhere."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this when a kernel is defined, so it is set before anything imports qgemm.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run in this session: the GPU, or the CPU through the interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
