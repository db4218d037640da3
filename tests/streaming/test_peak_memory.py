"""Memory depends on the largest tensor in the files, not on the model: checkpoints many times larger than the bound.

``peak_memory.py`` measures checkpoints of any size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from streaming.peak_memory import measure, write_llama, write_mixtral

NBYTES = 300_000_000


# What is allowed beyond the imports, which differ from machine to machine: PyTorch's own buffers, the modules of the
# model, and what it works on, 25 MB at a time for experts. With a layer's experts in memory as the one tensor that they
# become, Mixtral takes 226 MB.
@pytest.mark.parametrize(
    ("write", "hidden_size", "allowance"), [(write_llama, 1024, 60_000_000), (write_mixtral, 512, 85_000_000)]
)
def test_peak_memory(
    write: Callable[[Path, int, int], int],
    hidden_size: int,
    allowance: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other on busy cores take ten times as long
    assert sys.platform == "linux", "what this reads of /proc is there alone"
    largest = write(tmp_path / "float", NBYTES, hidden_size)
    measured = measure(tmp_path / "float", tmp_path / "int8")
    assert 3 * largest + allowance < NBYTES / 3
    assert measured["peak"] - measured["before"] < 3 * largest + allowance
