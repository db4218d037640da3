"""``RecalledLaunch``: a launch and its outputs, for calls like one before, in about a third of the host's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qgemm.kernels.launch import memory
from qgemm.kernels.launch.driver import DriverLaunch
from qgemm.kernels.launch.launch import ALIGNMENT, hooked


@dataclass(frozen=True, slots=True)
class RecalledLaunch:
    """What calls whose tensors are like those of one before have in common; ``plans.find`` tells which are."""

    launch: DriverLaunch
    device: int
    order: tuple[int, ...]
    """Which tensors the kernel takes, of those given and then of those made."""
    made: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    """Shape, strides and dtype of each output."""

    @classmethod
    def of(
        cls, launch: Any, taken: Sequence[Tensor | None], given: Sequence[Tensor], made: Sequence[Tensor]
    ) -> RecalledLaunch | None:
        """That of a call that has just been made.

        ``taken``: what ``launch`` was called with. None if that isn't the memory of ``given`` and ``made``, or if only
        Triton can launch the kernel.
        """
        addresses = [each.data_ptr() for each in (*given, *made)]
        wanted = [each.data_ptr() for each in taken if each is not None]
        by_driver, device = launch.aligned, made[0].get_device()
        if by_driver is None or len({*addresses}) < len(addresses) or not {*wanted} <= {*addresses}:
            return None
        outputs = tuple((tuple(each.shape), each.stride(), each.dtype) for each in made)
        return cls(by_driver, device, tuple(addresses.index(each) for each in wanted), outputs)

    def __call__(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """The outputs for other tensors; None where they aren't aligned, or on another device than the current one."""
        if self.device != torch._C._cuda_getDevice() or hooked():
            return None
        addresses = [each.data_ptr() for each in given]
        merged = 0
        for address in addresses:
            merged |= address
        if merged % ALIGNMENT:
            return None
        made = tuple([memory.empty(*each) for each in self.made])
        addresses += [each.data_ptr() for each in made]
        self.launch(torch._C._cuda_getCurrentRawStream(self.device), tuple([addresses[i] for i in self.order]))
        return made
