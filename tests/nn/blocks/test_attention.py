"""Fused attention with caches of transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import FAMILIES
from fusion.structures import STRUCTURES
from torch.utils._python_dispatch import TorchDispatchMode

from qgemm import KeyValueCache, fuse, fusion_report, quantize_model
from qgemm.nn.blocks.attention import FusedAttention
from tests.operators import Operators


class _Rotated(TorchDispatchMode):
    """Keeps the keys and values that are rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.qgemm.rotate.default:
            self.places += [each.data_ptr() for each in out[1:]]
        return out


@torch.no_grad()
def test_a_prompt_becomes_an_empty_cache_without_a_copy() -> None:
    from transformers import DynamicCache

    example = FAMILIES["llama"]()
    quantize_model(example.model)
    model: Any = example.model
    tokens = example.inputs["input_ids"]
    expected = model(tokens, use_cache=True).past_key_values
    continued = model(tokens, past_key_values=copy.deepcopy(expected)).logits
    fuse(model)
    for cache in (None, DynamicCache(config=model.config)):
        with _Rotated() as rotated:
            found = model(tokens, past_key_values=cache, use_cache=True).past_key_values
        assert [each.data_ptr() for layer in found.layers for each in (layer.keys, layer.values)] == rotated.places
        for layer, wanted in zip(found.layers, expected.layers, strict=True):
            assert torch.equal(layer.keys, wanted.keys)
            assert torch.equal(layer.values, wanted.values)
            assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes  # and it holds no more than that
            assert layer.values.untyped_storage().nbytes() == layer.values.nbytes
        # It goes on as any.
        assert torch.equal(model(tokens, past_key_values=found).logits, continued)


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt_neox", "ministral3", "opt"])
def test_a_step_rotates_scales_and_stores_in_one_operator(family: str) -> None:
    """Heads of GPT-NeoX come with their keys and values; queries of Ministral 3 and OPT have factors."""
    model: Any = {**FAMILIES, **STRUCTURES}[family]().model
    quantize_model(model, fuse=True)
    model.set_attn_implementation("qgemm")
    cache, token = KeyValueCache(model.config, 1, 16), torch.ones(1, 1, dtype=torch.int64)
    model(token, past_key_values=cache)
    with Operators() as counted:
        model(token, past_key_values=cache)
    assert counted.names.count("qgemm.rotate_and_store") == 2
    assert all(counted.names.count(f"aten.{name}") <= 1 for name in ("cat", "neg", "log", "mul"))  # not one a layer


# Norms of all columns, of values, keys that are the values, and a gate.
@pytest.mark.parametrize("family", ["olmo2", "gemma4", "gemma4_keys", "qwen3_5"])
@torch.no_grad()
def test_what_the_operator_cannot_rotate_has_the_same_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = {**FAMILIES, **STRUCTURES}[family]()
    model = quantize_model(example.model.bfloat16())
    expected = example.output()
    monkeypatch.setattr(FusedAttention, "_find_call", lambda *_: None)
    fuse(model)
    assert any("attention" in record.parts for record in fusion_report(model).records)
    assert torch.equal(example.output(), expected)
