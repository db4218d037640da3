"""The operands of a product, by kind of layer: they multiply rows that were quantized before, or floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from qgemm.kernels.activations import Gates
from qgemm.kernels.rows import QuantizedRows
from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.nn.asymmetric import AsymmetricLinear
from qgemm.nn.block_scaled import BlockScaledLinear
from qgemm.nn.linear import QuantLinear, quantize_together
from qgemm.nn.linear_layer import LinearLayer
from qgemm.nn.outliers import OutlierLinear, add_outliers
from qgemm.nn.prescaled import PrescaledLinear, prescaled
from qgemm.nn.rotated import RotatedLinear
from qgemm.nn.row_steps import found_steps
from qgemm.nn.shard import Shard
from qgemm.nn.weight_only import WeightOnlyLinear
from qgemm.ops import block_scaled_linear, quant_linear
from qgemm.ops.linear import multiply, weight_only_activated, weight_only_linear
from qgemm.ops.rows import hadamard as rotate

Input: TypeAlias = Tensor | QuantizedRows
"""What a branch of a layer reads: floats, or rows that are quantized already."""


class QuantizedOperands(NamedTuple):
    """The operands of a ``QuantLinear``, which can multiply quantized rows that several products share."""

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    input_scale: Tensor | None

    @property
    def reads_rows(self) -> bool:
        """Whether the product should get rows that are already quantized."""
        return True

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the quantized rows that it reads."""
        return self.weight.dtype

    def product(self, x: Input, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """``round(x @ weight.T + bias)`` in ``dtype``, plus ``residual``, rounded once more."""
        weight, weight_scale, bias, input_scale = self
        if isinstance(x, QuantizedRows):
            return multiply(x.values, x.scale, weight, weight_scale, bias, residual, dtype)
        return quant_linear(x, weight, weight_scale, bias, input_scale, residual)


class _ReadsFloats:
    """The properties of operands whose product reads only floats, and that have no scale for all rows."""

    @property
    def reads_rows(self) -> bool:
        """False."""
        return False

    @property
    def dtype(self) -> torch.dtype:
        """Raises ``TypeError``: the product reads no quantized rows."""
        raise TypeError(f"{type(self).__name__} read no quantized rows")

    @property
    def input_scale(self) -> None:
        """None."""
        return None


@dataclass(frozen=True, eq=False)
class FloatOperands(_ReadsFloats):
    """The operands of a ``WeightOnlyLinear``."""

    weight: ScaledWeight

    def product(self, x: Input, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """As in ``QuantizedOperands``, for ``x`` in ``dtype``."""
        assert isinstance(x, Tensor)
        return weight_only_linear(x, self.weight, residual)

    def activated(self, x: Tensor, gates: Gates) -> Tensor:
        """``round(act(gate)) * up`` of the product, which has the columns of gates and ups."""
        return weight_only_activated(x, self.weight, gates)


@dataclass(frozen=True, eq=False)
class BlockScaledOperands(_ReadsFloats):
    """The operands of a ``BlockScaledLinear``, which quantizes its own input."""

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def product(self, x: Input, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """As in ``QuantizedOperands``, for ``x`` in ``dtype``."""
        assert isinstance(x, Tensor)
        return block_scaled_linear(x, self.weight, self.weight_scale, self.bias, residual)


@dataclass(frozen=True, eq=False)
class TransformedOperands(_ReadsFloats):
    """The operands of a layer that rotates or multiplies its input: ``own`` ones for what ``transform`` makes of it."""

    own: QuantizedOperands | FloatOperands
    transform: Callable[[Tensor], Tensor]

    def product(self, x: Input, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """As in ``QuantizedOperands``, for ``x`` in ``dtype``."""
        assert isinstance(x, Tensor)
        return self.own.product(self.transform(x), dtype, residual)


@dataclass(frozen=True, eq=False)
class AsymmetricOperands(_ReadsFloats):
    """The operands of an ``AsymmetricLinear``, in its order."""

    tensors: tuple[Tensor | None, ...]

    def product(self, x: Input, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """As in ``QuantizedOperands``, for ``x`` in ``dtype``."""
        out: Tensor = torch.ops.qgemm.quant_linear_asymmetric(x, *self.tensors)
        return out if residual is None else residual + out


@dataclass(frozen=True, eq=False)
class OutlierOperands(_ReadsFloats):
    """The operands of an ``OutlierLinear``: ``own`` ones for all other columns, and those that stay in float."""

    own: QuantizedOperands
    columns: Tensor
    weight: Tensor

    def product(self, x: Input, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """As in ``QuantizedOperands``, for ``x`` in ``dtype``."""
        assert isinstance(x, Tensor)
        out = add_outliers(self.own.product(x.index_fill(-1, self.columns, 0), dtype), x, self.columns, self.weight)
        return out if residual is None else residual + out


OwnOperands: TypeAlias = (
    QuantizedOperands | FloatOperands | BlockScaledOperands | TransformedOperands | AsymmetricOperands | OutlierOperands
)


class SummedOperands(NamedTuple):
    """The operands of a row-parallel shard: the products of all processes are summed, here or by the caller.

    ``sums``: whether they are summed here.
    """

    own: OwnOperands
    shard: Shard
    sums: bool = True

    @property
    def reads_rows(self) -> bool:
        """As the shard does; but where processes share scales, the product quantizes the rows itself."""
        return self.own.reads_rows and not self._quantizes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the quantized rows that it reads."""
        return self.own.dtype

    @property
    def input_scale(self) -> Tensor | None:
        """The static scale of the input, or None."""
        return self.own.input_scale

    @property
    def _quantizes(self) -> bool:
        return self.shard.shares_scales and self.own.reads_rows and self.own.input_scale is None

    def product(self, x: Input, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """As above. One process adds bias and residual; if the caller sums, each process adds its own residual."""
        if self._quantizes:
            assert isinstance(x, Tensor)
            x = quantize_together(x, self.shard, self.own.dtype)
        if not self.sums:
            return self.own.product(x, dtype, residual)
        return self.shard.sum(self.own.product(x, dtype, None if self.shard.rank else residual))


Operands: TypeAlias = OwnOperands | SummedOperands


def read_rows(operands: tuple[Operands, ...]) -> bool:
    """Whether a branch with these ``operands``, whose first come first, should get rows that are already quantized."""
    return len(operands) > 0 and operands[0].reads_rows


def operands_of(layer: LinearLayer, tensors: Mapping[str, Tensor | None]) -> Operands:
    """The operands of layers of the kind of ``layer`` whose parameters are ``tensors``, by name."""
    own = _own_operands(layer, tensors)
    is_summed = layer.shard is not None and layer.shard.style == "row"
    return SummedOperands(own, layer.shard) if is_summed else own  # type: ignore[arg-type]


def _own_operands(layer: LinearLayer, tensors: Mapping[str, Tensor | None]) -> OwnOperands:
    if isinstance(layer, AsymmetricLinear):
        return AsymmetricOperands(tuple(tensors[name] for name in layer.operands))
    if isinstance(layer, QuantLinear):
        own = QuantizedOperands(*(tensors[name] for name in layer.operands))  # type: ignore[arg-type]
        if isinstance(layer, RotatedLinear):
            return TransformedOperands(own, rotate)
        if isinstance(layer, OutlierLinear):
            return OutlierOperands(own, tensors["outlier_columns"], tensors["outlier_weight"])  # type: ignore[arg-type]
        return own
    if isinstance(layer, BlockScaledLinear):
        return BlockScaledOperands(*(tensors[name] for name in layer.operands))  # type: ignore[arg-type]
    assert isinstance(layer, WeightOnlyLinear)
    scale = tensors["weight_scale"]
    step = None if layer.steps is None or scale is None else found_steps(scale)
    own_floats = FloatOperands(ScaledWeight._make((*map(tensors.get, layer.operands), *layer.numbers, step)))
    if isinstance(layer, PrescaledLinear):
        return TransformedOperands(own_floats, partial(prescaled, tensors["input_prescale"]))  # type: ignore[arg-type]
    return own_floats
