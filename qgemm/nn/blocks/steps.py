"""What a layer computes between its products; rows are quantized once for all products that read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qgemm.kernels.norms import Norm
from qgemm.kernels.rows import QuantizedRows
from qgemm.nn.blocks.operands import Input, Operands, read_rows
from qgemm.ops.norms import add_norm, add_norm_quantize, norm_quantize, post_norm, post_norm_quantize
from qgemm.ops.rows import activate as activate_floats
from qgemm.ops.rows import activation_quantize

_NONE = Norm()
"""Stands for the norm in a call that has none."""


@dataclass(frozen=True, eq=False)
class NormStep:
    """A norm of a layer: its module, and what it computes; ``norm`` is None where that is unknown."""

    module: nn.Module
    norm: Norm | None

    def vectors(self, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias, if operators can compute the norm of ``x``."""
        parameters = self.module._parameters
        weight = parameters.get("weight")
        if self.norm is None or weight is None or weight.dtype != x.dtype:
            return None
        return weight, parameters.get("bias")


def quantize(x: Tensor, operands: Operands) -> QuantizedRows:
    """Quantizes ``x [..., K]`` to rows for a product of ``operands``."""
    return QuantizedRows(*torch.ops.qgemm.quantize_rows(x, operands.input_scale, None, operands.dtype))


def normalize(x: Tensor, step: NormStep | None) -> Tensor:
    """``norm(x)``, or ``x`` if there is no norm."""
    normed: Tensor = x if step is None else step.module(x)
    return normed


def read(x: Tensor, step: NormStep | None, operands: tuple[Operands, ...]) -> Input:
    """The input of a branch: ``norm(x)``, quantized if its first product reads quantized rows."""
    vectors = None if step is None else step.vectors(x)
    if vectors is None:
        return normalize(x, step)
    assert step is not None
    assert step.norm is not None
    if not read_rows(operands):
        return add_norm(x, None, None, *vectors, step.norm)[1]
    return QuantizedRows(*norm_quantize(x, *vectors, step.norm, operands[0].input_scale, operands[0].dtype))


def add_and_read(
    x: Tensor, residual: Tensor, out_step: NormStep | None, step: NormStep | None, operands: tuple[Operands, ...]
) -> tuple[Tensor, Input]:
    """``total = residual + out_norm(x)``, and the next branch's input, ``norm(total)``, as in ``read``."""
    before, after = (None if each is None else each.vectors(x) for each in (out_step, step))
    known = (out_step is None or (before is not None and before[1] is None)) and (step is None or after is not None)
    norms = {each.norm for each in (out_step, step) if each is not None}
    in_rows = read_rows(operands)
    if not known or len(norms) != 1 or (step is None and not in_rows):
        total = add(x, residual, out_step)
        return total, read(total, step, operands)
    (norm,) = norms
    assert norm is not None
    branch_weight = None if before is None else before[0]
    weight, bias = (None, None) if after is None else after
    if in_rows:
        scale, dtype = operands[0].input_scale, operands[0].dtype
        total, *rows = add_norm_quantize(x, residual, branch_weight, weight, bias, norm, scale, dtype)
        return total, QuantizedRows(*rows)
    return add_norm(x, residual, branch_weight, weight, bias, norm)


def add(x: Tensor, residual: Tensor, out_step: NormStep | None) -> Tensor:
    """``residual + out_norm(x)``, in one kernel if the norm is known or there is none."""
    if out_step is None:
        return add_norm(x, residual, None, None, None, _NONE)[0] if x.dtype == residual.dtype else residual + x
    vectors = out_step.vectors(x)
    if vectors is None or vectors[1] is not None or out_step.norm is None:
        return residual + normalize(x, out_step)
    return add_norm(x, residual, vectors[0], None, None, out_step.norm)[0]


def normalize_and_read(
    x: Tensor, residual: Tensor | None, step: NormStep | None, operands: tuple[Operands, ...]
) -> tuple[Tensor, Input]:
    """``normed = norm(residual + x)``, and the next branch's input: quantized rows if it reads such, else ``normed``.

    Without a ``residual``, ``normed = norm(x)``.
    """
    vectors = None if step is None else step.vectors(x)
    if residual is None or step is None or step.norm is None or vectors is None:
        normed = normalize(x if residual is None else residual + x, step)
        return normed, normed
    if read_rows(operands):
        scale, dtype = operands[0].input_scale, operands[0].dtype
        normed, *rows = post_norm_quantize(x, residual, *vectors, step.norm, scale, dtype)
        return normed, QuantizedRows(*rows)
    normed = post_norm(x, residual, *vectors, step.norm)
    return normed, normed


def activate(
    h: Tensor,
    activation: Callable[[Tensor], Tensor],
    name: str,
    gated: bool,
    operands: Operands,
    up_first: bool = False,
) -> Input:
    """``act(gate) * up`` of ``h [..., 2I]``, or ``act(h)``, as input for a product of ``operands``.

    It takes one kernel if ``name`` says which activation it is. ``up_first``: whether ups are before gates.
    """
    if name and operands.reads_rows:
        how = operands.input_scale, operands.dtype, None, up_first
        return QuantizedRows(*activation_quantize(h, name, gated, *how))
    if name:
        return activate_floats(h, name, gated, up_first)
    if not gated:
        return activation(h)
    gate, up = h.chunk(2, dim=-1)[:: -1 if up_first else 1]
    return activation(gate) * up
