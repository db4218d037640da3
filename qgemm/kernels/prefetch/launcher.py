"""Launcher of the kernel that has the L2 fetch weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qgemm.kernels.launch.launch import ALIGNMENT, Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.prefetch.kernels import LINE, _prefetch_kernel

MAX_BYTES = 24 << 20
PROGRAMS = 32


def prefetch(weights: Sequence[Tensor]) -> None:
    """``dispatch.prefetch``, of ``MAX_BYTES`` in all."""
    left = MAX_BYTES
    found: list[tuple[Tensor, int]] = []
    for weight in weights[:2]:
        size = min(weight.nbytes, left) // LINE.value * LINE.value
        if size and weight.is_contiguous() and weight.data_ptr() % ALIGNMENT == 0:
            found.append((weight.detach().view(torch.int8), size))
            left -= size
    if not found:
        return
    sizes = tuple(size for _, size in found) + (0,) * (2 - len(found))
    kind = (prefetch, *sizes, found[0][0].device)
    launch: Launch | None = plans.get(kind)
    if launch is None:
        launch = plans.keep(kind, Launch(_prefetch_kernel, PROGRAMS, sizes, (), num_warps=1, pdl=True))
    launch(found[0][0], found[1][0] if len(found) > 1 else None)
