"""Models of every architecture compute what transformers does with the floats that it makes of the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import qgemm
from checkpoint.gguf_files import random_blocks
from checkpoint.gguf_models import MODELS, float_model, write_model
from qgemm import CheckpointError
from qgemm.checkpoint.gguf_names import ModelNames
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


def test_the_table_is_made_for_each_child_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers makes it for each module inside, which takes as long as reading a large model."""
    calls: list[Any] = []
    table = gguf.get_tensor_name_map
    monkeypatch.setattr(gguf, "get_tensor_name_map", lambda *args: calls.append(args) or table(*args))
    model: Any = float_model("llama")
    names = ModelNames(Path("a.gguf"), "llama", model, model.config.to_dict())
    assert sorted(names.by_name.values()) == sorted(model.state_dict())
    assert len(calls) == 1 + len(list(model.children()))


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    names = ModelNames(tmp_path, "llama", float_model("llama"), {"num_attention_heads": 3, "num_key_value_heads": 3})
    with pytest.raises(CheckpointError, match=r"settings don't fit tensor blk.0.attn_q.weight, \[64, 64\]: ValueError"):
        names.row_order("blk.0.attn_q.weight", 64, 64)
    names = ModelNames(tmp_path, "bloom", float_model("bloom"), {"hidden_size": 64})
    with pytest.raises(CheckpointError, match=r"settings don't fit tensor blk.0.attn_qkv.bias, \[192\]: KeyError"):
        names.changed_shape("blk.0.attn_qkv.bias", (192,))


def test_no_columns() -> None:
    """A header may say that there are more rows than memory holds; their order is of no use."""
    names = ModelNames(
        Path("a.gguf"), "llama", float_model("llama"), {"num_attention_heads": 4, "num_key_value_heads": 2}
    )
    assert names.row_order("blk.0.attn_q.weight", 1 << 50, 0) == slice(None)


@pytest.mark.parametrize(
    ("architecture", "name", "tensor", "problem"),
    [
        ("mamba", "blk.0.ssm_conv1d.weight", np.ones((128, 5), dtype="f4"), r"conv1d.weight has shape \[128, 1, 5\]"),
        ("llama", "blk.0.attn_norm.weight", ("Q8_0", random_blocks("Q8_0", 32)), r"norm.weight has shape \[32\]"),
    ],
    ids=["of a convolution", "of a vector in blocks"],
)
def test_another_shape(architecture: str, name: str, tensor: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=problem):
        qgemm.load_quantized(write_model(tmp_path / "a.gguf", architecture, "Q8_0", {name: tensor}))
