"""Models of every architecture compute what transformers does with the floats that it makes of the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import qgemm
from checkpoint.gguf_models import MODELS, float_model, write_model
from qgemm.nn import QuantLayer

# What differs from the config of the float model.
OWN = {"architectures", "dtype", "_name_or_path", "quantization_config", "fusion_config"}


@pytest.mark.filterwarnings("ignore:.* are restored to float")  # Mamba reads the weights of its last linear layers
@pytest.mark.parametrize("architecture", MODELS)
def test_models(architecture: str, tmp_path: Path) -> None:
    model: Any = qgemm.load_quantized(write_model(tmp_path / "a.gguf", architecture), dtype="float32")
    wanted_model: Any = float_model(architecture)
    config = wanted_model.config
    found, wanted = model.config.to_dict(), config.to_dict()
    assert {name for name in wanted if found.get(name) != wanted[name]} <= OWN
    quantized = [module for module in model.modules() if isinstance(module, QuantLayer)]
    assert quantized
    assert {layer.scheme.name for layer in quantized} == {"int8-weight-32"}
    reference = type(wanted_model).from_pretrained(tmp_path, gguf_file="a.gguf", config=config)
    ids = torch.randint(0, 97, (2, 12))
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if architecture == "t5" else {})}
    with torch.no_grad():
        found, wanted = model(**inputs)[0], reference.eval()(**inputs)[0]
    assert wanted.std() > 0.01
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
