"""The loop's interface to a cache: how many tokens it holds, and what a decode step must know about padding.

``KeyValueContext`` is for qgemm's cache with the attention "qgemm". ``StaticContext`` is for transformers' StaticCache
with the model's own attention over all of its positions, for models that qgemm's cache or attention doesn't fit.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Hashable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from qgemm.integrations.transformers.batching import check_no_batches
from qgemm.integrations.transformers.cache import ARGUMENT, ATTENTION, KeyValueCache, fits_key_value_cache
from qgemm.integrations.transformers.generate.covered import NotCovered


class Context(Protocol):
    """A cache with room for ``capacity`` tokens, of which ``used`` are in use, and the attention that reads it.

    Whatever steps read from it stays at fixed addresses: ``buffers``, which a decoder keeps for a cache of the
    caller's.
    """

    cache: Cache
    capacity: int
    used: int
    attention: str
    buffers: Tensor

    @property
    def step_mask(self) -> Tensor | None:
        """The ``attention_mask`` of decode steps, at a fixed address."""

    def begin(self, attention_mask: Tensor | None) -> None:
        """Called before a prompt, whose ``attention_mask`` [B, used + S] is None if it has no padding."""

    def parts(self, rows: int) -> Generator[slice]:
        """Yields the sequences for each forward: ``rows`` at a time, or all together.

        ``advance`` is called for each.
        """

    def prefilled(self) -> Hashable:
        """Called after the prompt. If two prompts give equal results, their steps are the same."""

    def advance(self, count: int) -> None:
        """Called before a forward of ``count`` tokens. A CUDA graph replays its device part, but not ``used``."""

    def rewind(self, used: int) -> None:
        """Forgets all tokens except the first ``used``."""


class KeyValueContext:
    """A KeyValueCache, which knows where each sequence begins after its padding, in ``buffers`` [B]."""

    attention: str = ATTENTION
    step_mask: Tensor | None = None

    def __init__(self, cache: KeyValueCache, batch: int, device: torch.device) -> None:
        """Uses the content of ``cache``. Raises ``NotCovered`` for masks that aren't padding."""
        if cache.tokens.masked:
            raise NotCovered(f"{ARGUMENT} has tokens masked that aren't padding on the left")
        self.cache: Any = cache
        self.capacity = cache.max_length
        self.buffers = torch.zeros(batch, dtype=torch.int32, device=device)
        self._mask: Tensor | None = None

    @property
    def used(self) -> int:
        """How many tokens it holds."""
        used: int = self.cache.used
        return used

    @used.setter
    def used(self, used: int) -> None:
        self.cache.used = used

    def begin(self, attention_mask: Tensor | None) -> None:
        """Only keeps the mask, because attention examines it itself."""
        self._mask = attention_mask

    def parts(self, rows: int) -> Generator[slice]:
        """Yields ``rows`` at a time if the cache is empty."""
        batch = self.buffers.shape[0]
        if self.used or rows >= batch:
            yield slice(batch)
            return
        for first in range(0, batch, rows):
            self.rewind(0)
            with self.cache.rows_from(first):
                yield slice(first, first + rows)
        if self._mask is not None:
            self.cache.start = (~self._mask).sum(-1, dtype=torch.int32)

    def prefilled(self) -> Hashable:
        """Whether there is padding."""
        self.cache.tokens.check_read()
        start = self.cache.start
        if start is None:
            return "even"
        self.cache.start = self.buffers.copy_(start)
        return "padded"

    def advance(self, count: int) -> None:
        """As in ``Context``."""
        if self.cache.length.is_cuda and torch.cuda.is_current_stream_capturing():
            self.cache.tokens.used = None  # nothing in a graph may depend on the host's number
        self.cache.advance(count)

    def rewind(self, used: int) -> None:
        """Forgets tokens; if none remain, also where sequences began."""
        self.cache.rewind(used)


