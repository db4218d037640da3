"""diffusers' models, mostly by a stand-in for the class that qgemm changes, with the ``dtype`` that diffusers has."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import qgemm
from qgemm.quantize import quantize_model

NAME = "diffusers.models.modeling_utils"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Module]:
    """A model in bfloat16 whose first parameter is the weight of a linear layer without a bias."""

    class ModelMixin(nn.Module):
        _keep_in_fp32_modules = ("kept",)

        def __init__(self) -> None:
            super().__init__()
            self.proj_in = nn.Linear(32, 32, bias=False)
            self.kept = nn.LayerNorm(32)
            self.proj_out = nn.Linear(32, 32)

        @property
        def dtype(self) -> torch.dtype:
            return next(parameter.dtype for parameter in self.parameters() if parameter.is_floating_point())

        def save_pretrained(self, folder: Path) -> str:
            return "saved"

    for name in ("diffusers", "diffusers.models", NAME):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[NAME].ModelMixin = ModelMixin  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "qgemm.integrations.diffusers", raising=False)
    importlib.reload(importlib.import_module("qgemm.integrations.diffusers"))  # as a notebook's autoreload does
    made = ModelMixin().to(torch.bfloat16)
    made.kept.float()
    yield made
    sys.modules.pop("qgemm.integrations.diffusers")


# fp8 values are floats to PyTorch, and the first floats of an int8 layer without a bias are its scales.
@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4"])
def test_the_dtype_stays_that_of_the_float_model(scheme: str, model: nn.Module) -> None:
    assert model.dtype == torch.bfloat16
    assert quantize_model(model, scheme).dtype == torch.bfloat16
    model.proj_out.bias = None
    assert isinstance(model.dtype, torch.dtype)  # of what is left
    type(model)._keep_in_fp32_modules = None  # type: ignore[assignment]  # as of most models
    assert model.dtype == torch.float32


def test_a_quantized_model_is_not_saved_as_a_float_one(model: nn.Module, tmp_path: Path) -> None:
    assert model.dtype == torch.bfloat16
    assert model.save_pretrained(tmp_path) == "saved"
    quantize_model(model)
    with pytest.raises(ValueError, match=r"ModelMixin has quantized layers.*qgemm\.save_quantized"):
        model.save_pretrained(tmp_path)


@pytest.mark.slow
def test_from_pretrained_says_what_to_call(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 1}
    built = diffusers.PriorTransformer(**sizes, embedding_dim=64, num_embeddings=4)
    built.save_pretrained(tmp_path / "float")
    qgemm.save_quantized(quantize_model(built), tmp_path / "int8")
    message = r"takes no QGemmConfig: load the float model .* call qgemm\.quantize_model\(model"
    with pytest.raises(ValueError, match=message):
        diffusers.PriorTransformer.from_pretrained(tmp_path / "float", quantization_config=qgemm.QGemmConfig())
    for options in ({}, {"quantization_config": qgemm.QGemmConfig()}):
        with pytest.raises(ValueError, match=r"written by qgemm: load it with qgemm\.load_quantized"):
            diffusers.PriorTransformer.from_pretrained(tmp_path / "int8", **options)
