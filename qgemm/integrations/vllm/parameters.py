"""The parameters of a quantized layer in vLLM: qgemm's own, as vLLM classes that know how they are merged and split.

- Rows (``weight``, its scales) are merged along N, and split along N or, in row-parallel layers, along K.
- Parameters that describe the input (static scales, columns kept in float) exist once for each part of a merged layer.
  If all parts agree, they become a single one in the end; if not, each part is a separate product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.parameter import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)

from qgemm.integrations.vllm.names import FOLDED_BIAS, STEP
from qgemm.integrations.vllm.sizes import Sizes
from qgemm.nn.linear_layer import LinearLayer
from qgemm.nn.quant_layer import frozen
from qgemm.nn.row_steps import found_steps
from qgemm.nn.shard import Shard, Split
from qgemm.numerics.blocks import BLOCK
from qgemm.numerics.formats import FLOAT_DTYPES

_NO_SCALE = {torch.uint8: 255, torch.float8_e4m3fn: 127}
"""NaN as e8m0 and e4m3."""


def add_parameters(layer: Any, sizes: Sizes, dtype: torch.dtype, load: Callable[..., Any]) -> None:
    """Adds the parameters of its scheme to ``layer``, to be filled by ``load``. ``dtype``: of what stays in float."""
    linear = sizes.linear()
    if sizes.scheme.weight.block is not None:
        layer.weight_block_size = [BLOCK, BLOCK]  # vLLM splits scales of blocks by it
    shared = _shared_names(linear)
    for name, like in linear._parameters.items():
        if like is None:
            continue
        own_dtype = dtype if name == "outlier_weight" else like.dtype
        count = (len(sizes.rows),) if name in shared and len(sizes.rows) > 1 else ()
        shape = (*count, *like.shape) or (1,)
        data = _unknown(name, torch.empty(shape, dtype=own_dtype), linear)
        options: dict[str, Any] = {"data": data, "weight_loader": _exactly(load, f"{sizes.name}.{name}")}
        parameter = SharedParameter(**options) if name in shared else _row_parameter(name, like, sizes, options)
        layer.register_parameter(FOLDED_BIAS if name == "bias" else name, parameter)
    for name in (*linear.shared_names, *linear.operands):
        if name != "bias" and name not in layer._parameters:
            layer.register_parameter(name, None)


def _shared_names(linear: LinearLayer) -> set[str]:
    """The parameters without a row for each row of the weight."""
    return {n for n, like in linear._parameters.items() if like is not None and n not in (*linear.row_names, "bias")}


def _row_parameter(name: str, like: Tensor, sizes: Sizes, options: dict[str, Any]) -> nn.Parameter:
    parameter: nn.Parameter
    if name == "weight":
        is_packed = sizes.scheme.weight.format.bits == 4
        parameter = PackedParameter(sizes=sizes, **options) if is_packed else _along_both(ModelWeightParameter, options)
    elif name == "weight_scale" and sizes.scheme.weight.block is not None:
        parameter = _along_both(BlockQuantScaleParameter, options)
    elif like.ndim == 2 and sizes.scheme.weight.granularity == "group" and name != "outlier_weight":
        parameter = _along_both(GroupQuantScaleParameter, options)
    else:
        parameter = ChannelQuantScaleParameter(output_dim=0, **options)
    return parameter


def _along_both(kind: Any, options: dict[str, Any]) -> Any:
    return kind(input_dim=1, output_dim=0, **options)


def _unknown(name: str, data: Tensor, linear: LinearLayer) -> Tensor:
    """Values that show that nothing was loaded, if there are such; no value may index beyond a tensor."""
    if data.dtype in FLOAT_DTYPES:
        return data.fill_(torch.nan)
    if name in linear.scale_names:
        return data.view(torch.uint8).fill_(no_scale(data.dtype)).view(data.dtype)
    if name in linear.index_names and data.ndim:
        return data.copy_(torch.arange(data.shape[-1]).expand(data.shape)) if data.dtype != torch.int8 else data.zero_()
    return data if name == "weight" else data.view(torch.uint8).fill_(0).view(data.dtype)


def _exactly(load: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wraps ``load`` for exact dtypes: float parameters get the dtype in the files, any other difference raises.

    Copying would silently round a float16 scale to bfloat16, and floats to int8.
    """

    def load_exactly(parameter: Any, value: Tensor, *arguments: Any, **options: Any) -> Any:
        take_dtype(parameter, value, name)
        return load(parameter, value, *arguments, **options)

    return load_exactly


