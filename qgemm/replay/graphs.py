"""CUDA graphs of functions whose tensors keep their addresses: run at first, captured the second time, then replayed.

The first run is the warm-up that PyTorch requires, and its work is needed anyway: no step is wasted.

NCCL doesn't end a process group before the last graph with its collectives, and ``destroy_process_group`` waits forever
if a model has such graphs (pytorch#115388). So the graphs end first, and are captured again if they run after all.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import distributed


class CaptureError(Exception):
    """A function can't be captured, for example because it waits for the GPU. It has done nothing on the device."""


class GraphMemory:
    """What the graphs of one model share: the memory of their temporaries and the stream on which they are captured.

    They must not run at the same time. ``captures`` is False on a CPU, and after a ``CaptureError``.
    ``has_collectives``: whether the model is split among processes.
    """

    def __init__(self, device: torch.device, has_collectives: bool = False) -> None:
        """Starts without captured graphs."""
        self.device = device
        self.has_collectives = has_collectives
        self.captures = device.type == "cuda"
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        if self.captures:
            self._stream = torch.cuda.Stream(device)
            self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, work runs on the stream of captures, in order with the work on the caller's stream."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of what ``run`` does on the device; nothing is run. Raises ``CaptureError``."""
        if not self._graphs:
            # A pool ends with the last of its graphs, and PyTorch doesn't reuse it.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self.device.index or 0]
        seed, offset = generator.initial_seed(), generator.get_offset()
        # Not torch.cuda.graph, which waits for the GPU, and returns the allocator's reserved memory.
        with self.beside():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except Exception as error:
                self.captures = False
                try:
                    graph.capture_end()
                except RuntimeError:
                    # PyTorch then leaves its random generator and its allocator in the middle of a capture.
                    fresh = torch.Generator(self.device).manual_seed(seed)
                    fresh.set_offset(offset)
                    generator.graphsafe_set_state(fresh.graphsafe_get_state())
                    torch._C._cuda_endAllocateToPool(generator.device.index, self._pool)
                raise CaptureError(str(error).partition("\n")[0]) from error
            graph.capture_end()
        self._graphs.add(graph)
        return graph

    def end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a graph, even if it is still referenced."""
        graph.reset()
        self._graphs.discard(graph)


class Replayed:
    """``replayed(run)`` does what ``run()`` does. ``run`` reads and writes the same tensors in every call."""

    def __init__(self, memory: GraphMemory) -> None:
        """Starts without a run."""
        self._memory = memory
        self._graph: torch.cuda.CUDAGraph | None = None
        self._ran = False

    def __call__(self, run: Callable[[], None]) -> None:
        """Raises ``CaptureError``; after that, ``run`` is called directly."""
        if self._graph is not None:
            self._graph.replay()
        elif not self._memory.captures:
            run()
        elif not self._ran:
            with self._memory.beside():
                run()
            self._ran = True
        else:
            self._graph = self._memory.capture(run)
            if self._memory.has_collectives:
                _between_processes.add(self)
                _end_with_processes()
            self._graph.replay()

    def end(self) -> None:
        """Ends the graph; the next call captures a new one."""
        if self._graph is not None:
            self._memory.end(self._graph)
            self._graph = None


_between_processes: weakref.WeakSet[Replayed] = weakref.WeakSet()


@functools.cache
def _end_with_processes() -> None:
    """Makes graphs ``_between_processes`` end before a process group or the interpreter ends."""
    # destroy_process_group calls this for each group, however it was imported.
    shut_down = distributed.ProcessGroup.shutdown

    @functools.wraps(shut_down)
    def end_graphs_and_shut_down(group: distributed.ProcessGroup) -> None:
        _end_graphs()
        shut_down(group)

    distributed.ProcessGroup.shutdown = end_graphs_and_shut_down  # type: ignore[assignment]
    atexit.register(_end_graphs)


def _end_graphs() -> None:
    for replayed in list(_between_processes):
        replayed.end()
