"""``rounding_once``: models whose activations round at each operator of PyTorch, as fused layers compute them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn

from qgemm.kernels.activations import ACTIVATIONS

WRITTEN_OUT = {"NewGELUActivation": "gelu_tanh", "BloomGelu": "gelu_tanh", "QuickGELUActivation": "quick_gelu"}
"""Activations that are written out with PyTorch's operators, and the same function in ``ACTIVATIONS``."""


class Rounded(nn.Module):
    """An activation of qgemm's, by name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = ACTIVATIONS[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@contextmanager
def rounding_once(model: nn.Module) -> Iterator[None]:
    """Inside, no activation of ``model`` rounds at each operator."""
    places = [(each, *child) for each in model.modules() for child in each.named_children()]
    written_out = [place for place in places if type(place[-1]).__name__ in WRITTEN_OUT]
    with functions_rounding_once(model):
        for module, name, child in written_out:
            setattr(module, name, Rounded(WRITTEN_OUT[type(child).__name__]))
        yield
        for module, name, child in written_out:
            setattr(module, name, child)


@contextmanager
def functions_rounding_once(model: nn.Module) -> Iterator[None]:
    """Inside, the same of functions in the model's file alone, which ESM also calls outside of its layers."""
    own = vars(sys.modules[type(model).__module__])
    with patch.dict(own, {"gelu": ACTIVATIONS["gelu"]} if "gelu" in own else {}):
        yield
