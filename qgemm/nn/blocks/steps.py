"""What a layer computes between its products; rows are quantized once for all products that read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qgemm.kernels.norms import Norm
from qgemm.kernels.rows import QuantizedRows
from qgemm.nn.blocks.operands import Input, Operands, read_rows
from qgemm.ops.norms import add_norm, add_norm_quantize, norm_quantize, post_norm, post_norm_quantize
from qgemm.ops.rows import activate as activate_floats
from qgemm.ops.rows import activation_quantize

NO_NORM = Norm()
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


class Factors(NamedTuple):
    """What multiplies a branch's output before its norm: ``number``, then ``vector``; and ``total``, the sum.

    Each product is rounded. ``vector``: ``[K]``; ``total``: a single value.
    """

    number: float = 1.0
    vector: Tensor | None = None
    total: Tensor | None = None

    @property
    def none(self) -> bool:
        """Whether nothing is multiplied."""
        return self.number == 1.0 and self.vector is None and self.total is None

    def of(self, x: Tensor) -> Tensor:
        """``x`` times ``number`` and ``vector``."""
        x = x if self.number == 1.0 else x * self.number
        return x if self.vector is None else x * self.vector

    def left_after(self, x: Tensor, out_step: NormStep | None) -> tuple[Tensor, Factors]:
        """``x`` times those that the kernel of a sum doesn't multiply by, and the others."""
        both = self.number != 1.0 and self.vector is not None
        if both or out_step is not None or (self.vector is not None and self.vector.dtype != x.dtype):
            return self.of(x), Factors(total=self.total)
        return x, self


NO_FACTORS = Factors()


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
    x: Tensor,
    residual: Tensor,
    out_step: NormStep | None,
    step: NormStep | None,
    operands: tuple[Operands, ...],
    factors: Factors = NO_FACTORS,
) -> tuple[Tensor, Input]:
    """``total = residual + out_norm(factors * x)``, and the next branch's input, ``norm(total)``, as in ``read``."""
    x, factors = factors.left_after(x, out_step)
    before, after = (None if each is None else each.vectors(x) for each in (out_step, step))
    known = (out_step is None or (before is not None and before[1] is None)) and (step is None or after is not None)
    norms = {each.norm for each in (out_step, step) if each is not None}
    in_rows = read_rows(operands)
    if not known or len(norms) != 1 or (step is None and not in_rows):
        total = add(x, residual, out_step, factors)
        return total, read(total, step, operands)
    (norm,) = norms
    assert norm is not None
    branch_weight = None if before is None else before[0]
    weight, bias = (None, None) if after is None else after
    if in_rows:
        scale, dtype = operands[0].input_scale, operands[0].dtype
        how = norm, scale, dtype, factors.vector, factors.number
        total, *rows = add_norm_quantize(x, residual, branch_weight, weight, bias, *how)
        return total, QuantizedRows(*rows)
    return add_norm(x, residual, branch_weight, weight, bias, norm, factors.vector, factors.number)


def add(x: Tensor, residual: Tensor, out_step: NormStep | None, factors: Factors = NO_FACTORS) -> Tensor:
    """``residual + out_norm(factors * x)``, in one kernel if the norm is known or there is none."""
    x, factors = factors.left_after(x, out_step)
    vectors = None if out_step is None else out_step.vectors(x)
    known = x.dtype == residual.dtype and (out_step is None or (vectors is not None and vectors[1] is None))
    total = factors.total
    if not known or (total is not None and (total.dtype != x.dtype or total.shape != (1,))):
        added = residual + normalize(factors.of(x), out_step)
        return added if total is None else added * total
    weight = None if vectors is None else vectors[0]
    norm = NO_NORM if out_step is None or out_step.norm is None else out_step.norm
    return add_norm(x, residual, weight, None, None, norm, factors.vector, factors.number, total)[0]


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
