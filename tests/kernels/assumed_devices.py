"""Devices that aren't there: the launchers choose, plan and compile for one of them, and nothing runs.

Tensors are of PyTorch's device ``meta``: they have shapes, dtypes and strides, and an address of 0, but no memory. A
process can ``assume`` one device; what the launchers keep in mind is for that one from then on.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from devices import A100, B200, H200, MI300X, MI355X, RTX_3090, RTX_4090, RTX_5090
from torch import Tensor
from triton.backends.compiler import GPUTarget

from qgemm.kernels.gemm.config import GemmConfig
from qgemm.kernels.launch import device, memory
from qgemm.kernels.launch.device import DeviceLimits, hopper_rows
from qgemm.kernels.launch.launch import Launch

META = torch.device("meta")


class Device(NamedTuple):
    target: GPUTarget
    limits: DeviceLimits


DEVICES = {
    "sm_80": Device(GPUTarget("cuda", 80, 32), A100),
    "sm_90": Device(
        GPUTarget("cuda", 90, 32),
        replace(H200, hopper_rows=hopper_rows()),
    ),
    "sm_100": Device(GPUTarget("cuda", 100, 32), B200),
    "gfx942": Device(GPUTarget("hip", "gfx942", 64), MI300X),
    "gfx950": Device(GPUTarget("hip", "gfx950", 64), MI355X),
    "sm_86": Device(GPUTarget("cuda", 86, 32), RTX_3090),
    "sm_89": Device(GPUTarget("cuda", 89, 32), RTX_4090),
    "sm_120": Device(GPUTarget("cuda", 120, 32), RTX_5090),
}
CONSUMER = ("sm_86", "sm_89", "sm_120")
"""Those of ``DEVICES`` that are compiled for with ``--complete`` alone."""


class Launched(NamedTuple):
    """A launch that would have been made, and the tensors that it would have got."""

    launch: Launch
    tensors: tuple[Tensor | None, ...]

    @property
    def kernel(self) -> str:
        """The name of the kernel."""
        return self.launch.kernel.__name__

    def compile(self) -> Any:
        """What Triton compiles for it."""
        return self.launch.compile(*self.tensors)


class _Driver:
    """What Triton asks a driver for before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Case(NamedTuple):
    """A call that launches something."""

    label: str
    call: Callable[[], object]
    config: GemmConfig | None = None
    """Of its product."""
    only: tuple[str, ...] = ()
    """The kernels that it is about; all that it launches if empty."""
    rare: bool = False
    """Compiled with ``--complete`` alone."""


_launched: list[Launched] = []


def assume(assumed: Device) -> None:
    """Makes ``assumed`` that of meta tensors, and of Triton, for the rest of this process."""
    triton.runtime.driver.set_active(_Driver(assumed.target))
    _set(device, INTERPRETER=assumed.limits)
    _set(Launch, __call__=lambda self, *tensors: _launched.append(Launched(self, tensors)))
    # What a layer's plan asks PyTorch for.
    _set(memory, empty=lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=META))
    _set(memory, _on_stream=lambda device, stream: contextlib.nullcontext())
    _set(memory, keep_graph_counts=lambda device: None)
    torch._C._cuda_getCurrentRawStream = lambda device: 0


def launches_of(case: Case) -> list[Launched]:
    """The launches that ``case`` makes, of the kernels that it is about."""
    _launched.clear()
    case.call()
    return [each for each in _launched if not case.only or each.kernel in case.only]


def _set(place: Any, **values: Any) -> None:
    for name, value in values.items():
        assert hasattr(place, name)
        setattr(place, name, value)
