"""CUDA's driver, through ctypes, and the context that a thread needs for its functions.

The driver works in the context that is current in the calling thread. PyTorch makes a device's primary context current
when a thread first has it do something on a device; taking memory from PyTorch's cache, or asking for a stream, is not
enough. So a thread whose first call on a GPU is one of this package's has none, and the driver says so.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


@functools.cache
def libcuda() -> ctypes.CDLL:
    """CUDA's driver."""
    # Not PyDLL, which would hold the GIL: the driver waits while a stream's queue is full, and the device may be
    # waiting for another thread.
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return library


def in_context(call: Callable[[], int]) -> int:
    """What ``call``, of a function of the driver, returns; in a thread without a context once there is one."""
    error = call()
    if error == INVALID_CONTEXT:
        bind_context()
        error = call()
    return error


def bind_context() -> None:
    """Makes the primary context of PyTorch's current device this thread's."""
    context = ctypes.c_void_p()
    libcuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device())
    libcuda().cuCtxSetCurrent(context)
