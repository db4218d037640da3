"""Weights that are read ahead of their products, where that gains time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qgemm.kernels.launch.device import device_limits

MAX_ROWS = 16


def prefetches(x: Tensor) -> bool:
    """Whether products of ``x [..., K]`` gain by weights that the L2 fetches ahead: of few rows, on Hopper.

    Only in a CUDA graph: elsewhere one more launch takes the host longer than it saves the device.
    """
    return (
        x.is_cuda
        and x.numel() <= MAX_ROWS * x.shape[-1]
        and torch._C._cuda_isCurrentStreamCapturing()
        and device_limits(x.device).hopper
    )


def prefetch(weights: Sequence[Tensor]) -> None:
    """Has the L2 fetch the first bytes of up to two ``weights``, on the current stream. Nothing but time depends on it.

    On the GPU that has the weights, which doesn't write them meanwhile; for rows of which ``prefetches`` is true.
    """
    from qgemm.kernels.prefetch import launcher

    launcher.prefetch(weights)
