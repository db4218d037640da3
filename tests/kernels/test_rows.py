"""``QuantizedRows``: a layer is ``multiply(quantize(x))``."""

import torch

from qgemm.kernels import dispatch
from qgemm.kernels.rows import QuantizedRows
from tests.kernels.test_linear import Parameters


def test_layers_share_rows_that_are_quantized_once(device: torch.device) -> None:
    x = torch.randn(2, 3, 64, device=device)
    rows = QuantizedRows(*dispatch.quantize_rows(x))
    assert rows.values.shape == x.shape
    assert rows.scale.shape == x.shape[:-1]
    for n, bias in ((40, True), (100, False)):
        layer = Parameters(device, n, 64, bias=bias)
        out = dispatch.multiply(rows, layer.weight, layer.weight_scale, layer.bias, x.dtype)
        assert torch.equal(out, layer.expected(x))
