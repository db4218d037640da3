"""``RotatedLinear``: a quantized linear layer whose input is rotated first.

``y = (x @ H) @ (W @ H).T + bias``, in int8, where ``H`` is the block-diagonal Walsh-Hadamard matrix of
``qgemm.numerics.hadamard``. The product equals that of ``x`` and ``W``, but outliers in a few columns of ``x`` are
spread over their whole block before quantization, and so no longer set the scale for all others (QuaRot, Ashkboos et
al. 2024, arXiv 2404.00456). If K is odd, nothing is rotated.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qgemm.kernels.checks import check_input
from qgemm.nn.linear import QuantLinear
from qgemm.numerics.formats import INT8
from qgemm.numerics.hadamard import hadamard
from qgemm.ops.rows import hadamard as rotate
from qgemm.scheme import QuantScheme

# So many values are rotated at a time, because float64 takes four times the memory of a bfloat16 weight.
_PIECE = 1 << 21


class RotatedLinear(QuantLinear):
    """``QuantLinear`` on a rotated input. The parameters are the same; ``weight`` is the quantized ``W @ H``.

    A static ``input_scale`` is that of ``x @ H``, and a rounded ``weight`` that of ``W @ H``.
    """

    @classmethod
    def computes(cls, scheme: QuantScheme) -> bool:
        """Whether activations are rotated."""
        return scheme.weight.format is INT8 and scheme.rotates

    def round_rows(self, weight: Tensor) -> tuple[Tensor, ...]:
        """As in ``QuantLinear``, for the rotated rows."""
        return super().round_rows(rotate_rows(weight))

    def restore_rows(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``weight * weight_scale[:, None]``, rotated back."""
        return rotate_rows(super().restore_rows(parameters, torch.float64), dtype)

    def compute(self, x: Tensor) -> Tensor:
        """Multiplies ``x @ H``. A row-parallel shard gathers all inputs first: blocks of ``H`` may span processes."""
        check_input(x, self.in_features)
        if self.shard is not None and self.shard.style == "row":
            rotated = self.shard.own_columns(rotate(self.shard.gather_to_share(x))).contiguous()
        else:
            rotated = rotate(x)
        return self.product(rotated)


def rotate_rows(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``rows @ H`` for float ``[n, K]``, computed in float64, as ``dtype``.

    In float64 a row's result doesn't depend on the rows beside it: sums of bfloat16 values are exact, except for
    extremes, and other sums are far closer to exact than float32 can tell.
    """
    out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    step = max(1, _PIECE // max(rows.shape[1], 1))
    for start in range(0, rows.shape[0], step):
        part = slice(start, start + step)
        out[part] = hadamard(rows[part].double())
    return out
