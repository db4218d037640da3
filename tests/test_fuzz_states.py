"""``fuzz_states``: its first cases find nothing, and it finds what it is for. What it found is tested where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fuzz_states
import pytest
from fuzz_states_world import World

CASES = 10
COMPLETE_CASES = 400
"""With ``--complete``."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_features_in_random_order(pytestconfig: pytest.Config) -> None:
    cases = COMPLETE_CASES if pytestconfig.getoption("--complete") else CASES
    results = [fuzz_states.run_case(0, number) for number in range(cases)]
    assert not [failure for failure, _ in results if failure]
    done, raised = (sum(counts[kind] for _, counts in results) for kind in ("done", "raised"))
    assert done > 3 * cases, "too few operations fit their models"
    assert raised > cases / 4


def double_a_scale(world: World) -> None:
    next(module for module in world.model.modules() if hasattr(module, "weight_scale")).weight_scale.data.mul_(2)


def leave_something(world: World) -> None:
    world.model.left = True
    raise ValueError("refused")


@pytest.mark.parametrize(
    ("operation", "message"),
    [(double_a_scale, "values .*weight_scale: off by"), (leave_something, "left changes")],
)
def test_it_sees_a_fault(operation: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = fuzz_states.Case(0, 0, tmp_path)
    monkeypatch.setattr(fuzz_states, "BOTH", ["both_quantize"])
    while not any("weight_scale" in name for name in case.worlds[0].model.state_dict()):
        case.step()
    monkeypatch.setattr(World, "one_fuse", operation)
    monkeypatch.setattr(fuzz_states, "ONE", ["one_fuse"])
    monkeypatch.setattr(fuzz_states, "BOTH", fuzz_states.ONE)
    with pytest.raises(AssertionError, match=message):
        case.step()
