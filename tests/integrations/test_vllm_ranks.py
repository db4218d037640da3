"""Several ranks in vLLM, each a process: they give the tokens of transformers' model, cut in the same way."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from nn.test_shard import shards
from torch import Tensor, nn

import qgemm
from integrations.vllm_engine import (
    calibration_data,
    environment_of_ranks,
    model,
    printed_by,
    quantized,
    tokens_of_transformers,
)
from qgemm.nn import QuantExperts, QuantLayer

pytestmark = pytest.mark.vllm


def tokens_of(kind: str, folder: Path) -> list[list[int]]:
    """The tokens that ``vllm_two_ranks.py`` prints."""
    tokens: list[list[int]] = printed_by(
        "integrations.vllm_two_ranks", [kind, str(folder), str(folder / "counts")], folder, environment_of_ranks()
    )
    return tokens


class Parts(nn.Module):
    """A layer as two ranks compute it: each has scales of its own part of a row."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.is_mixture = isinstance(layer, QuantExperts)
        self.parts = nn.ModuleList(shards(layer, "column" if self.is_mixture else "row"))

    def forward(self, x: Tensor, *others: Any) -> Any:
        inputs = [x, x] if self.is_mixture else x.chunk(2, -1)
        return sum(part(own, *others) for part, own in zip(self.parts, inputs, strict=True))


def as_ranks(made: Any) -> Any:
    """``made`` with the sums of two ranks."""
    for name, module in list(made.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if isinstance(module, QuantLayer) and leaf in ("o_proj", "down_proj", "experts"):
            setattr(made.get_submodule(parent), leaf, Parts(module))
    return made


# One layer of each kind that a rank has a part of. Blocks of a rotation end within a half of a row.
MIXED = {
    "*.0.self_attn.*": "int8-outliers-16",
    "*.0.mlp.*": "fp8-block",
    "*.1.self_attn.o_proj": "fp8",
    "*.1.self_attn.*": "int8-hadamard",
    "*.1.mlp.down_proj": "nvfp4",
    "*.1.mlp.*": "int8",
}


@torch.no_grad()
def test_layers_of_many_kinds_on_two_ranks(tmp_path: Path) -> None:
    made = qgemm.quantize_model(model(), MIXED, calibration=calibration_data(), progress=False)
    made.save_pretrained(tmp_path / "mixed")
    found = tokens_of("tensor", tmp_path / "mixed")
    assert found == tokens_of_transformers(as_ranks(made))


# With scales that don't depend on the row, a cut model computes what the whole one does.
@pytest.mark.parametrize("scheme", ["int8-static-asymmetric", "int4-32"])
def test_two_ranks_give_the_tokens_of_one(scheme: str, tmp_path: Path) -> None:
    expected = quantized(tmp_path / scheme, scheme)
    assert tokens_of("tensor", tmp_path / scheme) == expected


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "scheme", "whole"),
    [
        ("qwen3_moe", "int8", True),
        ("qwen3_moe", "int8", False),
        ("qwen3_moe", "int4-32", False),
        ("gpt_oss", "mxfp4", True),
        ("gpt_oss", "mxfp4", False),
    ],
)
def test_experts_on_two_ranks(family: str, scheme: str, whole: bool, tmp_path: Path) -> None:
    """Each rank has whole experts, or columns of each expert."""
    made = qgemm.quantize_model(model(family), scheme, skip="*.self_attn", progress=False)
    made.save_pretrained(tmp_path / "mixture")
    found = tokens_of("experts" if whole else "tensor", tmp_path / "mixture")
    assert found == tokens_of_transformers(made if whole else as_ranks(made))


def test_two_ranks_with_fused_kernels(tmp_path: Path) -> None:
    expected = quantized(tmp_path / "int8", "int8-static")
    assert tokens_of("fused", tmp_path / "int8") == expected
    assert sorted((tmp_path / "int8" / "counts").read_text().split()) == ["1", "1", "2", "2", "3", "3"], "of each rank"


@pytest.mark.parametrize("scheme", ["int8"])
def test_layers_on_two_ranks(scheme: str, tmp_path: Path) -> None:
    expected = quantized(tmp_path / scheme, scheme)
    assert tokens_of("pipeline", tmp_path / scheme) == expected


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray isn't installed")
def test_four_ranks_in_two_nodes_of_ray(tmp_path: Path) -> None:
    from integrations.vllm_ray import plugin, two_nodes

    expected = quantized(tmp_path / "int8", "int8-static-asymmetric")
    plugin(tmp_path / "plugin")
    environment = environment_of_ranks(tmp_path / "plugin")
    with two_nodes(environment, tmp_path) as address:
        environment["RAY_ADDRESS"] = address
        tokens, ranks = printed_by("integrations.vllm_ray", [str(tmp_path / "int8")], tmp_path, environment)
    assert tokens == expected
    # Layers are split between the nodes, columns and rows between the ranks of a node.
    first, second = ranks[0], ranks[2]
    assert first[0] != second[0]
    assert ranks == [first, first, second, second]
    layers = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    for number, (_, held) in enumerate((first, second)):
        assert held == [f"model.layers.{number}.{layer}" for layer in layers]
