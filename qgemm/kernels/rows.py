"""``QuantizedRows``: an activation in int8 or fp8, for all that multiply it: a layer is ``multiply(quantize(x))``."""

from typing import NamedTuple

from torch import Tensor


class QuantizedRows(NamedTuple):
    """``x ~ (values - zero_point) * scale``, a scale for each row, which is the last dimension."""

    values: Tensor
    """int8 or float8_e4m3fn ``[..., K]``, contiguous."""
    scale: Tensor
    """float32 ``[...]``."""
    zero_point: Tensor | None = None
    """One int8 number, None for 0. What it adds to a product is the same for every row, and is in the layer's bias."""
