"""``PyTorchModelHubMixin``: it doesn't save what its own ``from_pretrained`` would take for a float model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import nn

import qgemm


class Model(nn.Module, PyTorchModelHubMixin):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_quantized_layers_are_saved_by_qgemm_alone(tmp_path: Path) -> None:
    model = Model()
    model.save_pretrained(tmp_path / "float")
    assert torch.equal(Model.from_pretrained(tmp_path / "float").inner.weight, model.inner.weight)
    qgemm.quantize_model(model, "fp8")
    with pytest.raises(ValueError, match=r"Model has quantized layers.*qgemm\.save_quantized"):
        model.save_pretrained(tmp_path / "quantized")
    qgemm.save_quantized(model, tmp_path / "quantized")
    x = torch.randn(2, 32)
    assert torch.equal(qgemm.load_quantized(tmp_path / "quantized", model=Model)(x), model(x))