def take_dtype(parameter: Any, value: Tensor, name: str) -> None:
    """Gives ``parameter`` a dtype that holds ``value`` from the files; raises ``ValueError`` if that isn't a float."""
    known = parameter.data
    if value.dtype != known.dtype:
        if not {value.dtype, known.dtype} <= set(FLOAT_DTYPES):
            raise ValueError(f"{name} is {value.dtype} in the files, but the layer has {known.dtype}")
        is_new = bool(known.isnan().all())
        parameter.data = known.to(value.dtype if is_new else torch.promote_types(known.dtype, value.dtype))


class SharedParameter(PerTensorScaleParameter):
    """A value of any shape for each part of a merged layer."""

    def load_row_parallel_weight(self, loaded_weight: Tensor) -> None:
        """Loads it whole on every rank."""
        self.data.copy_(loaded_weight.reshape(self.data.shape))

    load_column_parallel_weight = load_row_parallel_weight

    def _load_into_shard_id(self, loaded_weight: Tensor, shard_id: str | int, **_: Any) -> None:
        own = self.data[self._shard_id_as_int(shard_id)]
        own.copy_(loaded_weight.reshape(own.shape))


class PackedParameter(ModelWeightParameter):
    """4-bit values, two per byte, which are far apart in a row: they are repacked if a split separates them."""

    def __init__(self, sizes: Sizes, **options: Any) -> None:
        """``options``: the data and the loader."""
        super().__init__(input_dim=1, output_dim=0, **options)
        self._sizes = sizes

    def load_row_parallel_weight(self, loaded_weight: Tensor) -> None:
        """Loads the columns of this rank."""
        K, own_K, form = self._sizes.K, self._sizes.own_K, self._sizes.scheme.weight.format
        shard = Shard("row", None, self.tp_rank, K // own_K)
        self.data.copy_(shard.part_of(loaded_weight, Split(1, codes=K, fill=form.zero_code)))


def finish_parameters(layer: Any, sizes: Sizes) -> int:
    """Turns what was loaded into plain parameters. Returns the number of products: 1, or one for each part.

    Raises ``ValueError`` for a parameter that is missing from the files.
    """
    linear, values = sizes.linear(), {}
    shapes = {name: like.shape for name, like in linear._parameters.items() if like is not None}
    for name in shapes:
        own = FOLDED_BIAS if name == "bias" else name
        values[own] = value = layer._parameters[own].data
        if is_missing(value, name in linear.scale_names):
            raise ValueError(f"{sizes.name}.{own} isn't in the files, or not all of it")
    shared, parts = _shared_names(linear), len(sizes.rows)
    if parts > 1 and all(bool((values[name] == values[name][:1]).all()) for name in shared):
        values |= {name: values[name][0] for name in shared}
        parts = 1
    if parts == 1:
        values |= {name: values[name].reshape(shapes[name]) for name in shared}
    if sizes.is_cut:
        _take_own_part(values, layer.tp_rank, sizes.own_K)
    if FOLDED_BIAS in values and getattr(layer, "bias", None) is not None:
        layer.bias.data.zero_()  # the folded bias contains it
    if sizes.scheme.weight.scale_dtype == "steps" and (step := found_steps(values["weight_scale"])) is not None:
        values[STEP] = step
    for name, value in values.items():
        setattr(layer, name, frozen(value))
    return parts


def is_missing(value: Tensor, is_scale: bool) -> bool:
    """Whether a part of a parameter's ``value`` wasn't loaded: before that, floats and scales of any dtype are NaN."""
    if is_scale and value.dtype in _NO_SCALE:
        mask = _NO_SCALE[value.dtype]
        return bool((value.view(torch.uint8) & mask == mask).any())
    return value.dtype in FLOAT_DTYPES and bool(value.isnan().any())


def no_scale(dtype: torch.dtype) -> int:
    """The byte of a scale that wasn't loaded: NaN; or 1 as e8m0, which vLLM's dummy weights don't change."""
    return 127 if dtype == torch.uint8 and loads_dummies() else _NO_SCALE[dtype]


def loads_dummies() -> bool:
    """Whether the model that vLLM is making gets dummy weights: ``load_format="dummy"``."""
    try:
        return bool(get_current_vllm_config().load_config.load_format == "dummy")
    except AssertionError:  # no model is being made
        return False


def _take_own_part(values: dict[str, Tensor], rank: int, own_K: int) -> None:
    """Reduces parameters that were loaded whole, although the weight is split along K, to what belongs to a rank."""
    if (columns := values.get("outlier_columns")) is not None:
        here = (columns >= rank * own_K) & (columns < (rank + 1) * own_K)
        values["outlier_columns"] = columns[here] - rank * own_K
        values["outlier_weight"] = values["outlier_weight"][:, here].contiguous()
    if rank and FOLDED_BIAS in values:
        values[FOLDED_BIAS].zero_()  # it is only added once
