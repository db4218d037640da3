"""``Launch``: a kernel with everything bound but its tensors, cheap on the host to run again.

Triton's own launch binds arguments by name and works out what to specialize for on every call: about 25 us on the host,
longer than many of these kernels run. The functions that launch kernels make one ``Launch`` for every combination of
sizes, strides and dtypes, and keep it. It goes straight to the compiled variant from the second time on.
"""

from typing import Any

import torch
from torch import Tensor

from qgemm.kernels.stages import INTERPRETING


class Launch:
    """``grid`` programs of ``kernel(*tensors, *numbers, *constants)``, to be called with the tensors.

    The dtypes of the tensors, which of them are None, and their device must be the same for every call.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int,
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int = 1,
    ) -> None:
        """``numbers``: run-time arguments. ``constants``: compile-time ones."""
        self._kernel = kernel
        self._grid = grid
        self._rest = (*numbers, *constants)
        # Without fused multiply-adds an epilogue rounds as the reference does: the same bits on every device.
        self._options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
        self._variants: dict[tuple[bool, ...], Any] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        """Runs the kernel on the current stream of the first tensor's device."""
        device = tensors[0].device  # type: ignore[union-attr]
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(*tensors)
        if INTERPRETING:
            self._kernel[(self._grid,)](*tensors, *self._rest)
            return None
        # Triton's variants also depend on which pointers are aligned to 16 bytes.
        alignment = tuple([tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors])
        variant = self._variants.get(alignment)
        if variant is None:
            compiled = self._kernel[(self._grid,)](*tensors, *self._rest, **self._options)
            self._variants[alignment] = compiled[(self._grid, 1, 1)]
        else:
            variant(*tensors, *self._rest)
        return None
