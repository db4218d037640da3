"""Reads tokens on the host some steps late, so that the host never waits for the step that it has just queued."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class Reader:
    """Copies ``Progress.rows`` [steps, B + 1] to the host, in order, while later steps run."""

    def __init__(self, rows: Tensor) -> None:
        """On a CPU, nothing is copied."""
        self._rows = rows
        self._host = rows
        self._sent: deque[tuple[int, torch.cuda.Event | None]] = deque()
        if rows.is_cuda:
            self._host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True, device="cpu")
            self._stream = torch.cuda.Stream(rows.device)

    def begin(self) -> None:
        """Drops rows that were sent but not taken."""
        self._sent.clear()

    @property
    def pending(self) -> int:
        """How many rows were sent but not taken."""
        return len(self._sent)

    def send(self, step: int) -> None:
        """Sends row ``step``, after everything queued so far."""
        done = None
        if self._rows.is_cuda:
            self._stream.wait_stream(torch.cuda.current_stream(self._rows.device))
            with torch.cuda.stream(self._stream):
                self._host[step].copy_(self._rows[step], non_blocking=True)
                done = torch.cuda.Event()
                done.record(self._stream)
        self._sent.append((step, done))

    def take(self) -> tuple[Tensor, bool]:
        """The tokens [B] of the oldest row, and whether all sequences have ended; waits until they have arrived."""
        step, done = self._sent.popleft()
        if done is not None:
            done.synchronize()
        row = self._host[step]
        return row[:-1], bool(row[-1])
