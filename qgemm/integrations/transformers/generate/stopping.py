"""Determines on the device when a sequence ends: transformers' criteria for end tokens and for strings.

The host checks a maximum time when it reads a token; a maximum of tokens is the number of steps.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StopStringCriteria,
)

from qgemm.integrations.transformers.generate.covered import NotCovered


class _StopStrings:
    """Finds rows whose text ends with one of the criterion's strings: runs the criterion itself on the last tokens."""

    def __init__(self, criterion: StopStringCriteria) -> None:
        self._criterion = criterion
        # transformers makes the table for a tokenizer and its strings once. Held here, it keeps its id.
        self._table = criterion.embedding_vec
        self.key: Hashable = (id(self._table), criterion.maximum_token_len)
        self._last: Tensor | None = None

    def begin(self, prompt: Tensor) -> None:
        length = self._criterion.maximum_token_len
        if self._last is None:
            self._last = prompt.new_empty((prompt.shape[0], length))
        self._last.fill_(self._table.shape[0] - 1)  # the entry for tokens that match nothing
        tail = prompt[:, -length:]
        self._last[:, length - tail.shape[1] :] = tail

    def __call__(self, token: Tensor) -> Tensor:
        assert self._last is not None, "begin comes first"
        self._last.copy_(torch.cat([self._last[:, 1:], token], dim=1))
        ended: Tensor = self._criterion(self._last, None)
        return ended


class Stops:
    """All criteria of a call. ``deadline``: in seconds of ``time.time()``; ``max_length``: in tokens; or None.

    ``ends``: the tokens that end a row; ``end_tokens``: a tensor of them, or None if there are none. ``pads``: whether
    a row that has ended continues with padding. Stops with equal ``key`` do the same on the device.
    """

    def __init__(self, criteria: Sequence[StoppingCriteria], device: torch.device) -> None:
        """Raises ``NotCovered`` for an unknown criterion."""
        self.deadline: float | None = None
        self.max_length: int | None = None
        self.pads = False
        self.ends: list[int] = []
        self._strings: list[_StopStrings] = []
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                # As in transformers, a row that has ended continues with padding only if there are end tokens.
                self.pads = True
                self.ends += criterion.eos_token_id.tolist()
            elif type(criterion) is StopStringCriteria:
                self._strings.append(_StopStrings(criterion))
            elif type(criterion) is MaxTimeCriteria:
                deadline = criterion.initial_timestamp + criterion.max_time
                self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)
            elif type(criterion) is MaxLengthCriteria:
                length = criterion.max_length
                self.max_length = length if self.max_length is None else min(self.max_length, length)
            else:
                raise NotCovered(f"it knows no stopping criterion {type(criterion).__name__}")
        self.end_tokens = torch.tensor(self.ends, device=device) if self.ends else None
        self.key: Hashable = (tuple(self.ends), *(rule.key for rule in self._strings))

    def begin(self, prompt: Tensor) -> None:
        """Called before the first token, with ``prompt`` [B, S]."""
        for rule in self._strings:
            rule.begin(prompt)

    def by_strings(self, token: Tensor) -> Tensor | None:
        """The rows [B] whose text ends with a string after ``token`` [B, 1]; None if there are no strings."""
        ended = [rule(token) for rule in self._strings]
        return functools.reduce(torch.logical_or, ended) if ended else None

    def out_of_time(self) -> bool:
        """Whether the maximum time has passed."""
        return self.deadline is not None and time.time() > self.deadline
