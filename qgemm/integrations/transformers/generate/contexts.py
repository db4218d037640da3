"""What the loop asks of a cache: where the next key goes, how many there are, and the mask of a decode step.

``StaticContext`` is for transformers' StaticCache, with the model's own attention over all of its places.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from qgemm.integrations.transformers.generate.covered import NotCovered


class Context(Protocol):
    """A cache with room for ``capacity`` tokens, of which ``used`` are in use."""

    cache: Cache
    capacity: int
    used: int
    # The attention_mask of decode steps, at one address; it doesn't change from step to step.
    step_mask: Tensor | None

    def begin(self, attention_mask: Tensor | None) -> None:
        """Before a prompt, whose ``attention_mask`` [B, used + S] is None if it has no padding."""

    def advance(self, count: int) -> None:
        """Before a forward of ``count`` tokens. A CUDA graph replays what it does on the device, not ``used``."""

    def rewind(self, used: int) -> None:
        """Forgets all tokens but the first ``used``."""


class StaticContext:
    """A StaticCache. All of its places are in the mask of a step: those not yet in use are masked as being to come."""

    def __init__(self, cache: StaticCache, batch: int, device: torch.device) -> None:
        """With what is in ``cache``. Raises ``NotCovered`` for layers that forget."""
        self._layers: list[Any] = cache.layers
        if not all(type(layer) is StaticLayer for layer in cache.layers):
            kinds = sorted({type(layer).__name__ for layer in cache.layers} - {"StaticLayer"})
            raise NotCovered(f"the cache has layers of the kind {', '.join(kinds)}")
        self.cache: Cache = cache
        self.capacity: int = cache.get_max_length()
        self.used = int(cache.get_seq_length())
        self.step_mask: Tensor | None = torch.ones((batch, self.capacity), dtype=torch.bool, device=device)

    def begin(self, attention_mask: Tensor | None) -> None:
        """Before a prompt."""
        assert self.step_mask is not None
        self.step_mask.fill_(True)
        if attention_mask is not None:
            self.step_mask[:, : attention_mask.shape[1]] = attention_mask

    def advance(self, count: int) -> None:
        """Before a forward. On the device a layer advances when it is written."""
        self.used += count

    def rewind(self, used: int) -> None:
        """Forgets tokens."""
        self.used = used
        for layer in self._layers:
            layer.cumulative_length.fill_(used)


def make_context(model: PreTrainedModel, batch: int, capacity: int) -> Context:
    """A new cache of ``model``'s for ``batch`` sequences of up to ``capacity`` tokens."""
    return StaticContext(StaticCache(config=model.config, max_cache_len=capacity), batch, model.device)


def use_context(cache: Cache, model: PreTrainedModel, batch: int) -> Context:
    """A cache of the caller's, with what is in it."""
    if isinstance(cache, StaticCache):
        return StaticContext(cache, batch, model.device)
    raise NotCovered(f"past_key_values is a {type(cache).__name__}")
