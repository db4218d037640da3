"""Processes that save into a folder, again and again."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from checkpoint.rewriting import save_of
from qgemm import CheckpointError


@contextmanager
def savers(folder: Path, save: Callable[[Path, int], object], count: int) -> Iterator[None]:
    """Inside, ``count`` processes call ``save`` with ``folder`` and another number each time, from 10 on."""
    context = multiprocessing.get_context("fork")  # which imports nothing again
    started = [context.Process(target=_save, args=(folder, save, 10 + i, count), daemon=True) for i in range(count)]
    before = save_of(folder)
    for process in started:
        process.start()
    try:
        limit = time.monotonic() + 60
        while save_of(folder) == before:
            assert time.monotonic() < limit
            time.sleep(0.01)
        yield
        assert all(process.is_alive() for process in started)
    finally:
        for process in started:
            process.kill()
            process.join()


def _save(folder: Path, save: Callable[[Path, int], object], number: int, step: int) -> None:
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # the other one is the caller's too, who would wait for it when this one is killed
    while True:
        try:
            save(folder, number)
        except CheckpointError:  # the other one's turn
            time.sleep(0.001)
        number += step
