"""Norms outside of fused layers: one operator, and what it leaves to the module."""

from __future__ import annotations

import copy

import pytest
import torch
from families import FAMILIES, Example
from fusion.structures import STRUCTURES
from torch import nn

from qgemm import fuse, fusion_report, quantize_model, unfuse
from qgemm.kernels.norms import Norm
from qgemm.nn.blocks.binding import fused_of
from qgemm.nn.blocks.steps import NormStep, add, add_and_read
from tests.operators import operators


class _Cut(torch.Tensor):
    """As a DTensor is."""


@pytest.fixture
def example() -> Example:
    example = FAMILIES["llama"]()
    quantize_model(example.model.bfloat16())
    return example


@torch.no_grad()
def test_the_last_norm_is_one_operator(example: Example) -> None:
    expected, norm = example.output(), example.model.get_submodule("model.norm")
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    own = norm(x)
    assert len(operators(norm, x)) > 5
    fuse(example.model)
    assert operators(norm, x) == ["qgemm.add_norm"]
    assert torch.equal(norm(x), own)
    assert torch.equal(norm(hidden_states=x), own)
    assert torch.equal(example.output(), expected)
    record, _ = fusion_report(example.model).others
    assert (record.name, record.kind, record.parts) == ("model.norm", "LlamaRMSNorm", ("norm",))
    assert str(fusion_report(example.model)).endswith(
        "2 of 2 layers fused: 2 x attention, 2 x mlp; 1 x norm, 1 x rotary"
    )
    copied = copy.deepcopy(norm)
    assert operators(copied, x) == ["qgemm.add_norm"]
    unfuse(example.model)
    assert "forward" not in vars(norm)
    assert fused_of(norm) is None


def test_what_is_left_to_the_norm(example: Example) -> None:
    fuse(example.model)
    norm = example.model.get_submodule("model.norm")
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    norm(x).sum().backward()
    assert norm.get_parameter("weight").grad is not None
    norm.requires_grad_(False)
    assert operators(norm, x) == ["qgemm.add_norm"]
    assert norm(x.requires_grad_()).requires_grad
    assert norm(x.detach().float()).dtype == torch.float32
    norm.weight = nn.Parameter(norm.get_parameter("weight").detach().as_subclass(_Cut), requires_grad=False)
    assert len(operators(norm, x.detach())) > 1
    norm.weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16), requires_grad=False)
    assert operators(norm, x.detach()) == ["qgemm.add_norm"]
    with torch.autocast("cpu"):
        assert len(operators(norm, x.detach())) > 1


@torch.no_grad()
def test_the_norm_of_a_branch_may_have_a_bias() -> None:
    norm = nn.LayerNorm(64)
    nn.init.normal_(norm.bias)
    x, residual = torch.randn(2, 3, 64)
    step = NormStep(norm, Norm("layer", norm.eps))
    for found in (add(x, residual, step), add_and_read(x, residual, step, None, ())[0]):
        assert torch.equal(found, residual + norm(x))


def norms_of(model: nn.Module) -> set[str]:
    return {record.name for record in fusion_report(model).others if record.parts == ("norm",)}


def test_norms_that_stay_as_they_are() -> None:
    for family in ("gpt2", "gpt_neox"):  # PyTorch's own
        example = FAMILIES[family]()
        quantize_model(example.model, fuse=True)
        assert not norms_of(example.model)
    example = FAMILIES["llama"]()
    quantize_model(example.model)
    norm = example.model.get_submodule("model.norm")
    norm.forward = lambda x: 2 * x  # type: ignore[method-assign]
    fuse(example.model)
    assert not norms_of(example.model)
    assert fused_of(norm) is None
    # In layers that are fused, others compute them, or call them; in those that aren't, each is by itself.
    example = FAMILIES["deepseek_v3"]()
    quantize_model(example.model)
    expected = example.output()
    fuse(example.model)
    latent = {f"model.layers.{i}.self_attn.kv_a_layernorm" for i in range(2)}
    assert norms_of(example.model) == {"model.norm", *latent}
    assert torch.equal(example.output(), expected)
    example = FAMILIES["t5"]()
    quantize_model(example.model, {"*.0.*.SelfAttention.q": None, "*": "int8"}, fuse=True)
    assert {"encoder.final_layer_norm", "encoder.block.0.layer.0.layer_norm"} <= norms_of(example.model)


@torch.no_grad()
@pytest.mark.parametrize("family", ["cohere", "nemotron"])
def test_layer_norms_of_several_kernels(family: str) -> None:
    """In float32 with a mean, and with a weight to which 1 is added."""
    example = {**FAMILIES, **STRUCTURES}[family]()
    quantize_model(example.model.bfloat16())
    norm, x = example.model.get_submodule("model.norm"), torch.randn(3, 64, dtype=torch.bfloat16)
    nn.init.normal_(norm.get_parameter("weight"))
    own = norm(x)
    assert len(operators(norm, x)) > 1
    fuse(example.model)
    assert norms_of(example.model) == {"model.norm"}
    assert operators(norm, x) == ["qgemm.add_norm"]
    assert (norm(x) != own).float().mean() < 0.01  # another rounding would change a quarter
