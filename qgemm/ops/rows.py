"""What is done to rows ahead of a product.

- ``quantize_rows(x, scale, zero_point)``: ``(q, row_scale)``.
- ``hadamard(x)``: ``x`` times a block-diagonal Walsh-Hadamard matrix.
"""

from typing import Any

import torch
from torch import Tensor

from qgemm.kernels import checks, dispatch
from qgemm.numerics.formats import INT8
from qgemm.numerics.hadamard import hadamard
from qgemm.ops.declare import operator


def _quantize_rows_fake(x: Tensor, scale: Tensor | None, zero_point: Tensor | None = None) -> tuple[Tensor, Tensor]:
    checks.check_quantize_rows(x, scale, zero_point)
    return x.new_empty(x.shape, dtype=INT8.storage), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _quantize_rows_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    # Rounding has no useful gradient; quant_linear takes it for the identity.
    ctx.mark_non_differentiable(*output)


operator(
    "quantize_rows(Tensor x, Tensor? scale, Tensor? zero_point=None) -> (Tensor, Tensor)",
    cpu=dispatch.quantize_rows,
    cuda=dispatch.quantize_rows,
    fake=_quantize_rows_fake,
    setup_context=_quantize_rows_setup,
    backward=lambda ctx, wanted, *grads: (None, None, None),
)

operator(
    "hadamard(Tensor x) -> Tensor",
    cpu=hadamard,
    cuda=hadamard,
    fake=lambda x: x.new_empty(x.shape),
    setup_context=lambda ctx, inputs, output: None,
    # The matrix is symmetric.
    backward=lambda ctx, wanted, grad: (torch.ops.qgemm.hadamard(grad),),
    jvp=lambda args, tangents: torch.ops.qgemm.hadamard(tangents[0]),
    vmap=True,
)
