"""``PrescaledLinear``: a layer with a quantized weight whose input is first multiplied by a factor for each column.

``y = (x * f) @ W.T + bias``, as AWQ leaves layers that nothing precedes into which their factors could be folded:
ModelOpt's ``pre_quant_scale``, torchao's ``act_pre_scale``. Folding them into ``W`` would round it anew.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qgemm.kernels.checks import check_input, check_same_device
from qgemm.nn.quant_layer import frozen
from qgemm.nn.shard import Split, Style
from qgemm.nn.weight_only import WeightOnlyLinear
from qgemm.numerics.formats import FLOAT_DTYPES
from qgemm.scheme import QuantScheme


class PrescaledLinear(WeightOnlyLinear):
    """``WeightOnlyLinear`` on ``x * input_prescale``, which is rounded to the dtype of ``x``.

    The parameters are the same, and ``input_prescale``, ``[in_features]``: float32 ones in a layer that is made from a
    float one; of a checkpoint in float32, float16 or bfloat16, as it has them.
    """

    default_scheme = "int4-prescaled"
    index_names = (*WeightOnlyLinear.index_names, "input_prescale")
    shared_names = (*WeightOnlyLinear.shared_names, "input_prescale")
    whole_names = shared_names
    input_prescale: nn.Parameter

    def make_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """As in ``WeightOnlyLinear``."""
        self.input_prescale = frozen(torch.ones(self.in_features, dtype=torch.float32, device=device))
        super().make_parameters(device, dtype)

    @classmethod
    def computes(cls, scheme: QuantScheme) -> bool:
        """Whether ``scheme`` leaves activations in float, but multiplies them."""
        return scheme.is_weight_only and scheme.down is None and scheme.weight.is_prescaled

    def splits(self, style: Style, parts: int = 1) -> dict[str, Split]:
        """As in ``LinearLayer``."""
        made = super().splits(style, parts)
        if style == "row":
            made["input_prescale"] = Split(0)
        return made

    def accepts_dtype(self, name: str, dtype: torch.dtype) -> bool:
        """As in ``QuantLayer``; factors may have any of the three float dtypes."""
        return dtype in FLOAT_DTYPES if name == "input_prescale" else super().accepts_dtype(name, dtype)

    def problem_with(self, name: str, value: Tensor) -> str:
        """As in ``QuantLayer``; factors must be finite."""
        if name == "input_prescale":
            return "" if bool(value.isfinite().all()) else "holds NaN or Inf"
        return super().problem_with(name, value)

    def start_rows(self, device: torch.device, amax: Tensor | None) -> None:
        """Sets factors of 1, too."""
        super().start_rows(device, amax)
        self.input_prescale = frozen(torch.ones_like(self.input_prescale, device=device))

    def restore_rows(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The rows that the input without factors would be multiplied by."""
        return super().restore_rows(parameters, dtype) * self.input_prescale.detach().to(dtype)

    def compute(self, x: Tensor) -> Tensor:
        """Multiplies, and runs the operator."""
        check_input(x, self.in_features)
        prescale = self.input_prescale
        check_same_device(x=x, input_prescale=prescale)
        return super().compute(prescaled(prescale, x))


def prescaled(prescale: Tensor, x: Tensor) -> Tensor:
    """``x * prescale``, rounded to the dtype of ``x``."""
    return x * prescale.to(x.dtype)
