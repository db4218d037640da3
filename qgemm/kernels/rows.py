"""``QuantizedRows``: an int8 or fp8 activation, for all layers that use it: a layer is ``multiply(quantize(x))``."""

from typing import NamedTuple

from torch import Tensor


class QuantizedRows(NamedTuple):
    """``x ~ values * scale``, with a scale for each row, which is the last dimension.

    With a zero point it is ``(values - zero_point) * scale``. The zero point's contribution to a product is the same
    for every row, and is in the layer's bias.
    """

    values: Tensor
    """int8 or float8_e4m3fn ``[..., K]``, contiguous."""
    scale: Tensor
    """float32 ``[...]``."""
