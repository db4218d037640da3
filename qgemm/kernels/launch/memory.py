"""Memory on a GPU: the quickest way to allocate it, and what outlives a call.

A stream keeps a buffer for the plans of one launch, since what runs on a stream runs in turn. A launch in a CUDA graph
whose programs wait for one another has zeros of its own, to count in.
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
"""At the start of a buffer, where programs that wait for one another count. Zeros, but while a kernel runs."""
MAX_STREAM_BUFFERS = 256
MAX_GRAPH_LAUNCHES = 65_536  # of a device, that have counts: 8 MB


def _empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


empty: Callable[..., Tensor] = getattr(guards, "_empty_strided_cuda", _empty_strided)
"""``empty(shape, strides, dtype)`` on the current device.

What the code that torch.compile writes allocates with takes 1.0 us, torch.empty 2.7.
"""

is_capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
"""Whether the current stream's work goes to a CUDA graph, whose memory must be its own: two may run at a time."""

_NO_BUFFER = torch.empty(0, dtype=torch.int8, device="cpu")
_stream_buffers: dict[tuple[int, int], Tensor] = {}
"""By device and stream; no larger than the longest rows of plans with one launch, or 8 MB of partial sums."""
_NO_COUNTS: tuple[Tensor, Iterator[int]] = (_NO_BUFFER, iter(()))
_graph_counts: dict[int, tuple[Tensor, Iterator[int]]] = {}
"""By device, zeros and the indices of those that ``graph_counts`` hasn't given out."""


def stream_buffer(device: int, stream: int, size: int) -> Tensor:
    """Of ``size`` bytes at least. Its first ``COUNTS_BYTES`` are zeros, but while a kernel runs."""
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
    """Allocates what ``graph_counts`` gives out, the first time. Not in a graph, whose memory it would be."""
    if device not in _graph_counts and not is_capturing():

        def zeros() -> Tensor:
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                made = torch.zeros(MAX_GRAPH_LAUNCHES, COUNTS_BYTES // 4, dtype=torch.int32, device=f"cuda:{device}")
            # A graph's stream doesn't wait for this one.
            stream.synchronize()
            return made

        _graph_counts.setdefault(device, (allocated_for_good(zeros), iter(range(MAX_GRAPH_LAUNCHES))))


def graph_counts(device: int) -> Tensor | None:
    """Zeros for a launch that a CUDA graph holds, which nobody else gets; None if there are none left.

    Its own memory won't do: others use that in between. Nor may graphs share zeros: they can run side by side.
    """
    zeros, unused = _graph_counts.get(device, _NO_COUNTS)
    index = next(unused, None)
    return None if index is None else zeros[index]


def allocated_for_good(allocate: Callable[[], Tensor]) -> Tensor:
    """What ``allocate`` gives, called in a thread of its own.

    While ``torch.compile(mode="reduce-overhead")`` warms up a CUDA graph, it has its thread allocate in the graph's
    memory, and takes what is still allocated there afterwards for a leak.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(allocate).result()


def _on_stream(device: int, stream: int) -> AbstractContextManager[None]:
    """Makes it this thread's current stream."""
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device))
