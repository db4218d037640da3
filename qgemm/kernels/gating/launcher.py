"""Launcher of the kernel that multiplies heads by their gates, on GPU tensors, or CPU tensors in Triton's interpreter.

PyTorch takes a kernel for the function of the gates and one for the product, and neither overlaps with its neighbours.
"""

from __future__ import annotations

from torch import Tensor

from qgemm.kernels.gating.kernels import _gate_kernel
from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.quantize import launcher as quantize
from qgemm.kernels.stages.activations import device_gate
from qgemm.numerics.integers import cdiv

BLOCK = 1024  # values per program


def gate_heads(x: Tensor, gate: Tensor, function: str) -> Tensor:
    """``dispatch.gate_heads`` on a GPU."""
    out = x.new_empty(x.shape)
    if out.numel():
        launch, tensors = find_launch(x, gate, function, out)
        launch(*tensors)
    return out


def find_launch(x: Tensor, gate: Tensor, function: str, out: Tensor) -> tuple[Launch, tuple[Tensor, Tensor, Tensor]]:
    """The launch of such a call, and what to call it with."""
    rows, gates = (_as_rows(each) for each in (x, gate))
    kind = (gate_heads, function, *((each.shape, each.stride(), each.dtype, each.device) for each in (rows, gates)))
    launch: Launch | None = plans.get(kind)
    if launch is None:
        (M, H, D), limits = rows.shape, device_limits(x.device)
        work = M * cdiv(H * D, BLOCK)
        grid, next_early = quantize.programs(work, limits)
        numbers = (work, H * D, D, *rows.stride()[:2], *gates.stride()[:2])
        constants = (device_gate(function, x.itemsize), gates.shape[2] < D, BLOCK, limits.pdl, next_early)
        launch = Launch(_gate_kernel, grid, numbers, constants, num_warps=4, pdl=limits.pdl)
        plans.keep(kind, launch)
    return launch, (rows, gates, out)


def _as_rows(x: Tensor) -> Tensor:
    """``x`` as ``[M, H, D]`` with contiguous heads."""
    rows = x.reshape(-1, *x.shape[-2:])
    return rows if rows.stride(2) == 1 else rows.contiguous()
