"""``Choice``: what the choice of a step's tokens reads and writes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Choice(NamedTuple):
    """The arguments of ``torch.ops.qgemm.choose_tokens``, in their order. The step is ``counters[-1]``."""

    scores: Tensor
    """float ``[B, V]``."""
    token: Tensor
    """int64 ``[B, 1]``: gets the tokens."""
    rows: Tensor
    """int64 ``[steps, B + 1]``: the step's row gets the tokens and, if there are ``ends``, whether all have ended.

    A step that has no row in it isn't recorded.
    """
    counters: Tensor
    """int64: each is increased by one, after everything else."""
    finished: Tensor
    """bool ``[B]``: which rows have ended; rows that end now are added."""
    ends: Tensor | None = None
    """int64: the tokens that end a row."""
    padding: int | None = None
    """The token of rows that had ended before; None for the one that they would have chosen."""
    minimum: int = 0
    """Before this step, the scores of ``ends`` count as -inf."""
