"""``load_quantized(dtype=...)``: the dtype of what isn't quantized, in GGUF files and in safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qgemm
from checkpoint.gguf_models import write_model
from checkpoint.samples import IDS, SAMPLES
from qgemm.nn import QuantLayer


def float_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Of parameters that aren't a quantized layer's."""
    modules = [module for module in model.modules() if not isinstance(module, QuantLayer)]
    return {parameter.dtype for module in modules for parameter in module.parameters(recurse=False)}


@pytest.mark.parametrize("name", ["awq-gemm-g32-skip", "gguf"])
def test_dtypes(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "a.gguf", "llama") if name == "gguf" else SAMPLES / name
    first: Any = qgemm.load_quantized(folder)
    assert float_dtypes(first) == {torch.bfloat16 if name == "gguf" else torch.float16}
    for dtype in ("float32", torch.bfloat16):
        model: Any = qgemm.load_quantized(folder, dtype=dtype)
        wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        assert float_dtypes(model) == {wanted}
        assert model.config.dtype == wanted
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        for one, other in zip(model.modules(), first.modules(), strict=True):
            if isinstance(one, QuantLayer):
                assert torch.equal(one.dequantize(torch.float32).weight, other.dequantize(torch.float32).weight)
        with torch.no_grad():
            assert model(IDS).logits.dtype == wanted


def test_refused_dtypes(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf", "llama")
    for dtype in ("int8", torch.float64, "float33", 3):
        with pytest.raises(ValueError, match=r"dtype is .*; it must be one of float16, bfloat16, float32"):
            qgemm.load_quantized(path, dtype=dtype)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype is for a model that is built; the given model has dtypes of its own"):
        qgemm.load_quantized(path, model=nn.Linear(3, 3), dtype="float32")
