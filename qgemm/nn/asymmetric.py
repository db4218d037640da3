"""``AsymmetricLinear``: an int8 linear layer whose static activations have a zero point.

``x ~ (q - zero_point) * input_scale`` uses all 256 values of int8 for the range of ``x``. A symmetric scale would leave
half of them nearly unused where values have one sign, as after ReLU or GELU. The product stays the symmetric one; the
zero point adds the same term to every row, and the bias subtracts it (``qgemm.numerics.zero_points``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qgemm.nn.linear import QuantLinear
from qgemm.nn.linear_layer import InputScale, parse_input_scale
from qgemm.nn.quant_layer import frozen
from qgemm.numerics.formats import INT8
from qgemm.numerics.zero_points import correction
from qgemm.scheme import QuantScheme


class AsymmetricLinear(QuantLinear):
    """``QuantLinear`` with a static scale and a zero point. Parameters that differ from ``QuantLinear``'s:

    - ``bias``: float32 ``[out_features]``, whatever the model's dtype is, and also for a float layer without a bias:
      the float layer's bias minus ``zero_point * input_scale * weight_scale * sum_k weight``.
    - ``input_zero_point``: one int8 number.
    """

    default_scheme = "int8-static-asymmetric"
    folds_bias = True
    index_names = ("bias", "input_zero_point")
    operands = (*QuantLinear.operands, "input_zero_point")
    shared_names = (*QuantLinear.shared_names, "input_zero_point")
    input_zero_point: nn.Parameter

    def make_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """``bias`` in float32, whatever ``dtype`` is."""
        super().make_parameters(device, dtype)
        self.input_zero_point = frozen(torch.zeros((), dtype=INT8.storage, device=device))

    @classmethod
    def computes(cls, scheme: QuantScheme) -> bool:
        """Whether activations have a zero point."""
        return scheme.weight.format is INT8 and scheme.has_zero_point

    def take_input_scale(self, input_scale: InputScale | None, device: torch.device) -> None:
        """Sets ``input_scale`` and ``input_zero_point``."""
        super().take_input_scale(input_scale, device)
        if input_scale is not None:
            self.input_zero_point = frozen(parse_input_scale(input_scale, self.scheme, device)[1])

    def take_bias(self, bias: Tensor | None) -> None:
        """Sets ``bias`` to the float layer's bias minus the correction."""
        exact = -self._correction() if bias is None else bias.double() - self._correction()
        self.bias = frozen(exact.float())

    @torch.no_grad()
    def float_bias(self) -> Tensor | None:
        """The float layer's bias, within float32's precision; None if it has none."""
        assert self.bias is not None
        return (self.bias.double() + self._correction()).float() if self.has_bias else None

    def compute(self, x: Tensor) -> Tensor:
        """Runs one operator, which also quantizes ``x``."""
        out: Tensor = torch.ops.qgemm.quant_linear_asymmetric(x, *map(self.stored, self.operands))
        return out

    def _correction(self) -> Tensor:
        names = "weight", "weight_scale", "input_scale", "input_zero_point"
        return correction(*(self.stored(name).detach() for name in names))
