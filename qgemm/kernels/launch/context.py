"""CUDA's driver, through ctypes, and the context that a thread needs to call its functions.

The driver works in the calling thread's current context. PyTorch makes a device's primary context current when a thread
first does work on the device through it. Allocating from PyTorch's cache or asking for a stream isn't enough. So if a
thread's first call on a GPU is one of this package's, the thread has no context, and the driver returns an error.
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
    # PyDLL would hold the GIL while the driver waits for room in a stream's queue, and the device may be waiting for
    # another thread.
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return library


def in_context(call: Callable[[], int]) -> int:
    """The result of ``call``, which calls the driver; without a context, the thread gets one and tries again."""
    error = call()
    if error == INVALID_CONTEXT:
        bind_context()
        error = call()
    return error


def bind_context() -> None:
    """Makes the primary context of PyTorch's current device current in this thread."""
    context = ctypes.c_void_p()
    libcuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device())
    libcuda().cuCtxSetCurrent(context)
