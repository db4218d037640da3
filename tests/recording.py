"""``Recording`` replays functions on a CPU, as a CUDA graph does: the same operators on the same tensors, no Python."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
}
"""Operators whose result, or its shape, the host waits for."""


def _waits(func: Any, args: Any) -> bool:
    masks = (torch.bool, torch.uint8)
    return func in WAITS or (
        func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
        and any(index is not None and index.dtype in masks for index in args[1])
    )


class Recording(TorchDispatchMode):
    """The operators that ``run`` calls, to be called again with the results of one another."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._done = False
        with self:
            run()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits(func, args):
            raise RuntimeError(f"the host waits for the device: {func}")
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def reset(self) -> None:
        """Frees the results."""
        self._calls.clear()

    def replay(self) -> None:
        """Runs the operators again. Results get the new values, where the memory of a graph would have them."""
        if not self._done:  # recording has done it once, as capturing doesn't
            self._done = True
            return
        now: dict[int, Tensor] = {}
        results: list[tuple[Tensor, Tensor]] = []

        def current(value: Any) -> Any:
            return now.get(id(value), value) if isinstance(value, Tensor) else value

        for func, args, kwargs, out in self._calls:
            found = func(*pytree.tree_map(current, args), **pytree.tree_map(current, kwargs))
            for old, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(found), strict=True):
                if isinstance(old, Tensor):
                    now[id(old)] = new
                    results.append((old, new))
        written: set[int] = set()
        with torch.inference_mode():
            for old, new in results:
                memory = old.untyped_storage().data_ptr()
                if memory not in written and memory != new.untyped_storage().data_ptr():
                    old.copy_(new)
                written.add(memory)  # other results there are views of the first one


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


def record_graphs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> list[Any]:
    """The graphs that are captured, if there is no GPU recorded."""
    from qgemm.replay.graphs import GraphMemory

    made: list[Any] = []
    capture, begin = GraphMemory.capture, GraphMemory.__init__

    def begin_on_cpu(memory: GraphMemory, of: torch.device, has_collectives: bool = False) -> None:
        begin(memory, of, has_collectives)
        memory.captures = True

    def record(memory: GraphMemory, run: Callable[[], None]) -> Any:
        made.append(capture(memory, run) if device.type == "cuda" else Recording(run))
        return made[-1]

    if device.type == "cpu":
        monkeypatch.setattr(GraphMemory, "__init__", begin_on_cpu)
        monkeypatch.setattr(GraphMemory, "beside", lambda memory: _nothing())
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda: bool(torch._C._len_torch_dispatch_stack())
        )
    monkeypatch.setattr(GraphMemory, "capture", record)
    return made
