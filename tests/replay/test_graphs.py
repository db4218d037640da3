"""Functions that are run, captured and replayed; graphs of several processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import destroy_process_group

from qgemm.replay.graphs import CaptureError, GraphMemory, Replayed
from tests.recording import Recording

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_a_function_runs_then_is_captured_then_replayed(graphs: list[Any]) -> None:
    total, runs = torch.zeros(1, device=DEVICE), []
    step = Replayed(GraphMemory(DEVICE))

    def add() -> None:
        runs.append(1)
        total.add_(2)

    for i in range(1, 5):
        step(add)
        assert total.item() == 2 * i
    assert len(runs) == 2


@pytest.mark.parametrize("has_collectives", [True, False])
def test_graphs_with_collectives_end_before_the_processes_part(
    graphs: list[Any], has_collectives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total, ended = torch.zeros(1, device=DEVICE), []
    if DEVICE.type == "cpu":
        monkeypatch.setattr(Recording, "reset", lambda _: ended.append(distributed.is_initialized()), raising=False)
    step = Replayed(GraphMemory(DEVICE, has_collectives))
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    for _ in range(3):
        step(lambda: total.add_(2))
    destroy_process_group()
    assert not distributed.is_initialized()
    assert ended == [True] * (has_collectives and DEVICE.type == "cpu")
    for _ in range(2):
        step(lambda: total.add_(2))
    assert total.item() == 10
    assert len(graphs) == 1 + has_collectives


@pytest.mark.skipif(DEVICE.type == "cpu", reason="captures CUDA graphs")
def test_a_capture_that_fails_leaves_nothing_behind() -> None:
    expected = [torch.manual_seed(3), torch.rand(2, device=DEVICE), torch.rand(2, device=DEVICE)]
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2, device=DEVICE), expected[1])
    memory, x = GraphMemory(torch.device("cuda", 0)), torch.ones(2, device=DEVICE)
    with pytest.raises(CaptureError, match="CUDA"):
        memory.capture(lambda: x.add_(torch.rand(2, device=DEVICE)).sum().item())
    assert not memory.captures
    assert torch.equal(torch.rand(2, device=DEVICE), expected[2])
    graph = GraphMemory(torch.device("cuda", 0)).capture(lambda: x.mul_(2))
    graph.replay()
    assert x.tolist() == [2, 2]
    torch.cuda.empty_cache()
