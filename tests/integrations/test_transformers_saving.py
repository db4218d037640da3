"""``save_pretrained`` with a ``state_dict``, as scripts for several processes call it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.models import tiny_llama
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import qgemm
from integrations.folders import IDS, load


def test_the_given_tensors_are_saved(tmp_path: Path) -> None:
    model, other = (qgemm.quantize_model(tiny_llama()) for _ in range(2))
    model.save_pretrained(tmp_path / "whole", state_dict=other.state_dict())
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "whole")(IDS).logits, other(IDS).logits)
        model.save_pretrained(tmp_path / "own")
        assert torch.equal(load(tmp_path / "own")(IDS).logits, model(IDS).logits)
        assert not torch.equal(model(IDS).logits, other(IDS).logits)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda state: {f"module.{name}": value for name, value in state.items()}, "q_proj.weight isn't there"),
        (lambda state: {name: value.float() for name, value in state.items()}, "q_proj.weight is torch.float32"),
        (lambda state: {n: v.half() if v.dtype == torch.float32 else v for n, v in state.items()}, "weight_scale is"),
        (
            lambda state: {n: v for n, v in state.items() if "layers.1.mlp.up_proj" not in n},
            "1.mlp.up_proj.weight isn't",
        ),
    ],
)
def test_tensors_that_are_none_of_the_model(given: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    model: Any = qgemm.quantize_model(tiny_llama())
    with pytest.raises(ValueError, match=rf"state_dict: .*{message}.*pass all tensors of model.state_dict\(\)"):
        model.save_pretrained(tmp_path, state_dict=given(model.state_dict()))


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_that_are_offloaded(tied: bool, tmp_path: Path) -> None:
    qgemm.quantize_model(tiny_llama(tied)).save_pretrained(tmp_path / "int8")
    device_map = dict.fromkeys(("embed_tokens", "layers.0", "norm", "rotary_emb"), "cpu") | {"layers.1": "disk"}
    device_map = {f"model.{name}": device for name, device in device_map.items()} | {"lm_head": "cpu"}
    model = load(tmp_path / "int8", device_map=device_map, offload_folder=tmp_path / "offloaded")
    model.save_pretrained(tmp_path / "again", state_dict=model.state_dict())
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "again")(IDS).logits, model(IDS).logits)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_fsdp_has_sharded(tied: bool, tmp_path: Path, fsdp_mesh: Any) -> None:
    model: Any = qgemm.quantize_model(tiny_llama(tied))
    with torch.no_grad():
        wanted = model(IDS).logits
    for layer in model.model.layers:
        fully_shard(layer, mesh=fsdp_mesh)
    fully_shard(model, mesh=fsdp_mesh)
    with pytest.raises(ValueError, match=r"is sharded .*state_dict=get_model_state_dict\(model, "):
        model.save_pretrained(tmp_path / "parts")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model.save_pretrained(tmp_path / "whole", state_dict=get_model_state_dict(model, options=options))
    assert torch.equal(load(tmp_path / "whole")(IDS).logits, wanted)
    assert torch.equal(qgemm.load_quantized(tmp_path / "whole")(IDS).logits, wanted)
