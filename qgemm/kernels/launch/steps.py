"""``LaunchPlan``: kernels to launch one after the other, with named tensors: the call's own, and parts of one buffer.

Everything about such a call except its addresses is known beforehand, so a call only computes addresses and passes each
kernel its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qgemm.kernels.launch.driver import DriverLaunch
from qgemm.kernels.launch.launch import ALIGNMENT, hooked
from qgemm.kernels.launch.memory import CACHE_LINE_BYTES, empty
from qgemm.numerics.integers import round_up

Tensors = tuple[Tensor | None, ...]


class Launchable(Protocol):
    """A ``Launch``, or anything that can be called like one."""

    @property
    def aligned(self) -> DriverLaunch | None:
        """A launch that needs only addresses; None if it must be called with tensors."""

    def __call__(self, *tensors: Tensor | None) -> None:
        """Runs on the current stream of the first tensor's device."""


class Part(NamedTuple):
    """A tensor in the buffer."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor as a view of int8 ``buffer``."""
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return buffer[self.offset : self.offset + size].view(self.dtype).view(self.shape)


class Step(NamedTuple):
    """A launch, and the indices of its arguments among a plan's tensors; None for an argument that is None."""

    launch: Launchable
    tensors: tuple[int | None, ...]
    pick: Callable[[Sequence[int]], tuple[int, ...]]
    """Picks the arguments that aren't None from all of a plan's."""

    def run(self, every: Tensors) -> None:
        """Launches with tensors, if addresses alone can't be used. ``every``: all of the plan's tensors."""
        self.launch(*[None if index is None else every[index] for index in self.tensors])


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What calls of a kind have in common. Its tensors: a call's own, the output, and the parts of the buffer."""

    device: int | None
    buffer: int
    """The number of bytes."""
    parts: tuple[Part, ...]
    steps: tuple[Step, ...]

    def run(self, tensors: Tensors) -> Tensor:
        """The output, contiguous, with the shape and dtype of the first of ``tensors``; zeros without steps."""
        x = tensors[0]
        assert x is not None
        if not self.steps:
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        if x.is_cuda and self.device != torch._C._cuda_getDevice():
            with torch.cuda.device(self.device):
                return self.run(tensors)
        # Weights are always contiguous; the others are small.
        tensors = tuple(t if t is None or t.is_contiguous() else t.contiguous() for t in tensors)
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        # Whether the plan's launches by the driver can't be used.
        unusual = not x.is_cuda or hooked() or any(address % ALIGNMENT for address in addresses)
        launches = [step.launch.aligned for step in self.steps]
        if unusual or None in launches:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            every = (*tensors, out, *self.parts_of(x.new_empty(self.buffer, dtype=torch.int8)))
            for step in self.steps:
                step.run(every)
            return out

        out = empty(tuple(x.shape), (x.shape[1], 1), x.dtype)
        buffer = empty((self.buffer,), (1,), torch.int8)
        base = buffer.data_ptr()
        addresses.append(out.data_ptr())
        addresses += [base + part.offset for part in self.parts]
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        for launch, step in zip(launches, self.steps, strict=True):
            launch(stream, step.pick(addresses))  # type: ignore[misc]
        return out

    def parts_of(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in int8 ``buffer``, in order."""
        return [part.of(buffer) for part in self.parts]


class Layout:
    """Lays out the parts of a buffer by name. Parts with the same ``place`` share its memory."""

    def __init__(self) -> None:
        """A buffer without parts."""
        self._parts: dict[str, tuple[str, tuple[int, ...], torch.dtype]] = {}

    def add(self, name: str, place: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Adds a part, ``shape`` of ``dtype``, at ``place``."""
        self._parts[name] = (place, shape, dtype)

    def parts(self) -> tuple[int, dict[str, Part]]:
        """The size of the buffer in bytes, and its parts. Each place starts at a cache line."""
        sizes: dict[str, int] = {}
        for place, shape, dtype in self._parts.values():
            size = torch.Size(shape).numel() * dtype.itemsize
            sizes[place] = max(sizes.get(place, 0), round_up(size, CACHE_LINE_BYTES))
        starts, end = {}, 0
        for place, size in sizes.items():
            starts[place] = end
            end += size
        return end, {name: Part(starts[place], shape, dtype) for name, (place, shape, dtype) in self._parts.items()}


class Names:
    """The names of a plan's tensors, from which its steps are made."""

    def __init__(self, names: Sequence[str], absent: set[str]) -> None:
        """``names``: of all tensors, in order. ``absent``: the names of those that are None, or not there."""
        self._index = {name: index for index, name in enumerate(names)} | dict.fromkeys(absent)

    def step(self, launch: Launchable, *arguments: str) -> Step:
        """A step that calls ``launch`` with the tensors of these names."""
        indices = tuple(self._index[name] for name in arguments)
        return Step(launch, indices, operator.itemgetter(*[index for index in indices if index is not None]))
