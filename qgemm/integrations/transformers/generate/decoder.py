"""What a model keeps between calls of ``generate``: for each batch a cache, the tensors of a step, and their graphs."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor
from transformers import Cache

from qgemm.integrations.transformers.generate.contexts import Context
from qgemm.integrations.transformers.generate.reader import Reader
from qgemm.integrations.transformers.generate.sampling import Progress, Sampler
from qgemm.numerics.integers import round_up
from qgemm.replay.graphs import GraphMemory, Replayed

MAX_SAMPLERS = 8
# The fraction of a GPU's memory that caches waiting for a next call may take; the last one is always kept.
MAX_WAITING_FRACTION = 0.25


class Decoder:
    """The tensors of one batch's steps, and the graphs that read and write them and the batch's cache.

    ``position`` has the shape of a step's positions; ``dtype`` is the one requested for its cache.
    """

    def __init__(
        self,
        batch: int,
        context: Context,
        position: Tensor,
        memory: GraphMemory,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Nothing is captured yet."""
        self.buffers = context.buffers
        self.progress = Progress(batch, context.capacity + 1, position, memory.device)
        self.memory = memory
        self.reader = Reader(self.progress.rows)
        self.dtype = dtype
        self._forwards: dict[Hashable, Replayed] = {}
        self._done: torch.cuda.Event | None = None
        self._samplers: OrderedDict[Hashable, tuple[Sampler, Replayed]] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """Returns None: a copied cache begins without a decoder, because graphs write to fixed addresses."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A decoder isn't saved either."""
        return type(None), ()

    def fits(self, batch: int, position: Tensor, dtype: torch.dtype | None = None) -> bool:
        """Whether it fits such a batch."""
        mine = self.progress
        return (mine.token.shape[0], mine.position.shape, self.dtype) == (batch, position.shape, dtype)

    def forward(self, form: Hashable) -> Replayed:
        """The forward of steps with this ``form``."""
        return self._forwards.setdefault(form, Replayed(self.memory))

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Inside, work comes after earlier calls, which may have run on other streams."""
        if self._done is not None:
            torch.cuda.current_stream(self.memory.device).wait_event(self._done)
        try:
            yield
        finally:
            if self.memory.device.type == "cuda":
                self._done = torch.cuda.current_stream(self.memory.device).record_event()

    def sampler(self, wanted: Sampler) -> tuple[Sampler, Replayed]:
        """A sampler equivalent to ``wanted``, perhaps already captured; the least recently used ones are dropped."""
        found = self._samplers.pop(wanted.key, None) or (wanted, Replayed(self.memory))
        found[0].adopt(wanted)
        self._samplers[wanted.key] = found
        if len(self._samplers) > MAX_SAMPLERS:
            self._samplers.popitem(last=False)
        return found


class Decoders:
    """The decoders of one model, each with its cache. A caller takes one and puts it back."""

    def __init__(self, device: torch.device, has_collectives: bool = False) -> None:
        """Starts without decoders. ``has_collectives``: as in ``GraphMemory``."""
        self.memory = GraphMemory(device, has_collectives)
        self._waiting: list[tuple[Context, Decoder]] = []  # the most recently used one comes last

    def take(
        self,
        batch: int,
        capacity: int,
        position: Tensor,
        dtype: torch.dtype | None,
        make: Callable[[int], Context],
    ) -> tuple[Context, Decoder]:
        """An empty cache for ``batch`` sequences of up to ``capacity`` tokens, and its decoder."""
        same = [each for each in self._waiting if each[1].fits(batch, position, dtype)]
        fitting = [each for each in same if each[0].capacity >= capacity]
        # A cache that is too small is dropped: its successor can serve the same calls.
        self._waiting = [each for each in self._waiting if each not in (fitting[:1] or same)]
        if fitting:
            fitting[0][0].rewind(0)
            return fitting[0]
        context = make(bucket(capacity))
        return context, Decoder(batch, context, position, self.memory, dtype)

    def free(self) -> bool:
        """Frees the caches that wait for a next call; returns False if there are none."""
        found = bool(self._waiting)
        self._waiting.clear()
        return found

    def put_back(self, context: Context, decoder: Decoder) -> None:
        """Keeps them for a next call. Beyond the limit, the caches that have waited longest are freed."""
        self._waiting.append((context, decoder))
        room = 0.0
        if self.memory.device.type == "cuda":
            room = MAX_WAITING_FRACTION * torch.cuda.get_device_properties(self.memory.device).total_memory
        while len(self._waiting) > 1 and sum(_bytes(each.cache) for each, _ in self._waiting) > room:
            del self._waiting[0]


def bucket(capacity: int) -> int:
    """``capacity`` rounded up, by at most an eighth from 1024 on, so that similar calls share a cache."""
    step = max(128, 1 << max(0, (capacity - 1).bit_length() - 4))
    return round_up(capacity, step)


def _bytes(cache: Cache) -> int:
    return sum(each.nbytes for layer in cache.layers for each in vars(layer).values() if isinstance(each, Tensor))
