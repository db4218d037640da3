"""GPT-OSS and Mixtral from GGUF compute what the float model does whose values are in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qgemm
from checkpoint.gguf_mixtures import write_gpt_oss, write_mixtral
from qgemm import CheckpointError
from qgemm.nn import QuantLayer

IDS = torch.arange(3, 27).view(2, 12)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """The floats that the tensors of ``model`` stand for, by their names in the float model."""
    found = dict(model.state_dict())
    for layer, module in model.named_modules():
        if isinstance(module, QuantLayer):
            found = {name: value for name, value in found.items() if not name.startswith(f"{layer}.")}
            made = module.dequantize(torch.float32)
            own = made if isinstance(made, dict) else dict(made.named_parameters())
            found |= {f"{layer}.{leaf}": value for leaf, value in own.items()}
    return found


@torch.no_grad()
def check_same(path: Path, wanted: Any, but: str = "-") -> Any:
    """Values are those of the float model ``wanted``, bit for bit; its logits are nearly the same.

    ``but``: a part of the names of tensors whose values lie in another order.
    """
    model: Any = qgemm.load_quantized(path, dtype="float32")
    assert type(model) is type(wanted)
    found, config = model.config.to_dict(), wanted.config.to_dict()
    own = {"architectures", "dtype", "_name_or_path", "quantization_config", "fusion_config"}
    assert {name for name in config if found.get(name) != config[name]} <= own
    values = values_of(model)
    assert values.keys() == wanted.state_dict().keys()
    for name, value in wanted.state_dict().items():
        assert but in name or torch.equal(values[name], value), name
    found, logits = model(IDS).logits, wanted(IDS).logits
    assert logits.std() > 0.1
    assert torch.allclose(found, logits, rtol=1e-4, atol=1e-5)
    return model


def check_same_when_saved(path: Path, wanted: Any) -> None:
    """As ``check_same`` of layers in 8 bits; and qgemm's own folder gives the same logits."""
    model = check_same(path, wanted)
    assert {layer.scheme.name for layer in model.modules() if hasattr(layer, "scheme")} == {"int8-weight-32"}
    qgemm.save_quantized(model, path.parent / "saved")
    assert torch.equal(qgemm.load_quantized(path.parent / "saved")(IDS).logits, model(IDS).logits)


def test_gpt_oss(tmp_path: Path) -> None:
    model = check_same(tmp_path / "a.gguf", write_gpt_oss(tmp_path / "a.gguf"), ".experts.")
    experts = model.model.layers[1].mlp.experts
    assert experts.scheme.name == "mxfp4"
    assert model.model.layers[1].self_attn.o_proj.scheme.name == "int8-weight-32"
    qgemm.save_quantized(model, tmp_path / "saved")
    assert torch.equal(qgemm.load_quantized(tmp_path / "saved")(IDS).logits, model(IDS).logits)


def test_gpt_oss_whose_gates_and_ups_are_one_tensor(tmp_path: Path) -> None:
    model = check_same(tmp_path / "a.gguf", write_gpt_oss(tmp_path / "a.gguf", fused=True), ".experts.")
    assert model.model.layers[1].mlp.experts.scheme.name == "mxfp4"


def test_gpt_oss_whose_positions_are_not_scaled(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path / "a.gguf", without="scaling")
    model: Any = qgemm.load_quantized(tmp_path)
    assert model.config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}


def test_a_bias_of_experts_that_is_missing(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path / "a.gguf", without="blk.1.ffn_up_exps.bias")
    with pytest.raises(CheckpointError, match=r"lacks .*\.experts\.0\.up_proj\.bias, from which"):
        qgemm.load_quantized(tmp_path)


@pytest.mark.parametrize("merged", [True, False])
def test_mixtral(merged: bool, tmp_path: Path) -> None:
    wanted = write_mixtral(tmp_path / "a.gguf", merged)
    experts = check_same(tmp_path / "a.gguf", wanted).model.layers[0].mlp.experts
    assert experts.scheme.name == "int4-32+int8-weight-32"
