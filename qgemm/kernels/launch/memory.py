"""Memory on a GPU: the fastest way to allocate it, and memory that outlives a call.

Each stream keeps a buffer for plans of one launch, because work on a stream runs in order. A launch in a CUDA graph
whose programs wait for one another gets its own zeros, for its counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._C._dynamo import guards

CACHE_LINE_BYTES = 128
COUNTS_BYTES = CACHE_LINE_BYTES
"""At the start of a buffer: where programs that wait for one another count. Zeros, except while a kernel runs."""
MAX_STREAM_BUFFERS = 256
MAX_GRAPH_LAUNCHES = 65_536  # that get counts, on a device: 8 MB


def _empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


empty: Callable[..., Tensor] = getattr(guards, "_empty_strided_cuda", _empty_strided)
"""``empty(shape, strides, dtype)`` on the current device.

The allocation that torch.compile's generated code uses takes 1.0 us, torch.empty 2.7.
"""

is_capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
"""Whether the current stream's work goes to a CUDA graph. Each graph needs its own memory: two may run at a time."""

_NO_BUFFER = torch.empty(0, dtype=torch.int8, device="cpu")
_stream_buffers: dict[tuple[int, int], Tensor] = {}
"""By device and stream. No larger than plans of one launch need for their longest rows, or 8 MB of partial sums."""
_NO_COUNTS: tuple[Tensor, Iterator[int]] = (_NO_BUFFER, iter(()))
_graph_counts: dict[int, tuple[Tensor, Iterator[int]]] = {}
"""By device: zeros, and an iterator over the indices that ``graph_counts`` hasn't given out yet."""


def stream_buffer(device: int, stream: int, size: int) -> Tensor:
    """A buffer of at least ``size`` bytes. Its first ``COUNTS_BYTES`` are zeros, except while a kernel runs."""
    buffer = _stream_buffers.get((device, stream), _NO_BUFFER)
    if buffer.numel() < size:
        if len(_stream_buffers) >= MAX_STREAM_BUFFERS:
            _stream_buffers.clear()

        def zeros() -> Tensor:
            with _on_stream(device, stream):
                return empty((size,), (1,), torch.int8).zero_()

        buffer = _stream_buffers[device, stream] = allocated_for_good(zeros)
    return buffer


def keep_graph_counts(device: int) -> None:
    """Allocates the zeros for ``graph_counts``, once. Not while a graph is captured: they would be in its memory."""
    if device not in _graph_counts and not is_capturing():

        def zeros() -> Tensor:
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                made = torch.zeros(MAX_GRAPH_LAUNCHES, COUNTS_BYTES // 4, dtype=torch.int32, device=f"cuda:{device}")
            # A graph's stream doesn't wait for this stream.
            stream.synchronize()
            return made

        _graph_counts.setdefault(device, (allocated_for_good(zeros), iter(range(MAX_GRAPH_LAUNCHES))))


def graph_counts(device: int) -> Tensor | None:
    """Zeros for a launch in a CUDA graph, which no other launch gets; None if there are none left.

    A graph's own memory can't be used: others use it between replays. Nor may graphs share zeros: they can run side by
    side.
    """
    zeros, unused = _graph_counts.get(device, _NO_COUNTS)
    index = next(unused, None)
    return None if index is None else zeros[index]


def allocated_for_good(allocate: Callable[[], Tensor]) -> Tensor:
    """The result of ``allocate``, called in a separate thread.

    While ``torch.compile(mode="reduce-overhead")`` warms up a CUDA graph, it makes its thread allocate in the graph's
    memory, and treats whatever is still allocated there afterwards as a leak.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(allocate).result()


def _on_stream(device: int, stream: int) -> AbstractContextManager[None]:
    """Makes ``stream`` this thread's current stream."""
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device))
