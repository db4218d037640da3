"""Norms and activations of models are found by their numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from qgemm.fusion.probe import find_activation, find_norm
from qgemm.kernels.activations import ACTIVATIONS
from qgemm.kernels.norms import NORMS, Norm


class _Norm(nn.Module):
    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.weight, self.eps, self.norm = nn.Parameter(torch.ones(64)), norm.eps, norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x, self.weight)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("kind", NORMS)
def test_each_norm_is_found(kind: str, eps: float) -> None:
    assert find_norm(_Norm(Norm(kind, eps))) == Norm(kind, eps)


def test_norms_of_models() -> None:
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    norms: dict[Any, str] = {
        LlamaRMSNorm(64): "rms",
        Olmo2RMSNorm(64): "rms_once",
        GemmaRMSNorm(64): "rms_plus_one",
        CohereLayerNorm(64): "layer",
        nn.LayerNorm(64): "layer",
        nn.LayerNorm(64, bias=False): "layer",
    }
    for module, kind in norms.items():
        found = find_norm(module.to("meta"))
        assert found is not None, module
        assert found.kind == kind, module


def test_what_is_no_known_norm() -> None:
    other = _Norm(Norm("rms"))
    other.eps = 1e-2  # says something else than it does
    assert find_norm(other) is None
    assert find_norm(nn.LayerNorm(64, elementwise_affine=False)) is None
    assert find_norm(nn.LayerNorm((8, 8))) is None
    assert find_norm(nn.Identity()) is None


def test_activations_are_found() -> None:
    from transformers.activations import ACT2FN

    for name, activation in ACTIVATIONS.items():
        assert find_activation(activation) == name
    names = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2"}
    assert {name: find_activation(ACT2FN[name]) for name in names} == names
    # The same function, with more roundings.
    assert find_activation(ACT2FN["gelu_new"]) == ""
    assert find_activation(nn.Tanh()) == ""
    assert find_activation(nn.Bilinear(2, 2, 2)) == ""
