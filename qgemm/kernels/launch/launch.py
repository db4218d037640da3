"""``Launch``: a kernel with everything but its tensors bound, so that running it again costs the host little.

At every call, Triton's own launch binds arguments by name and works out what to specialize for. That takes about 25 us
on the host, longer than many of these kernels run. The functions that launch kernels make one ``Launch`` for every
combination of sizes, strides and dtypes, and keep it. At the first call, Triton compiles the kernel. It is run by the
driver (``driver.py``) or, where that is impossible, by Triton's launcher.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.driver import DriverLaunch, driver_launch
from qgemm.kernels.launch.tensor_map import TensorMap
from qgemm.kernels.stages import INTERPRETING

ALIGNMENT = 16  # bytes; Triton compiles a variant for every combination of pointers that are multiples of it
MAX_ROWS_TO_OVERLAP = 64
"""Up to this many rows, the next kernel may start before these are computed, to load its weights meanwhile.

It saves 0.5 to 2 us in a product and the quantization of its rows, on an H200. Hopper's products may also do so with
more rows (``hopper.starts_early``); for others that wasn't tried.
"""
_RUNTIME = triton.knobs.runtime


class Launch:
    """``grid`` programs of ``kernel(*tensors, *numbers, *constants)``, to be called with the tensors.

    The dtypes of the tensors, which of them are None, and their device must be the same for every call. Several threads
    may share a ``Launch``.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int,
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int = 1,
        pdl: bool = False,
        maps: Mapping[int, TensorMap] | None = None,
        max_registers: int | None = None,
        cluster: int = 1,
    ) -> None:
        """``numbers``: run-time arguments. ``constants``: compile-time ones.

        ``maps``: the maps of tensors that the kernel gets as a tensor map, by position. ``max_registers``: per thread;
        None leaves it to the compiler.

        ``cluster``: this many consecutive programs should start together, on neighbouring SMs (``DriverLaunch``).

        ``pdl``: programmatic dependent launch. The kernel may start before the preceding one in the stream has ended,
        so it must wait (``tl.extra.cuda.gdc_wait()``) before it reads what that one writes, or writes what that one
        reads. Weights don't change and may be read before. No effect on devices without it.
        """
        self.kernel = kernel
        self._grid = grid
        self._rest = (*numbers, *constants)
        # Without fused multiply-adds, an epilogue rounds like the reference: the same bits on every device.
        self._options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
        if max_registers is not None:
            self._options["maxnreg"] = max_registers
        self._pdl = pdl
        self._maps = dict(maps or {})
        self._cluster = cluster
        self._variants: dict[int, _Variant] = {}
        self.aligned: DriverLaunch | None = None
        """The driver's launch: on the current device, for pointers that are multiples of ``ALIGNMENT``.

        Not to be used while ``hooked()``.
        None before the first call with such tensors, and if only Triton can launch the kernel.
        """

    def __call__(self, *tensors: Tensor | None) -> None:
        """Runs the kernel on the current stream of the first tensor's device."""
        device = tensors[0].device  # type: ignore[union-attr]
        if INTERPRETING:
            self.kernel[(self._grid,)](*self._for_triton(tensors))
            return None
        if device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(*tensors)
        pointers = tuple(tensor.data_ptr() for tensor in tensors if tensor is not None)
        alignment = _alignment(pointers)
        variant = self._variants.get(alignment)
        if variant is None:
            variant = self._variants[alignment] = self._load(tensors)
            if alignment == 0:
                self.aligned = variant.by_driver
        if variant.by_driver is None or hooked():
            variant.by_triton(*self._for_triton(tensors))
        else:
            variant.by_driver(torch._C._cuda_getCurrentRawStream(device.index), pointers)
        return None

    def _load(self, tensors: tuple[Tensor | None, ...]) -> "_Variant":
        """Compiles the kernel for these tensors and loads it on the current device."""
        compiled = self.compile(*tensors)
        by_triton = compiled[(self._grid, 1, 1)]  # this loads it
        return _Variant(driver_launch(compiled, self._grid, self._for_triton(tensors), self._cluster), by_triton)

    def compile(self, *tensors: Tensor | None) -> Any:
        """What Triton compiles for a call with these tensors."""
        options = self._options
        if self._pdl and device_limits(tensors[0].device).pdl:  # type: ignore[union-attr]
            options = {**options, "launch_pdl": True}
        with _untold():
            return self.kernel.warmup(*self._for_triton(tensors), grid=(self._grid,), **options)

    def _for_triton(self, tensors: tuple[Tensor | None, ...]) -> list[Any]:
        arguments: list[Any] = [*tensors, *self._rest]
        for index, tensor_map in self._maps.items():
            arguments[index] = tensor_map.descriptor(arguments[index])
        return arguments


class _Variant(NamedTuple):
    """A kernel compiled for tensors of one alignment, and how to run it."""

    by_driver: DriverLaunch | None
    by_triton: Callable[..., None]


def _alignment(pointers: Sequence[int]) -> int:
    """A bit for each pointer: whether it isn't a multiple of ``ALIGNMENT``."""
    merged = 0
    for pointer in pointers:
        merged |= pointer
    if merged % ALIGNMENT == 0:
        return 0
    return sum(1 << index for index, pointer in enumerate(pointers) if pointer % ALIGNMENT)


@contextlib.contextmanager
def _untold() -> Iterator[None]:
    """Without the hooks of Triton's compilations, which get constants as JSON: a config can't become JSON.

    vLLM sets such hooks once it has warmed up.
    """
    told = _RUNTIME.jit_cache_hook, _RUNTIME.jit_post_compile_hook
    _RUNTIME.jit_cache_hook = _RUNTIME.jit_post_compile_hook = None
    try:
        yield
    finally:
        _RUNTIME.jit_cache_hook, _RUNTIME.jit_post_compile_hook = told


def hooked() -> bool:
    """Whether anything, such as a profiler, has hooked into Triton's launches."""
    enter, exit_ = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    # These are chains of hooks, unless somebody has replaced them by a function or None.
    return bool(getattr(enter, "calls", enter) or getattr(exit_, "calls", exit_))