class StaticContext:
    """A StaticCache. A step's mask covers all of its positions; those not yet in use are masked as future ones."""

    def __init__(self, cache: StaticCache, batch: int, model: PreTrainedModel) -> None:
        """Uses the content of ``cache``. Raises ``NotCovered`` for layers that discard tokens."""
        self._layers: list[Any] = cache.layers
        self.attention = model.config._attn_implementation
        if "flash" in self.attention:
            raise NotCovered("FlashAttention waits for the host")
        if not all(type(layer) is StaticLayer for layer in cache.layers):
            kinds = sorted({type(layer).__name__ for layer in cache.layers} - {"StaticLayer"})
            raise NotCovered(f"the cache has layers of the kind {', '.join(kinds)}")
        for module in model.modules():
            if hasattr(module, "layer_idx") and not getattr(module, "is_causal", True):
                raise NotCovered(f"{type(module).__name__} sees the tokens that are to come")
        self.cache: Cache = cache
        self.capacity: int = cache.get_max_length()
        self.used = int(cache.get_seq_length())
        self.buffers = torch.ones((batch, self.capacity), dtype=torch.bool, device=model.device)

    @property
    def step_mask(self) -> Tensor | None:
        """Needed even without padding."""
        return self.buffers

    def begin(self, attention_mask: Tensor | None) -> None:
        """As in ``Context``."""
        self.buffers.fill_(True)
        if attention_mask is not None:
            self.buffers[:, : attention_mask.shape[1]] = attention_mask

    def parts(self, rows: int) -> Generator[slice]:
        """Yields all sequences together."""
        yield slice(None)

    def prefilled(self) -> Hashable:
        """The same for all prompts."""
        return "masked"

    def advance(self, count: int) -> None:
        """As in ``Context``. On the device, a layer advances when it is written."""
        self.used += count

    def rewind(self, used: int) -> None:
        """Forgets tokens."""
        self.used = used
        for layer in self._layers:
            layer.cumulative_length.fill_(used)


def make_context(model: PreTrainedModel, batch: int, capacity: int, dtype: torch.dtype | None) -> Context:
    """A new cache for ``batch`` sequences of up to ``capacity`` tokens; ``dtype`` as in KeyValueCache."""
    if fits_key_value_cache(model):
        with contextlib.suppress(ValueError):
            cache = KeyValueCache(model.config, batch, capacity, dtype, model.device)
            return KeyValueContext(cache, batch, model.device)
    if dtype is not None:
        raise NotCovered(f"cache_dtype is {dtype}, and {type(model).__name__} has no KeyValueCache")
    return StaticContext(StaticCache(config=model.config, max_cache_len=capacity), batch, model)


def use_context(cache: Cache, model: PreTrainedModel, batch: int) -> Context:
    """The caller's cache, with its content."""
    if isinstance(cache, KeyValueCache):
        return KeyValueContext(cache, batch, model.device)
    if isinstance(cache, StaticCache):
        return StaticContext(cache, batch, model)
    raise NotCovered(f"{ARGUMENT} is a {type(cache).__name__}")


class Attention:
    """Which attention a model has while calls run, perhaps in several threads.

    A forward whose mask was made for one attention must not continue with another, so the last call to end restores it.
    """

    def __init__(self) -> None:
        """Starts without calls."""
        self._lock = threading.Lock()
        self._calls = 0
        self._before: list[tuple[PreTrainedConfig, str | None]] = []

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Surrounds each call, whatever its attention is."""
        with self._lock:
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if not self._calls:
                    for config, own in self._before:  # bypasses the setter, which would also set nested parts' configs
                        config._attn_implementation_internal = own
                    self._before = []

    def use(self, model: PreTrainedModel, attention: str) -> None:
        """Sets the attention of ``model`` during a call.

        Raises ``ValueError`` while ``model`` runs continuous batching.
        """
        check_no_batches(model)
        with self._lock:
            if attention != model.config._attn_implementation:
                before = [(config, config._attn_implementation) for config in _configs(model)]
                self._before = self._before or before
                model.set_attn_implementation(attention)

    def own(self, model: PreTrainedModel) -> str | None:
        """The attention that ``model`` has outside of calls."""
        with self._lock:
            before = self._before
            return before[0][1] if before else model.config._attn_implementation


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs of ``model`` and of its parts, whether or not these are transformers models."""
    found = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    declared = (getattr(config, name, None) for config in found for name in config.sub_configs)
    return [*found, *(config for config in declared if config is not None)]
