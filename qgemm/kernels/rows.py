"""``QuantizedRows``: an activation in int8 or fp8, for all that multiply it: a layer is ``multiply(quantize(x))``."""

from typing import NamedTuple

from torch import Tensor


class QuantizedRows(NamedTuple):
    """``x ~ values * scale``, a scale for each row, which is the last dimension.

    With a zero point it is ``(values - zero_point) * scale``. What that adds to a product is the same for every row,
    and is in the layer's bias.
    """

    values: Tensor
    """int8 or float8_e4m3fn ``[..., K]``, contiguous."""
    scale: Tensor
    """float32 ``[...]``."""
