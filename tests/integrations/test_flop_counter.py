"""FLOPs of quantized layers: what PyTorch's counter says of the float ones."""

from __future__ import annotations

import copy

import pytest
import torch
from families.experts import ALL, inputs
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from qgemm.nn import QuantExperts
from qgemm.quantize import quantize_model


def _flops(model: nn.Module, *args: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        out = model(*args)
        if out.requires_grad:
            out.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "scheme", ["int8", "int8-hadamard", "int8-static-asymmetric", "fp8-block", "int4", "int4-int8", "nvfp4"]
)
def test_a_layer_counts_as_the_float_one(scheme: str, requires_grad: bool) -> None:
    model = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 16, bias=False)).requires_grad_(False)
    x = torch.randn(2, 3, 48, requires_grad=requires_grad)
    calibration = [x.detach()] if "static" in scheme else None
    quantized = quantize_model(copy.deepcopy(model), scheme, calibration=calibration)
    assert _flops(quantized, x) == _flops(model, x) > 0


# Gated or not, packed or not, and experts that are called with the rows of all experts.
@pytest.mark.parametrize(
    ("family", "scheme"), [("gpt_oss", "int8"), ("gpt_oss", "int4"), ("nemotron_h", "int8"), ("llama4", "int8")]
)
def test_experts_count_as_the_float_ones(family: str, scheme: str) -> None:
    module = ALL[family]().requires_grad_(False)
    arguments = inputs(module, 5)
    assert _flops(QuantExperts.from_experts(module, scheme), *arguments) == _flops(module, *arguments) > 0


def test_gradients_of_experts_count_what_they_compute() -> None:
    # The products once more, and that of each gradient: three times a forward in all.
    module = ALL["gpt_oss"]().requires_grad_(False)
    x, *others = inputs(module, 5)
    layer = QuantExperts.from_experts(module)
    assert _flops(layer, x.requires_grad_(), *others) == 3 * _flops(layer, x.detach(), *others)
