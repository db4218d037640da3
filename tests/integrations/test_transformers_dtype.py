"""``model.dtype``, and what files say of it: the float model's, whatever a quantized layer adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from families.schemes import EVERY_LAYER, in_models, quantized_model
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, PreTrainedModel, T5EncoderModel

import qgemm
from integrations.folders import assert_same
from qgemm.integrations.transformers import attach_quantizer


class _Projected(PreTrainedModel):
    """As vision models are whose patches come in rows: the first layer is linear."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig, bias: bool = False) -> None:
        super().__init__(config)
        self.project = nn.Linear(128, 128, bias=bias)
        self.norm = nn.LayerNorm(128)
        self.post_init()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.project(x.to(self.dtype)))
        return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", in_models(EVERY_LAYER))
def test_the_dtype_of_the_float_model(scheme: str, bias: bool, tmp_path: Path) -> None:
    model: Any = quantized_model(_Projected(LlamaConfig(), bias).bfloat16(), scheme)
    attach_quantizer(model)
    assert model.dtype == torch.bfloat16
    assert model(torch.randn(2, 128)).dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "theirs")
    with pytest.warns(UserWarning, match="_Projected"):  # which is no class of transformers
        qgemm.save_quantized(model, tmp_path / "ours")
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert model.half().dtype == torch.float16


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_in_a_graph(scheme: str) -> None:
    model: Any = quantized_model(_Projected(LlamaConfig()).bfloat16(), scheme)
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(torch.randn(2, 128)).dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", ["int8", "fp8", "nvfp4"])
def test_a_model_of_quantized_layers_alone(scheme: str) -> None:
    model: Any = _Projected(LlamaConfig(dtype="bfloat16")).bfloat16()
    del model.norm
    assert quantized_model(model, scheme).dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_a_class_keeps_in_float32_is_not_the_values_of_quantized_layers(
    scheme: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    example = FAMILIES["t5"]()
    model: Any = qgemm.quantize_model(example.model.to(dtype), scheme)  # wo too, which T5 would load in float32
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    assert "_get_dtype_plan" not in vars(loaded)
    assert_same(loaded, model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_class_with_other_names_than_the_files(dtype: torch.dtype, tmp_path: Path) -> None:
    # Up to 5.20, transformers reads tensors that it renames in the dtype of the files, if there is a quantizer.
    whole: Any = qgemm.quantize_model(FAMILIES["t5"]().model)
    whole.save_pretrained(tmp_path / "whole")
    encoder = T5EncoderModel.from_pretrained(tmp_path / "whole", dtype=dtype)
    assert_same(encoder.encoder, type(whole).from_pretrained(tmp_path / "whole", dtype=dtype).encoder)
    language: Any = qgemm.quantize_model(FAMILIES["llama"]().model)
    language.save_pretrained(tmp_path / "language")
    base = AutoModel.from_pretrained(tmp_path / "language", dtype=dtype)
    assert base.dtype == dtype
    assert_same(base, AutoModelForCausalLM.from_pretrained(tmp_path / "language", dtype=dtype).model)
