"""Layers that stay in float for what they are themselves."""

import pytest
import torch
from torch import nn

from qgemm import QuantLinear, quantize_model


def test_float64_stays() -> None:
    # Its inputs are float64 too, which no quantized layer takes.
    with pytest.raises(ValueError, match=r"its weight is torch\.float64"):
        quantize_model(nn.Sequential(nn.Linear(4, 4)).double())


def test_lazy_layers_stay() -> None:
    model = quantize_model(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)))
    assert isinstance(model[0], QuantLinear)
    assert model(torch.randn(2, 4)).shape == (2, 4)
