"""``BlockScaledLinear``: an fp8 linear layer with a scale for each block of 128 x 128 of its weight.

``y = x @ W.T + bias``, where ``W`` is e4m3 values times their block's scale, and every 128 values of a row of ``x`` are
quantized to e4m3 with a scale of their own. So a large value affects the precision of at most those 128 values.
DeepSeek-V3 was trained with this scheme (arXiv 2412.19437).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from qgemm.nn.linear_layer import LinearLayer
from qgemm.nn.quant_layer import frozen
from qgemm.numerics.blocks import BLOCK, block_scales, dequantize_blocks, round_blocks
from qgemm.numerics.integers import cdiv
from qgemm.ops import block_scaled_linear
from qgemm.scheme import QuantScheme


class BlockScaledLinear(LinearLayer):
    """A linear layer with block scales: float ``[..., in_features]`` to ``[..., out_features]``.

    Parameters, none of which require a gradient:

    - ``weight``: float8_e4m3fn ``[out_features, in_features]``.
    - ``weight_scale``: float32 ``[ceil(out_features / 128), ceil(in_features / 128)]``; the last blocks may be short.
    - ``bias``: ``[out_features]`` in ``dtype``, or None.

    A new layer has scales of NaN until it loads a ``state_dict``. ``from_linear`` makes one from a float layer.
    """

    default_scheme = "fp8-block"
    weight_names = ("weight",)
    scale_names = ("weight_scale",)
    row_names: tuple[str, ...] = ("weight", "weight_scale")
    rows_in_step = BLOCK
    column_names = ("weight", "weight_scale")
    operands: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "bias")
    weight: nn.Parameter
    weight_scale: nn.Parameter

    @property
    def columns_in_step(self) -> int:
        """The number of columns in a block."""
        return BLOCK

    def make_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """``bias`` in ``dtype``."""
        shape, storage = (self.out_features, self.in_features), self.scheme.weight.format.storage
        self.weight = frozen(torch.zeros(shape, dtype=storage, device=device))
        self.bias = self.empty_bias(device, dtype)
        scales = cdiv(self.out_features, BLOCK), cdiv(self.in_features, BLOCK)
        self.weight_scale = frozen(torch.full(scales, torch.nan, dtype=torch.float32, device=device))

    @classmethod
    def computes(cls, scheme: QuantScheme) -> bool:
        """Whether ``scheme`` has blocks of 128 x 128."""
        return scheme.weight.block == (BLOCK, BLOCK)

    def round_rows(self, weight: Tensor) -> tuple[Tensor, ...]:
        """e4m3 ``[n, K]``, and the scales of each row, float32 ``[n, ceil(K / 128)]``: equal within a block."""
        scale = block_scales(weight)
        return round_blocks(weight, scale), scale.repeat_interleave(BLOCK, dim=0)[: len(weight)]

    def store_rows(self, values: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> dict[str, Tensor]:
        """``weight``, and ``weight_scale`` of the first row of each block."""
        of_blocks = scale[::BLOCK].clone(memory_format=torch.contiguous_format)  # a single row would be a view
        return {"weight": values.contiguous(), "weight_scale": of_blocks}

    def rows_from(self, start: int, stop: int) -> dict[str, Tensor]:
        """As in ``LinearLayer``; of ``weight_scale``, the rows of the blocks."""
        weight, scale = self.stored("weight").detach(), self.stored("weight_scale").detach()
        return {"weight": weight[start:stop], "weight_scale": scale[start // BLOCK : cdiv(stop, BLOCK)]}

    def restore_rows(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``weight`` times its blocks' scales."""
        return dequantize_blocks(parameters["weight"], parameters["weight_scale"], dtype)

    def check_weight(self, values: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """As in ``LinearLayer``; also checks that all rows of a block have the same scale."""
        super().check_weight(values, scale, zero_point)
        if not torch.equal(scale, scale[::BLOCK].repeat_interleave(BLOCK, dim=0)[: len(scale)]):
            raise ValueError(f"weight's scale differs between rows of a block of {BLOCK}; they must have one")

    def compute(self, x: Tensor) -> Tensor:
        """Runs one operator, which also quantizes ``x``."""
        return block_scaled_linear(x, *map(self.stored, self.operands))
