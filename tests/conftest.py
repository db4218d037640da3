"""Kernel tests run compiled where there is a GPU, and in Triton's interpreter elsewhere."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this when a kernel is defined, so it is set before anything imports qgemm.
    os.environ["TRITON_INTERPRET"] = "1"


def _patch_once_a_launch() -> None:
    """Makes the interpreter twice as fast.

    At every call of a device function it looks through Triton's language for what to replace by functions of its own,
    though all of that is replaced from the launch, or the first call, on.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    # One of each place that it patches. Its own functions don't have the mark of Triton's.
    places = (
        (tl, "load"),
        (tl.core, "load"),
        (tl.tensor, "to"),
        (tl.math, "exp"),
        (tl.core.tensor_descriptor_base, "load"),
    )

    def patch_if_needed(fn: Any) -> Any:
        if any(tl.core.is_builtin(getattr(place, name)) for place, name in places):
            return patch(fn)
        return interpreter._LangPatchScope()  # nothing to restore

    if all(tl.core.is_builtin(getattr(place, name)) for place, name in places):
        interpreter._patch_lang = patch_if_needed


if not torch.cuda.is_available():
    _patch_once_a_launch()


PARAMETERS = 2  # of a test that `make quick` runs, about


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--complete", action="store_true", help="run what takes too long for every change, too")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as slow what `make quick` leaves out, and lets what compiles every kernel come first.

    What is marked ``complete`` is left out without ``--complete``.

    That is of a test marked ``slow(quick=...)`` what has other parameters than these; of others, with many parameters,
    all but every so many. What comes first goes to one of several workers, and none waits for it last.
    """
    if not config.getoption("--complete"):
        left_out = [item for item in items if item.get_closest_marker("complete")]
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)
    tests: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function):
            tests.setdefault((item.path, item.originalname), []).append(item)
    for functions in tests.values():
        every = -(-len(functions) // PARAMETERS) | 1  # odd, for two values that take turns
        for number, item in enumerate(functions):
            if marks := [mark for mark in item.own_markers if mark.name == "slow"]:
                if any(f"-{name}-" in f"-{item.callspec.id}-" for name in marks[0].kwargs.get("quick", [])):
                    item.own_markers.remove(marks[0])
            elif number % every:
                item.add_marker("slow")
    items.sort(key=lambda item: item.get_closest_marker("compile") is None)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run in this session: the GPU, or the CPU through the interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
