"""Devices: the one that somebody names, or a sentence why it can't be used; their free memory. Threads, and garbage."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

A = TypeVar("A")
B = TypeVar("B")
_MAX_THREADS = 16  # more would wait for each other's Python code

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
    raise ValueError(f'device is "{device}"; it must be "cpu", or "cuda" where PyTorch finds a GPU')


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


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch's operators on the CPU have one thread meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_threads(function: Callable[[A], B], items: Iterable[A], tensor: Tensor) -> list[B]:
    """``function`` of each of ``items``, in their order, without gradients, by as many threads as PyTorch has.

    Each runs operators on the CPU by itself. Several threads for one operator of some 10,000 values wait for each other
    whenever others use the cores: quantizing a model then took 20 times as long.

    ``tensor``: what is worked on. If it isn't a plain tensor on the CPU, or a mode of PyTorch is active, which others
    wouldn't have, this thread does everything.
    """
    has_mode = torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0
    is_plain = type(tensor) is Tensor and tensor.device.type == "cpu" and not has_mode
    count = min(torch.get_num_threads(), _MAX_THREADS) if is_plain else 1

    def call(item: A) -> B:
        with torch.no_grad():
            return function(item)

    if count == 1:
        return list(map(call, items))
    with one_thread(), ThreadPoolExecutor(count) as threads:
        return list(threads.map(call, items))


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
