"""The product of a layer for each family of schemes, as a function of the vLLM layer with the parameters.

They match ``compute`` of qgemm's layers, but get the bias as an argument: vLLM passes it to one rank only. Parts of a
merged layer that differ in what a product has only once (nvfp4's global scale, columns kept in float) are separate
products.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from qgemm.integrations.vllm.names import FOLDED_BIAS, STEP
from qgemm.integrations.vllm.sizes import Sizes
from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.nn.asymmetric import AsymmetricLinear
from qgemm.nn.block_scaled import BlockScaledLinear
from qgemm.nn.kinds import linear_class
from qgemm.nn.linear import QuantLinear
from qgemm.nn.linear_layer import LinearLayer
from qgemm.nn.outliers import OutlierLinear
from qgemm.nn.rotated import RotatedLinear
from qgemm.nn.weight_only import WeightOnlyLinear
from qgemm.ops import block_scaled_linear, quant_linear
from qgemm.ops.linear import weight_only_linear
from qgemm.scheme import QuantScheme

Tensors: TypeAlias = "Callable[[str], Any]"
"""Returns a parameter of a layer, or of a part of it, by name, or None."""
Product: TypeAlias = Callable[[nn.Module, Tensor, "Tensor | None"], Tensor]


def product_of(scheme: QuantScheme, sizes: Sizes, parts: int) -> Product:
    """The product for layers of ``scheme``; ``parts``: the number of separate products."""
    compute = partial(_PRODUCTS[_family(linear_class(scheme))], sizes=sizes)
    if parts == 1:
        return lambda layer, x, bias: compute(lambda name: getattr(layer, name, None), x, bias)
    spans = sizes.spans

    def by_parts(layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        outs = []
        for part, (start, stop) in enumerate(spans):
            own = None if bias is None else bias[start:stop]
            outs.append(compute(lambda name, part=part: sizes.part(name, getattr(layer, name, None), part), x, own))
        return torch.cat(outs, dim=-1)

    return by_parts


def _family(kind: type[LinearLayer]) -> type[LinearLayer]:
    return next(each for each in kind.__mro__ if each in _PRODUCTS)


def _plain(get: Tensors, x: Tensor, bias: Tensor | None, sizes: Sizes) -> Tensor:
    return quant_linear(x, get("weight"), get("weight_scale"), bias, get("input_scale"))


def _rotated(get: Tensors, x: Tensor, bias: Tensor | None, sizes: Sizes) -> Tensor:
    return _plain(get, torch.ops.qgemm.hadamard(x), bias, sizes)


def _asymmetric(get: Tensors, x: Tensor, bias: Tensor | None, sizes: Sizes) -> Tensor:
    # If the layer has a bias, the folded one contains it.
    weight = get("weight"), get("weight_scale"), get(FOLDED_BIAS)
    out: Tensor = torch.ops.qgemm.quant_linear_asymmetric(x, *weight, get("input_scale"), get("input_zero_point"))
    return out


def _outliers(get: Tensors, x: Tensor, bias: Tensor | None, sizes: Sizes) -> Tensor:
    columns, weight = get("outlier_columns"), get("outlier_weight")
    out = _plain(get, x.index_fill(-1, columns, 0), bias, sizes)
    kept = x.reshape(-1, x.shape[-1]).index_select(-1, columns)  # a rank's part may contain none of these columns
    return torch.addmm(out.reshape(-1, out.shape[-1]), kept, weight.t().to(x.dtype)).view(out.shape)


def _blocks(get: Tensors, x: Tensor, bias: Tensor | None, sizes: Sizes) -> Tensor:
    return block_scaled_linear(x, get("weight"), get("weight_scale"), bias)


def _weight_only(get: Tensors, x: Tensor, bias: Tensor | None, sizes: Sizes) -> Tensor:
    tensors = [get(name) for name in WeightOnlyLinear.operands[:-1]]
    return weight_only_linear(x, ScaledWeight._make((*tensors, bias, *sizes.numbers, get(STEP))))


_PRODUCTS: dict[type[LinearLayer], Callable[..., Tensor]] = {
    QuantLinear: _plain,
    RotatedLinear: _rotated,
    AsymmetricLinear: _asymmetric,
    OutlierLinear: _outliers,
    BlockScaledLinear: _blocks,
    WeightOnlyLinear: _weight_only,
}
