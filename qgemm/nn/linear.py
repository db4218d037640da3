"""``QuantLinear``: a linear layer with an int8 or fp8 weight.

``y = x @ (weight * weight_scale[:, None]).T + bias``. ``x`` is quantized to the weight's format first; sums are int32,
or float32 for fp8; ``y`` has the dtype of ``x``. The weight takes a quarter of float32's memory, half of bfloat16's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qgemm.kernels import quantize_rows
from qgemm.kernels.rows import QuantizedRows
from qgemm.nn.linear_layer import InputScale, LinearLayer, parse_input_scale
from qgemm.nn.quant_layer import frozen
from qgemm.nn.shard import Shard
from qgemm.numerics.formats import OPERANDS
from qgemm.ops import quant_linear
from qgemm.ops.declare import to_autocast_dtype
from qgemm.ops.linear import multiply
from qgemm.scheme import QuantScheme

_DTYPES = {form.name for form in OPERANDS.values()}


class QuantLinear(LinearLayer):
    """A quantized ``nn.Linear``: float ``[..., in_features]`` to ``[..., out_features]``.

    Parameters, none of which require a gradient:

    - ``weight``: int8 or float8_e4m3fn ``[out_features, in_features]``.
    - ``weight_scale``: float32 ``[out_features]``.
    - ``bias``: ``[out_features]`` in ``dtype``, or None.
    - ``input_scale``: one float32 number, for a static scheme only; None otherwise.

    On a Hopper GPU, a kernel that uses programmatic dependent launch must not write the weight directly before a call:
    the layer may load the weight before such a kernel has ended. Ordinary kernels may write it.

    The scales of a new layer, and so its outputs, are NaN until it loads a ``state_dict``.
    ``from_linear`` makes one from a float layer.
    """

    weight_names = ("weight",)
    scale_names = ("weight_scale", "input_scale")
    row_names: tuple[str, ...] = ("weight", "weight_scale")
    shared_names: ClassVar[tuple[str, ...]] = ("input_scale",)
    operands: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "bias", "input_scale")
    weight: nn.Parameter
    weight_scale: nn.Parameter
    input_scale: nn.Parameter | None

    def make_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """``bias`` in ``dtype``."""
        shape, storage = (self.out_features, self.in_features), self.scheme.weight.format.storage
        self.weight = frozen(torch.zeros(shape, dtype=storage, device=device))
        # Set before the scale: a transformers model takes the dtype of its first float parameter for its own.
        self.bias = self.empty_bias(device, dtype)
        self.weight_scale = frozen(torch.full(shape[:1], torch.nan, dtype=torch.float32, device=device))
        unknown = torch.full((), torch.nan, dtype=torch.float32, device=device) if self.is_static else None
        self.input_scale = None if unknown is None else frozen(unknown)

    @classmethod
    def computes(cls, scheme: QuantScheme) -> bool:
        """Whether ``scheme`` is plain int8 by int8, or fp8 by fp8, with a scale for each row of the weight."""
        return scheme.weight.granularity == "channel" and scheme.weight.dtype in _DTYPES and scheme.is_plain

    def round_rows(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Values ``[n, K]``, and a scale for each row, float32 ``[n]``."""
        return quantize_rows(weight, dtype=self.scheme.weight.format.storage)

    def store_rows(self, values: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> dict[str, Tensor]:
        """``weight`` and ``weight_scale``, unchanged."""
        return {"weight": values.contiguous(), "weight_scale": scale.contiguous()}

    def restore_rows(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``weight * weight_scale[:, None]``."""
        return parameters["weight"].to(dtype) * parameters["weight_scale"][:, None]

    def take_input_scale(self, input_scale: InputScale | None, device: torch.device) -> None:
        """Sets ``input_scale``, for a static scheme."""
        super().take_input_scale(input_scale, device)
        if input_scale is not None:
            self.input_scale = frozen(parse_input_scale(input_scale, self.scheme, device)[0])

    def compute(self, x: Tensor) -> Tensor:
        """Runs one operator, which also quantizes ``x``."""
        if self.shard is not None and self.shard.shares_scales:
            return self.product(x)
        parameters: dict[str, Any] = self._parameters
        try:  # bypasses stored(), which costs the host 0.1 us per parameter
            weight, weight_scale = parameters["weight"], parameters["weight_scale"]
        except KeyError:
            weight, weight_scale = self.weight, self.weight_scale
        # Not get(), whose default would read the attribute whether or not it is needed.
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        input_scale = parameters["input_scale"] if "input_scale" in parameters else self.input_scale  # noqa: SIM401
        return quant_linear(x, weight, weight_scale, bias, input_scale)

    def product(self, x: Tensor) -> Tensor:
        """The product with the transformed input ``x``; a shard may quantize its rows with the scales of whole rows."""
        weight, weight_scale, bias, *_ = operands = tuple(map(self.stored, self.operands))
        shard = self.shard
        has_gradient = torch.is_grad_enabled() and x.requires_grad
        if shard is None or not shard.shares_scales or self.is_static or has_gradient:
            return quant_linear(x, *operands)
        x = to_autocast_dtype(x)
        rows = quantize_together(x, shard, weight.dtype)
        return multiply(rows.values, rows.scale, weight, weight_scale, bias, None, x.dtype)


_EXTRA = 16


def quantize_together(x: Tensor, shard: Shard, dtype: torch.dtype) -> QuantizedRows:
    """Quantizes ``x [..., K]``, a part of rows whose other columns other processes have, with the whole rows' scales.

    The maximum of the whole row is appended as extra columns, as many as keep rows aligned, which are cut off again.
    """
    wide = torch.cat((x, shard.row_maxima(x).expand(*x.shape[:-1], _EXTRA)), dim=-1)
    values, scale = torch.ops.qgemm.quantize_rows(wide, None, None, dtype)
    return QuantizedRows(values[..., : x.shape[-1]], scale)
