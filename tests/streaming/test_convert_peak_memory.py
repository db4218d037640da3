"""Memory doesn't depend on the size of the model: checkpoints more than three times larger than what is allowed.

``peak_memory.py`` measures checkpoints of any size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from streaming.peak_memory import measure, write_llama, write_mixtral

NBYTES = 210_000_000


# What is allowed beyond the imports, which differ from machine to machine: 30 MB for PyTorch's own buffers and the
# modules of the model, and three times the largest tensor of Llama, 8 MB; or for Mixtral's experts, of 3 MB each, what
# is worked on at a time, 35 MB. It takes 29 and 44 MB; with all experts of a layer in memory as the tensors that they
# become, 226 MB.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "hidden_size", "allowed"),
    [pytest.param(write_llama, 1024, 55e6, marks=pytest.mark.complete), (write_mixtral, 512, 65e6)],
)
def test_peak_memory(
    write: Callable[[Path, int, int], int],
    hidden_size: int,
    allowed: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other on busy cores take ten times as long
    assert sys.platform == "linux", "what this reads of /proc is there alone"
    write(tmp_path / "float", NBYTES, hidden_size)
    measured = measure(tmp_path / "float", tmp_path / "int8")
    assert measured["peak"] - measured["before"] < allowed < NBYTES / 3
