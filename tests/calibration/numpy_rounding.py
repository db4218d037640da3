"""Rounding to nearest in NumPy, value by value, for the tests of what builds on it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qgemm.scheme import TensorScheme

Array = NDArray[np.float64]


def grid(bits: int, group_size: int | None = None) -> TensorScheme:
    """The weights that are rounded so, as qgemm calls them."""
    return TensorScheme(f"int{bits}", "group" if group_size else "channel", group_size=group_size)


def numpy_scales(weight: Array, bits: int, group_size: int | None) -> Array:
    """One scale for every value ``[N, K]``, those of a row or group alike."""
    N, K = weight.shape
    size = group_size or K
    scales = np.ones((N, K))
    for n in range(N):
        for start in range(0, K, size):
            amax = np.float32(np.abs(weight[n, start : start + size]).max())
            if amax > 0:
                scale = amax / np.float32(127 if bits == 8 else 7.5)
                scales[n, start : start + size] = max(scale, np.finfo(np.float32).tiny)
    return scales


def numpy_round(values: Array, scales: Array, bits: int) -> Array:
    """The whole numbers that stand for ``values``."""
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    return np.clip(np.rint(values / scales), low, high)
