"""Launching a kernel, cheaply from the second time on.

Triton's own launch binds arguments by name and works out what to specialize for on every call: about 25 us on the host,
longer than many of these kernels run. Here that happens once per combination of everything that a compiled variant may
depend on. Later calls go straight to the variant.
"""

from typing import Any

import torch
from torch import Tensor

from qgemm.kernels.stages import INTERPRETING

_variants: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: int,
    tensors: tuple[Tensor | None, ...],
    sizes: tuple[int, ...],
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    num_stages: int = 1,
) -> None:
    """Runs ``grid`` programs of ``kernel(*tensors, *sizes, *numbers, *constants)`` on the first tensor's device.

    ``sizes``: arguments that the kernel says ``do_not_specialize`` of, so that a new value needs no new variant.
    ``numbers``: other run-time arguments. ``constants``: compile-time ones.
    """
    device = tensors[0].device  # type: ignore[union-attr]
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, tensors, sizes, numbers, constants, num_warps, num_stages)

    arguments = (*tensors, *sizes, *numbers, *constants)
    if INTERPRETING:
        kernel[(grid,)](*arguments)
        return None
    # Triton specializes for a pointer's dtype and 16-byte alignment, and for properties of a number's value.
    pointers = tuple([None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors])
    wide = tuple([size >= 2**31 for size in sizes])
    key = (kernel.__name__, device.index, pointers, wide, numbers, constants, num_warps, num_stages)
    variant = _variants.get(key)
    if variant is not None:
        variant[(grid, 1, 1)](*arguments)
        return None
    # Without fused multiply-adds an epilogue rounds as the reference does: the same bits on every device.
    _variants[key] = kernel[(grid,)](*arguments, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False)
    return None
