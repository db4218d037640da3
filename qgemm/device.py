"""Finds the device that a caller names, its free memory, and a useful number of threads; pauses garbage collection."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_OPERATORS = 8  # timed per measurement
_GAIN = 0.8  # of one thread's time: several threads that are only lucky once aren't that much faster
# For control groups, versions 2 and 1: where they are mounted, and the files with the limit and the current use.
_GROUPS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def find_device(device: torch.device | str) -> torch.device:
    """Returns the CPU or GPU that ``device`` names; a GPU has its number.

    Raises ``ValueError`` for a device that doesn't exist, is of another kind, or isn't a device at all.
    """
    try:
        found = None if isinstance(device, bool) else torch.device(device)
    except (RuntimeError, TypeError):  # not a device that PyTorch knows
        found = None
    if found is not None and found.type == "cpu":
        return found
    if found is not None and found.type == "cuda" and (found.index or 0) < torch.cuda.device_count():
        return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())
    gpus = ", ".join(f"cuda:{index}" for index in range(torch.cuda.device_count())) or "none"
    raise ValueError(f'device is "{device}"; it must be "cpu", or "cuda" where PyTorch finds a GPU (here: {gpus})')


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switches Python's garbage collector off inside: with a model in memory, a collection takes tenths of a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_counting = threading.Lock()
_blocks: list[tuple[int, int]] = []
"""The blocks of ``one_thread`` that are running: the thread of each, and the number of threads before it."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, PyTorch's CPU operators that this thread calls use one thread."""
    caller = threading.get_ident()
    with _counting:
        before = torch.get_num_threads()
        # While another thread is inside, the count is 1; restoring that at the end would leave it at 1 for good.
        if all(thread != caller for thread, _ in _blocks):
            before = max([before, *(count for _, count in _blocks)])
        _blocks.append((caller, before))
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _counting:
            _blocks.remove((caller, before))
            torch.set_num_threads(before)


@contextmanager
def useful_threads(device: torch.device) -> Iterator[None]:
    """Inside, PyTorch's CPU operators use one thread, if ``device`` is the CPU and several threads would be slower.

    Several threads wait for one another at the end of each operator. If other processes use the cores, as in a
    container with fewer cores than its machine, that takes milliseconds. Quantizing a model then took six times as
    long, and more.
    """
    # The timed operators must not be seen by a dispatch or function mode.
    has_mode = torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0
    if device.type != "cpu" or has_mode or torch.get_num_threads() == 1 or _several_are_faster():
        yield
    else:
        with one_thread():
            yield


def _several_are_faster() -> bool:
    """Whether several threads are now faster than one, in operators of some 100,000 values."""
    values = torch.ones(2**17, dtype=torch.float32, device="cpu")
    with one_thread():
        values.neg_()
        start = time.perf_counter()
        for _ in range(_OPERATORS):
            values.neg_()
        one = time.perf_counter() - start
    values.neg_()  # starts the threads
    start = time.perf_counter()
    for _ in range(_OPERATORS):
        values.neg_()
        if time.perf_counter() - start > _GAIN * one:
            return False
    return True


def free_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Returns how many bytes could be allocated on ``device``; 0 where the system doesn't say.

    On a GPU: the free memory, plus what PyTorch's allocator holds unused. On the CPU (Linux): the memory available
    without swapping, or what the limits of the process's control groups leave, if that is less. Files that the
    system caches count as free in both. ``root`` is the folder that contains ``proc`` and ``sys``.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        available = _number_after("MemAvailable:", root / "proc/meminfo") * 1024
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError, StopIteration):
        return 0
    left = [available]
    for _, controllers, path in (line.split(":", 2) for line in groups):
        for controller in {"", "memory"}.intersection(controllers.split(",")):
            left += _left_in_group(root, controller, path)
    return max(0, min(left))


def _left_in_group(root: Path, controller: str, path: str) -> list[int]:
    """What a control group and its ancestors leave, where they are visible and have a limit."""
    mount, limit, usage, cached = _GROUPS[controller]
    left = []
    for group in (Path(path), *Path(path).parents):
        folder = root / mount / group.relative_to("/")
        try:
            free = int((folder / limit).read_text()) - int((folder / usage).read_text())
            left.append(free + _number_after(cached, folder / "memory.stat"))
        except (OSError, ValueError, StopIteration):
            continue  # no limit ("max"), or a container that can't see the file
    return left


def _number_after(name: str, file: Path) -> int:
    return next(int(words[1]) for words in map(str.split, file.read_text().splitlines()) if words[:1] == [name])
