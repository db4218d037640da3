"""``RotatedLinear``: a quantized linear layer whose input is rotated first.

``y = (x @ H) @ (W @ H).T + bias``, in int8, where ``H`` is the block-diagonal Walsh-Hadamard matrix of
``qgemm.numerics.hadamard``. The product is that of ``x`` and ``W``, but outliers in a few columns of ``x`` are spread
over all of a block before it is quantized, and so no longer set the scale for all others (QuaRot, Ashkboos et al. 2024,
arXiv 2404.00456). Where K is odd there is nothing to rotate.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qgemm.kernels.checks import check_input
from qgemm.nn.linear import QuantLinear
from qgemm.numerics.formats import INT8
from qgemm.numerics.hadamard import hadamard
from qgemm.scheme import QuantScheme

# So many values are rotated at a time: in float64, which takes four times a bfloat16 weight's memory.
_PIECE = 1 << 21


class RotatedLinear(QuantLinear):
    """``QuantLinear`` on a rotated input. The parameters are the same; ``weight`` is that of ``W @ H``, quantized.

    A static ``input_scale`` is that of ``x @ H``, and a rounded ``weight`` that of ``W @ H``.
    """

    @classmethod
    def computes(cls, scheme: QuantScheme) -> bool:
        """Whether activations are rotated."""
        return scheme.weight.format is INT8 and scheme.rotates

    def round_rows(self, weight: Tensor) -> tuple[Tensor, ...]:
        """As ``QuantLinear``, of the rotated rows."""
        return super().round_rows(rotate_rows(weight))

    def restore_rows(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``weight * weight_scale[:, None]``, rotated back."""
        return rotate_rows(super().restore_rows(parameters, torch.float64), dtype)

    def compute(self, x: Tensor) -> Tensor:
        """On ``x @ H``. A shard in row parallelism reads the inputs of all for it, since a block of ``H`` may too."""
        check_input(x, self.in_features)
        if self.shard is not None and self.shard.style == "row":
            rotated = self.shard.own_columns(torch.ops.qgemm.hadamard(self.shard.gather_to_share(x))).contiguous()
        else:
            rotated = torch.ops.qgemm.hadamard(x)
        return self.product(rotated)


def rotate_rows(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``rows @ H`` for float ``[n, K]``, computed in float64, as ``dtype``.

    So that each row is the same whatever rows are rotated beside it: sums of bfloat16 values are exact in float64, but
    for extremes, and others are far closer to exact than float32 tells.
    """
    out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    step = max(1, _PIECE // max(rows.shape[1], 1))
    for start in range(0, rows.shape[0], step):
        part = slice(start, start + step)
        out[part] = hadamard(rows[part].double())
    return out
