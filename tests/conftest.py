"""Kernel tests run compiled where there is a GPU, and in Triton's interpreter elsewhere."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    # Triton reads this when a kernel is defined, so it is set before anything imports qgemm.
    os.environ["TRITON_INTERPRET"] = "1"
    from tests import interpreter

    interpreter.make_fast()


torch.set_num_threads(1)  # a fork, as some tests make, would wait for OpenMP threads that only its parent has


gc.disable()  # until all is imported: there is nothing to free, and to look for it takes five seconds


os.fsync = os.fstat  # nothing waits for a disk; what is written, and in which order, stays the same

PARAMETERS = 2  # of a test that `make quick` runs, about


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--complete", action="store_true", help="run what takes too long for every change, too")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as slow what `make quick` leaves out, and lets what compiles every kernel come first, then what forks.

    What is marked ``complete`` is left out without ``--complete``, and ``vllm`` without ``-m vllm``.

    That is of a test marked ``slow(quick=...)`` what has other parameters than these; of others, with many parameters,
    all but every so many. What comes first goes to one of several workers, and none waits for it last. So does what is
    run by ``processes``, whose processes to fork from are then started for one worker alone.
    """
    unasked = [] if config.getoption("--complete") else ["complete"]
    unasked += [] if "vllm" in config.getoption("-m") else ["vllm"]
    if left_out := [item for item in items if any(map(item.get_closest_marker, unasked))]:
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
    items.sort(key=lambda item: (item.get_closest_marker("compile") is None, not _forks(item)))


def _forks(item: pytest.Item) -> bool:
    """Whether the module of ``item`` has Python code run in processes of its own."""
    names = vars(item.module) if isinstance(item, pytest.Function) else {}
    return "run_process" in names or "run_code" in names


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000)  # rarely: of what a test makes, little is in circles
    gc.enable()
    if transformers := sys.modules.get("transformers"):
        # It writes out each config that it reads, for a log that isn't kept: a tenth of the time to load one.
        transformers.PreTrainedConfig.__repr__ = transformers.GenerationConfig.__repr__ = object.__repr__


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run in this session: the GPU, or the CPU through the interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def fsdp_mesh(tmp_path: Path) -> Iterator[Any]:
    """A mesh of this process alone, for FSDP2 with quantized layers."""
    if torch.__version__ < "2.12":
        pytest.skip("FSDP2 of PyTorch 2.11 refuses integers")
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


if not torch.cuda.is_available():
    # For when there is one, torch.manual_seed keeps a traceback: a millisecond each time, and tests call it often.
    torch.manual_seed = torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def little_to_collect() -> None:
    """For modules in which garbage is collected call by call, through all that the tests before have left."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """For benchmarks: a pass reads as few copies of a weight as it may."""
    from qgemm_cli.timing import ROTATED_BYTES

    monkeypatch.setitem(ROTATED_BYTES, "cpu", 1)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> list[Any]:
    """The CUDA graphs that a test captures; without a GPU, recordings in their place."""
    from tests.recording import record_graphs

    return record_graphs(monkeypatch, device)


@pytest.fixture(scope="session")
def assert_as_accurate() -> Callable[[Tensor, Tensor, Tensor], None]:
    """``check(out, reference, exact)``: the error against float64 is at most twice the reference's own."""

    def check(out: Tensor, reference: Tensor, exact: Tensor) -> None:
        assert out.dtype == reference.dtype
        assert out.shape == reference.shape == exact.shape
        if not exact.numel():
            return
        error = (out.double() - exact).abs().max()
        # A reference that happens to be exact still leaves the last bit of float32 arithmetic.
        allowed = 2 * (reference.double() - exact).abs().max() + 2.0**-22 * exact.abs().max()
        assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"

    return check
