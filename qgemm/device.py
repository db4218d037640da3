"""Devices: the one that somebody names, or a sentence why it can't be used; their free memory. Threads, and garbage."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_OPERATORS = 8  # that are timed
_GAIN = 0.8  # of one thread's time; those that are only lucky once aren't much faster
# Of control groups, version 2 and 1: where they are mounted, and the files of the limit and of what is in use.
_GROUPS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def find_device(device: torch.device | str) -> torch.device:
    """The CPU or GPU that ``device`` names, a GPU with its number.

    Raises ``ValueError`` for one that isn't there, or of another kind, and for what is none.
    """
    try:
        found = None if isinstance(device, bool) else torch.device(device)
    except (RuntimeError, TypeError):  # no device that PyTorch knows of
        found = None
    if found is not None and found.type == "cpu":
        return found
    if found is not None and found.type == "cuda" and (found.index or 0) < torch.cuda.device_count():
        return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())
    gpus = ", ".join(f"cuda:{index}" for index in range(torch.cuda.device_count())) or "none"
    raise ValueError(f'device is "{device}"; it must be "cpu", or "cuda" where PyTorch finds a GPU (here: {gpus})')


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python doesn't look for garbage meanwhile, which takes tenths of a second beside a model or its code."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_counting = threading.Lock()
_blocks: list[tuple[int, int]] = []
"""Of ``one_thread``, that are being run: who runs each, and how many threads there were before."""


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch's operators on the CPU have one thread meanwhile, if this thread calls them."""
    caller = threading.get_ident()
    with _counting:
        before = torch.get_num_threads()
        # Who starts while another is inside begins with one, and would leave that to all who start afterwards.
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
    """PyTorch's operators on the CPU, if that is ``device``, have one thread meanwhile where several take longer.

    Several wait for one another at the end of each operator: for milliseconds if other processes use the cores, as in a
    container with fewer of them than its machine. Quantizing a model took six times as long then, and more.
    """
    # What is timed isn't for a mode that looks at operators.
    has_mode = torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0
    if device.type != "cpu" or has_mode or torch.get_num_threads() == 1 or _several_are_faster():
        yield
    else:
        with one_thread():
            yield


def _several_are_faster() -> bool:
    """Whether several threads now gain on one, in operators of some 100,000 values."""
    values = torch.ones(2**17, dtype=torch.float32, device="cpu")
    with one_thread():
        values.neg_()
        start = time.perf_counter()
        for _ in range(_OPERATORS):
            values.neg_()
        one = time.perf_counter() - start
    values.neg_()  # the threads are there
    start = time.perf_counter()
    for _ in range(_OPERATORS):
        values.neg_()
        if time.perf_counter() - start > _GAIN * one:
            return False
    return True


def free_memory(device: torch.device, root: Path = Path("/")) -> int:
    """How many bytes could be allocated on ``device``; 0 where the system doesn't say.

    On a GPU what is free, and what PyTorch's allocator holds there unused. On the CPU (Linux) what is available without
    swapping, or what the limits of the process's control groups leave, if that is less: files that the system has read
    ahead count as free in both. ``root`` is where ``proc`` and ``sys`` are.
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
    """What a control group and those around it leave, where they are seen and have a limit."""
    mount, limit, usage, cached = _GROUPS[controller]
    left = []
    for group in (Path(path), *Path(path).parents):
        folder = root / mount / group.relative_to("/")
        try:
            free = int((folder / limit).read_text()) - int((folder / usage).read_text())
            left.append(free + _number_after(cached, folder / "memory.stat"))
        except (OSError, ValueError, StopIteration):
            continue  # no limit ("max"), or a container that doesn't see it
    return left


def _number_after(name: str, file: Path) -> int:
    return next(int(words[1]) for words in map(str.split, file.read_text().splitlines()) if words[:1] == [name])
